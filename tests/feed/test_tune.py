"""The largest batch and the number of workers: near the limit, few trials, and everything back as it was."""

import copy
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

import everygpu
from everygpu import DataParallel, Replicated, find_batch_size, tune_workers
from everygpu.errors import DeviceError, OptionError, RankError, SplitError
from everygpu.feed import tune
from everygpu.feed.tune import PRECISION, resize

EXAMPLE = (torch.arange(6.0).reshape(3, 2), torch.arange(3))
FOUR = (torch.arange(8.0).reshape(4, 2), torch.arange(4))


@pytest.fixture(autouse=True)
def on_the_cpu(request, monkeypatch):
    """Search on CPU replicas, where the step itself says when memory runs out."""
    if request.node.name != "test_without_a_gpu_it_is_refused" and "gpu" not in request.keywords:
        monkeypatch.setattr(tune, "require_gpus", lambda devices: [])


class Training:
    """A training step that has memory for so many rows."""

    def __init__(self, limit, model=None):
        self.limit = limit
        self.model = nn.Linear(2, 2) if model is None else model
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.sizes = []

    def __call__(self, batch):
        x, y = batch
        self.sizes.append(len(x))
        if len(x) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y % 2)
        loss.backward()
        self.optimizer.step()

    def search(self, batch=EXAMPLE, **options):
        return find_batch_size(self, batch, self.model, self.optimizer, **options)


@settings(max_examples=50)
@given(limit=st.integers(1, 500), most=st.integers(1, 300), count=st.integers(1, 5))
def test_lands_just_below_the_limit(limit, most, count):
    sizes = []

    def step(batch):
        sizes.append(len(batch))
        if len(batch) > limit:
            raise torch.OutOfMemoryError

    model = DataParallel(nn.Linear(1, 1), ["cpu"] * count)
    options = {"batch": torch.ones(3), "model": model, "max_rows": most}
    lowest = min(count, most)
    if limit < lowest:
        with pytest.raises(torch.OutOfMemoryError, match=f"not even {lowest} rows fit"):
            find_batch_size(step, **options)
        return
    report = find_batch_size(step, **options)
    reachable = min(limit, most)
    assert report.num_rows <= reachable
    assert report.num_rows >= min(reachable * (1 - PRECISION) - count, reachable)
    assert lowest <= min(sizes)
    assert max(sizes) <= most


def test_without_a_gpu_it_is_refused():
    training = Training(10**9)
    with pytest.raises(DeviceError, match="the model is on no GPU"):
        training.search()
    assert training.sizes == []


def test_several_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(tune, "current_group", lambda: SimpleNamespace(size=2))
    with pytest.raises(RankError, match="Search in a run of one process"):
        Training(9).search()


def test_sizes_are_doubled_and_then_bisected():
    report = Training(20).search()
    sizes = [(3, True), (6, True), (12, True), (24, False), (18, True), (21, False), (19, True), (20, True)]
    assert report.trials == (*sizes,)
    assert report.num_rows == 20


def test_the_example_itself_may_not_fit():
    report = Training(5).search(tuple(t.repeat_interleave(16, 0) for t in EXAMPLE))
    assert [size for size, _ in report.trials] == [48, 24, 12, 6, 3, 4, 5]
    assert report.num_rows == 5


def test_every_device_gets_as_many_rows():
    report = Training(100, DataParallel(nn.Linear(2, 2), ["cpu"] * 3)).search()
    assert all(size % 3 == 0 for size, _ in report.trials)
    assert report.num_rows in (96, 99)


def test_memory_that_runs_out_in_a_replica():
    class Hungry(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self, x):
            if threading.current_thread().name.startswith("everygpu-replica") and len(x) > 10:
                raise torch.OutOfMemoryError("on the second device")
            return x @ self.weight

    model = DataParallel(Hungry(), ["cpu"] * 2)
    report = Training(1000, model).search()
    assert 19 <= report.num_rows <= 21


@pytest.mark.parametrize("num_rows", [1, 2, 4, 10])
def test_rows_are_repeated(num_rows):
    mask = Replicated(torch.ones(5))
    batch = {"x": torch.arange(6).reshape(3, 2), "more": [torch.arange(3), "text", torch.tensor(1.0), mask]}
    out = resize(batch, num_rows, 0)
    assert out["x"][:, 0].tolist() == [2 * (i % 3) for i in range(num_rows)]
    assert out["more"][0].tolist() == [i % 3 for i in range(num_rows)]
    assert out["more"][1:] == ["text", torch.tensor(1.0), mask]
    assert resize(batch["x"], 3, 1).tolist() == resize(batch["x"], 3, -1).tolist() == [[0, 1, 0], [2, 3, 2], [4, 5, 4]]
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert resize(images, 5, 0).is_contiguous(memory_format=torch.channels_last)


def test_other_errors_are_the_users():
    def step(batch):
        raise ValueError("labels must be below 10")

    with pytest.raises(ValueError, match="below 10"):
        find_batch_size(step, EXAMPLE, nn.Linear(2, 2))


class TestRestoring:
    def warmed_up(self, make=torch.optim.Adam):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
        training = Training(20, DataParallel(model, ["cpu"] * 2))
        training.optimizer = make(model.parameters())
        for _ in range(2):
            training((torch.rand(4, 2), torch.arange(4)))
        return training

    @pytest.mark.parametrize(
        "make",
        [
            torch.optim.Adam,
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
            lambda p: torch.optim.Adam(p, amsgrad=True),
        ],
        ids=["Adam", "SGD", "tensor lr", "amsgrad"],
    )
    def test_model_and_optimizer_are_as_before(self, make):
        training = self.warmed_up(make)
        model, optimizer = training.model, training.optimizer
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        grads = [p.grad.clone() for p in model.parameters()]
        identities = [(id(p), id(p.grad), p.data_ptr()) for p in model.parameters()]
        model.eval()

        def step(batch):
            model.train()
            training(batch)
            optimizer.param_groups[0]["lr"] = 7.0  # as a scheduler does

        find_batch_size(step, FOUR, model, optimizer)
        torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
        torch.testing.assert_close([p.grad for p in model.parameters()], grads, rtol=0, atol=0)
        assert [(id(p), id(p.grad), p.data_ptr()) for p in model.parameters()] == identities
        assert not model.training

    @pytest.mark.parametrize("wrap", [lambda model: model, lambda model: DataParallel(model, ["cpu"] * 2)])
    def test_buffers_that_a_step_replaces(self, wrap):
        class Recurrent(nn.Linear):
            def forward(self, x):
                self.state = super().forward(x).detach()
                return self.state

        model = Recurrent(2, 2)
        model.register_buffer("state", torch.zeros(1))
        model.register_buffer("unset", None)
        state, wrapped = model.state, wrap(model)
        find_batch_size(lambda batch: wrapped(batch[0]), FOUR, wrapped, max_rows=16)
        assert model.state is state
        assert state.tolist() == [0]

    @pytest.mark.parametrize("warm_steps", [0, 2])
    def test_a_train_step_whose_state_is_on_all_devices(self, warm_steps):
        ends = []
        for searches in (False, True):
            torch.manual_seed(0)
            model = DataParallel(nn.Linear(2, 2), ["cpu"] * 2)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            train = everygpu.TrainStep(model, nn.CrossEntropyLoss(), optimizer)

            def step(batch, train=train):
                if len(batch[0]) > 20:
                    raise torch.OutOfMemoryError
                train(batch[0], batch[1] % 2)

            for _ in range(warm_steps):
                step(FOUR)
            if searches:
                assert find_batch_size(step, FOUR, model, optimizer).num_rows >= 19
            for _ in range(3):
                step((torch.ones(4, 2), torch.arange(4)))
            ends.append((model.state_dict(), optimizer.state_dict()["state"]))
        torch.testing.assert_close(*ends, rtol=0, atol=0)

    def test_a_fresh_optimizer_stays_fresh(self):
        training = Training(20)
        training.search(FOUR)
        assert not training.optimizer.state
        assert all(p.grad is None for p in training.model.parameters())

    def test_replicas_and_their_threads_are_given_up(self):
        model = DataParallel(nn.Linear(2, 2), ["cpu"] * 3)
        training = Training(20, model)
        training.search(FOUR)
        assert model._replicas is None
        assert len(model(torch.ones(6, 2))) == 6


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"headroom_pct": 100}, OptionError, "headroom_pct is from 0"),
        ({"headroom_pct": -1}, OptionError, "headroom_pct is from 0"),
        ({"batch": "text"}, OptionError, "has no tensor with rows"),
        ({"batch": torch.ones(0, 2)}, OptionError, "has no tensor with rows"),
        ({"batch": (torch.ones(2), torch.ones(3))}, SplitError, "got 2 in batch"),
        *(({"max_rows": value}, OptionError, "max_rows is a whole") for value in (0, None, float("inf"), True)),
        ({"headroom_pct": float("nan")}, OptionError, "headroom_pct is from 0"),
    ],
    ids=str,
)
def test_wrong_options_of_a_batch(options, error, message):
    arguments = {"step": lambda batch: None, "batch": EXAMPLE, "model": nn.Linear(2, 2), **options}
    with pytest.raises(error, match=message):
        find_batch_size(**arguments)


@pytest.mark.gpu
def test_on_gpus_it_lands_near_the_limit_and_returns_the_memory(devices):
    used = devices(2)
    if used[0].type != "cuda":
        pytest.skip("of CUDA")
    limit = 2 * 2**30
    fractions = [torch.cuda.get_per_process_memory_fraction(d) for d in used]
    for d in used:
        total = torch.cuda.get_device_properties(d).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(d) + limit) / total, d)
    try:
        model = DataParallel(nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))), used)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def step(x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        step(torch.ones(8, 4096))  # what libraries take once, they keep
        optimizer.zero_grad()
        torch.cuda.empty_cache()
        before = [torch.cuda.memory_reserved(d) for d in used]
        report = find_batch_size(step, torch.ones(8, 4096), model, optimizer, headroom_pct=0)
        after = [torch.cuda.memory_reserved(d) for d in used]
        for a, b in zip(after, before):
            assert a <= 1.05 * b + 2**21
        step(torch.ones(int(report.num_rows * 0.98), 4096))  # fits again
        with pytest.raises(torch.OutOfMemoryError):
            step(torch.ones(int(report.num_rows * 1.15), 4096))
    finally:
        for d, fraction in zip(used, fractions):
            torch.cuda.set_per_process_memory_fraction(fraction, d)


# Workers: measured on a twin of the loader, chosen small.


SMALL = DataLoader(TensorDataset(torch.ones(2)))


class Slow(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        time.sleep(0.004)
        return torch.tensor(float(i))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(100.0))


@pytest.mark.parametrize(
    ("rates", "candidates", "chosen", "tried"),
    [
        ({0: 1, 1: 2, 2: 4, 4: 8, 8: 16, 16: 32}, None, 16, [0, 1, 2, 4, 8, 16]),
        ({0: 10, 1: 10, 2: 20, 4: 20, 8: 20, 16: 99}, None, 2, [0, 1, 2, 4, 8]),
        ({0: 10, 1: 6, 2: 9, 4: 18, 8: 30, 16: 30}, None, 8, [0, 1, 2, 4, 8, 16]),  # processes start slowly
        ({3: 10, 5: 10, 7: 10, 6: 10, 1: 10, 2: 10, 9: 20}, [3, 5, 7, 6, 1, 2, 9], 9, [3, 5, 7, 6, 1, 2, 9]),
        ({0: 10, 1: 20, 2: 20.5, 4: 20.9}, [0, 1, 2, 4], 1, [0, 1, 2, 4]),
        ({4: 30, 2: 29, 1: 10}, [4, 2, 1], 2, [4, 2, 1]),
    ],
)
def test_the_smallest_that_is_as_fast(monkeypatch, rates, candidates, chosen, tried):
    monkeypatch.setattr(tune, "count_cores", lambda: 16)
    monkeypatch.setattr(tune, "_measure", lambda loader, target, seconds: rates[loader.num_workers])
    report = tune_workers(SMALL, "cpu", candidates=candidates)
    assert (report.num_workers, list(report.batches_per_s)) == (chosen, tried)


def test_more_workers_load_a_slow_dataset_faster():
    loader = DataLoader(Slow(), batch_size=4)
    for _ in range(20):  # on a busy machine, the workers may wait for a core
        report = tune_workers(loader, ["cpu"] * 2, candidates=[0, 2], seconds=0.3)
        slow, fast = report.batches_per_s.values()
        assert 0 < slow * 0.016 <= 1  # four items of 4 ms
        if fast > 1.2 * slow:
            break
    assert report.num_workers == 2
    assert loader.num_workers == 0


def test_generators_are_as_before_and_waiting_is_no_news(caplog):
    loader = DataLoader(torch.arange(400.0), batch_size=2, shuffle=True)
    before = torch.get_rng_state()
    tune_workers(loader, "cpu", candidates=[0, 1], seconds=0.05)
    assert torch.get_rng_state().equal(before)
    assert caplog.messages == []


def test_a_loader_of_one_batch_and_batches_that_are_none():
    for loader in (DataLoader(range(2), 2), DataLoader(range(3), collate_fn=lambda items: None)):
        assert tune_workers(loader, "cpu", candidates=[0], seconds=0.01).batches_per_s[0] > 0


def test_a_twin_gives_the_same_batches():
    data = TensorDataset(torch.arange(10))
    for options in (
        {"batch_size": 4, "drop_last": True},
        {"batch_size": None},
        {"batch_sampler": BatchSampler(SequentialSampler(data), 3, False)},
        {"batch_size": 2, "num_workers": 1, "prefetch_factor": 3, "persistent_workers": True, "timeout": 5},
    ):
        loader = DataLoader(data, **options)
        assert str(list(tune.with_workers(loader, 0))) == str(list(loader))
        assert str(list(tune.with_workers(loader, 1))) == str(list(loader))
        if loader.persistent_workers:
            loader._iterator._shutdown_workers()
    stream = DataLoader(Stream(), batch_size=7)
    assert str(list(tune.with_workers(stream, 1))) == str(list(stream))
    twin = tune.with_workers(DataLoader(data, num_workers=1, prefetch_factor=7, timeout=3), 2)
    assert (twin.num_workers, twin.prefetch_factor, twin.timeout) == (2, 7, 3)


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        ([1, 2], {}, "list is no DataLoader"),
        (SMALL, {"seconds": 0}, "seconds must be more than 0, got 0"),
        *((SMALL, {"candidates": value}, "candidates are whole numbers") for value in ([], [-1], 3, [True])),
        (DataLoader(TensorDataset(torch.ones(0))), {"candidates": [0]}, "gives no batch"),
    ],
    ids=lambda value: str(value) if isinstance(value, (str, dict)) else "loader",
)
def test_wrong_options(loader, options, message):
    with pytest.raises(OptionError, match=message):
        tune_workers(loader, "cpu", **options)
