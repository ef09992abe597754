"""The feeder: every batch, in order, on its devices, once."""

import itertools
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import everygpu
from everygpu import DataParallel, Feeder, Replicated
from everygpu.errors import DeviceError, OptionError, SplitError
from everygpu.parallel import ShardedBatch, gather
from tests.feed.loaders import CPU, batches, feeder_threads, numbered, values
from tests.parallel.oracle import TOLERANCE, Mlp, pair, rows, score


def repr_of(value):
    return type(value).__name__ if not isinstance(value, (str, dict)) else str(value)


PROPERTY = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])


@PROPERTY
@given(
    num=st.integers(0, 7),
    size=st.integers(0, 9),
    count=st.integers(1, 4),
    prefetch=st.integers(0, 4),
)
def test_batches_come_once_in_order_and_split_as_planned(devices, num, size, count, prefetch):
    used = devices(count)
    loader = batches(num, size)
    out = list(Feeder(loader, used, prefetch=prefetch))
    assert len(out) == num
    for (x, y), (expected_x, expected_y) in zip(out, loader):
        assert x.device == y.device == used[0]
        assert gather(x).cpu().equal(expected_x)
        assert gather(y).cpu().equal(expected_y)
        shards = everygpu.parallel.scatter(expected_x, used)
        if isinstance(x, ShardedBatch):
            assert [s.shape for s in x.shards] == [s.shape for s in shards]
            assert [s.device for s in x.shards] == used[: len(shards)]


def test_data_parallel_uses_the_shards_where_they_are(devices):
    used = devices(3)
    model = DataParallel(nn.Linear(3, 2), used)
    for x, y in Feeder(batches(3), model):
        assert isinstance(x, ShardedBatch)
        (shards,) = [[s.data_ptr() for s in everygpu.parallel.scatter(x, used)]]
        assert shards == [p.data_ptr() for p in x._parts]
        loss = nn.functional.cross_entropy(model(x), y % 2)
        loss.backward()
        assert x._joined.tensor is None
        assert y._joined.tensor is None


@pytest.mark.parametrize("options", [{}, {"split": "even"}, {"split": [1, 0, 3]}], ids=str)
def test_training_equals_one_device(devices, options):
    used = devices(3)
    if len(used) < 3 and "split" in options:
        options = {"split": "even"}
    model, bare = pair(Mlp, used, **options)
    data = [rows(num_rows, 3, device=CPU, seed=num_rows) for num_rows in (7, 1, 10, 2)]
    for module, feed in ((model, Feeder(data, model)), (bare, (x.to(used[0]) for x in data))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        for x in feed:
            optimizer.zero_grad()
            score(module(x)).backward()
            optimizer.step()
    torch.testing.assert_close(model.module.state_dict(), bare.state_dict(), **TOLERANCE)


@pytest.mark.parametrize("pinned", [False, True])
def test_batches_are_right_while_the_devices_are_behind(devices, pinned):
    """Memory of a batch may be used for the next only when the work that was queued on it is done."""
    used = devices(2)
    on_gpus = used[0].type == "cuda"
    loader = (torch.full((64, 4096), float(i), pin_memory=pinned and on_gpus) for i in range(25))
    totals = []
    for x in Feeder(loader, used):
        for device in used if on_gpus else ():
            with torch.cuda.device(device):
                torch.cuda._sleep(10_000_000)
        totals.append(x.mean())
        del x
    assert [t.item() for t in totals] == list(range(25))


class TestTargets:
    def test_a_wrapped_model_gives_devices_dim_and_split(self):
        model = DataParallel(nn.Linear(3, 2), ["cpu"] * 2, dim=1, split=[1, 3])
        (x,) = Feeder([torch.ones(3, 8)], model)
        assert [tuple(s.shape) for s in x.shards] == [(3, 2), (3, 6)]

    def test_a_compiled_wrapper(self):
        model = torch.compile(DataParallel(nn.Linear(3, 2), ["cpu"] * 2), backend="eager")
        assert Feeder([], model).devices == [CPU] * 2

    def test_a_train_step(self):
        def train(feed_to_step):
            torch.manual_seed(0)
            model = DataParallel(nn.Linear(3, 2), ["cpu"] * 2, split="even")
            step = everygpu.TrainStep(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()))
            data = [(torch.rand(5, 3), torch.arange(5) % 2) for _ in range(4)]
            for x, y in Feeder(data, step) if feed_to_step else data:
                assert isinstance(x, ShardedBatch) == feed_to_step
                step(x, y)
            return [p.detach().clone() for p in model.parameters()]

        torch.testing.assert_close(train(True), train(False), rtol=1e-6, atol=1e-7)

    def test_what_is_iterated_by_index_alone(self):
        class Batches:
            def __getitem__(self, i):
                return [torch.ones(2), torch.zeros(2)][i]

        assert [x.tolist() for x in Feeder(Batches(), "cpu")] == [[1, 1], [0, 0]]


class TestBatches:
    def test_containers_are_rebuilt_around_the_tensors(self, devices):
        used = devices(2)
        batch = {"x": torch.ones(4, 2), "names": ["a", "b"], "more": (torch.zeros(4), None, 3)}
        (out,) = Feeder([batch], used)
        assert (out["names"], out["more"][1:]) == (["a", "b"], (None, 3))
        assert gather(out["x"]).cpu().equal(batch["x"])
        assert isinstance(out["more"][0], ShardedBatch)

    @pytest.mark.parametrize("target", ["cpu", ["cpu"] * 2])
    def test_a_list_that_the_loader_changes_for_the_next_batch(self, target):
        def windows():
            window = []
            for i in range(5):
                window.append(torch.full((2,), float(i)))
                if len(window) > 2 + i % 2:
                    window.pop(0)
                yield window

        expected = [[x[0].item() for x in window] for window in windows()]
        feed = iter(Feeder(windows(), target, prefetch=4))
        found = []
        for window in feed:
            found.append([gather(x)[0].item() for x in window])
            time.sleep(0.01)  # the loader is ahead
        assert found == expected

    def test_a_tensor_that_every_replica_needs_whole(self, devices):
        used = devices(3)
        (out,) = Feeder([(torch.ones(6, 2), Replicated({"mask": torch.arange(5)}))], used)
        shards = everygpu.parallel.scatter(out, used)
        masks = [mask["mask"] for _, mask in shards]
        assert [m.device for m in masks] == used
        assert len({m.data_ptr() for m in masks}) == len(used), "replicas must not share memory"
        assert all(m.tolist() == [0, 1, 2, 3, 4] for m in masks)
        again = everygpu.parallel.scatter(out, used)
        assert [m[1]["mask"].data_ptr() for m in again] == [m.data_ptr() for m in masks], "it was copied again"

    def test_a_replicated_value_that_was_replaced(self):
        (out,) = Feeder([(torch.ones(4), Replicated(torch.zeros(2)))], ["cpu"] * 2)
        out[1].value = torch.ones(2)
        assert [s[1].tolist() for s in everygpu.parallel.scatter(out, ["cpu"] * 2)] == [[1, 1]] * 2

    def test_on_one_device_tensors_are_plain(self):
        x, mask = torch.ones(3, 2), torch.ones(5)
        (out,) = Feeder([(x, Replicated(mask), torch.tensor(2.0))], "cpu")
        assert out[0] is x
        assert out[1] is mask
        assert out[2] == 2

    def test_a_batch_of_one_row_is_plain(self, devices):
        used = devices(3)
        (out,) = Feeder([torch.ones(1, 2)], used)
        assert type(out) is torch.Tensor
        assert out.device == used[0]

    def test_an_input_that_takes_gradients(self, devices):
        used = devices(2)
        (x,) = Feeder([torch.ones(4, requires_grad=True)], used)
        (x * 3).sum().backward()
        assert x.grad.tolist() == [3] * 4

    def test_replicas_may_write_into_their_shards(self):
        (x,) = Feeder([torch.ones(4)], ["cpu"] * 2)
        first, second = everygpu.parallel.scatter(x, ["cpu"] * 2)
        weight = torch.ones((), requires_grad=True)
        product = second * weight
        first.zero_()
        product.sum().backward()
        assert weight.grad == 2

    def test_rows_that_differ_are_an_error_at_that_batch(self):
        feed = iter(Feeder([torch.ones(2), (torch.ones(4), torch.ones(3)), torch.ones(2)], ["cpu"] * 2))
        next(feed)
        with pytest.raises(SplitError, match=r"got 4 in batch\[0\] and 3 in batch\[1\]"):
            next(feed)


class TestLoaders:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_data_loader(self, workers):
        feeder = Feeder(numbered(10, batch_size=4, num_workers=workers), ["cpu"] * 2)
        assert len(feeder) == 3
        expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert values(feeder) == values(feeder) == expected

    def test_persistent_workers_go_on_to_the_next_pass(self):
        loader = numbered(8, batch_size=2, num_workers=1, persistent_workers=True)
        feeder = Feeder(loader, ["cpu"] * 2)
        expected = [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert values(feeder) == expected
        (pid,) = (w.pid for w in feeder._order.iterated._iterator._workers)
        for _ in feeder:
            break
        assert values(feeder) == expected
        assert [w.pid for w in feeder._order.iterated._iterator._workers] == [pid]
        feeder.close()
        assert not torch.multiprocessing.active_children()

    def test_persistent_workers_leave_a_pass_for_the_next_one(self):
        loader = numbered(40, batch_size=2, num_workers=2, persistent_workers=True)
        feeder = Feeder(loader, ["cpu"] * 2)
        expected = values(feeder)
        for _ in range(5):
            first = iter(feeder)
            next(first)
            assert values(feeder) == expected
            assert list(first) == []
        feeder.close()

    def test_loops_side_by_side(self):
        feeder = Feeder(batches(3), ["cpu"] * 2)
        pairs = [(a[0][0, 0].item(), b[0][0, 0].item()) for a, b in zip(feeder, feeder)]
        assert pairs == [(0, 0), (1, 1), (2, 2)]

    def test_no_more_than_prefetch_batches_are_made_ahead(self):
        made = []
        feed = iter(Feeder((made.append(i) or torch.ones(2) for i in itertools.count()), ["cpu"] * 2, prefetch=3))
        next(feed)
        deadline = time.monotonic() + 60
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(made) == 4  # one in use, three ready
        feed.close()


class Counted(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_what_scripts_ask_of_a_loader_is_that_loaders():
    loader = numbered(10, batch_size=4, drop_last=True, num_workers=2)
    feeder = Feeder(loader, nn.Sequential(*[nn.Linear(3, 3)] * 30))
    names = ("dataset", "batch_size", "num_workers", "sampler", "batch_sampler", "drop_last", "collate_fn")
    assert [getattr(feeder, name) for name in names] == [getattr(loader, name) for name in names]
    assert len(feeder.dataset) == 10
    assert repr(feeder) == "Feeder(DataLoader to cpu, epoch 0)"
    with pytest.raises(AttributeError, match="'list' object has no attribute 'dataset'"):
        Feeder([], "cpu").dataset  # noqa: B018


def test_grad_mode_of_the_loop_does_not_matter():
    with torch.inference_mode():
        out = [x for x, _ in Feeder(batches(2), ["cpu"] * 2)]
    assert torch.stack([gather(x) for x in out]).mean() == 0.5


@pytest.mark.parametrize(
    "target", ["gpu0", nn.Linear, 1.5, torch.optim.SGD([torch.ones(1)]), DataLoader([1]), torch.ones(3)], ids=repr_of
)
def test_what_is_no_target_is_named_by_its_class(target):
    with pytest.raises(DeviceError) as caught:
        Feeder([], target)
    assert len(str(caught.value)) < 200


NO_SEED, NO_NUMBER = "is no seed. Pass a whole number from 0 to", "prefetch counts batches, from 0"
NO_LOADER, A_DATASET = r"^Feeder: \w+ is no iterable of batches. Pass", "is a dataset, whose items would be taken for"


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        *(([], {"prefetch": prefetch}, NO_NUMBER) for prefetch in (-1, 1.5)),
        *(([], {"timeout": 0, "prefetch": prefetch}, NO_NUMBER) for prefetch in (0, 2)),
        ([], {"timeout": 1, "prefetch": 0}, NO_NUMBER),
        *(([], {"seed": seed}, NO_SEED) for seed in (-1, 2**63, 1.0, True)),
        *((loader, {}, NO_LOADER) for loader in (None, 5, DataLoader, nn.Sequential(nn.Linear(3, 2)))),
        *((dataset, {}, A_DATASET) for dataset in (TensorDataset(torch.arange(3.0)), Counted())),
    ],
    ids=repr_of,
)
def test_mistakes(loader, options, message):
    with pytest.raises(OptionError, match=message):
        Feeder(loader, "cpu", **options)


def test_any_target_and_any_iterable():
    for target in (nn.Linear(3, 2), nn.Identity(), "cpu"):
        assert Feeder([], target).devices == [CPU]
    assert Feeder([]).devices == everygpu.devices.parse.parse_devices(None)
    made = []
    feeder = Feeder((made.append(i) or torch.full((2,), i) for i in itertools.count()), "cpu", prefetch=0)
    with pytest.raises(TypeError):
        len(feeder)
    with iter(feeder) as feed:
        next(feed)
        assert made == [0], "without prefetch there is no thread"
        assert not feeder_threads()
    assert list(feed) == []
    (x,) = Feeder([torch.ones(4)], ["cpu"] * 2)
    (again,) = Feeder([x], ["cpu"] * 2)
    assert again is x, "sharded already"
