"""The feeder: every batch, in order, on its devices, once; and nothing left behind however a loop ends."""

import gc
import itertools
import os
import signal
import threading
import time
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import everygpu
from everygpu import DataParallel, Feeder, Replicated, ShardedBatch, gather
from everygpu.errors import DeviceError, OptionError, SplitError
from tests.parallel.oracle import TOLERANCE, Mlp, pair, rows, score

PROPERTY = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
CPU = torch.device("cpu")


def batches(num, size=6):
    return [(torch.full((size, 3), float(i)), torch.arange(size) + i) for i in range(num)]


def numbered(num, **options):
    """A DataLoader over the numbers from 0."""
    return DataLoader(TensorDataset(torch.arange(num)), **options)


def values(feed):
    """What a pass over ``numbered`` gives, as lists."""
    return [gather(x).tolist() for (x,) in feed]


def feeder_threads():
    return [t for t in threading.enumerate() if t.name == "everygpu-feeder"]


@PROPERTY
@given(
    num=st.integers(0, 7),
    size=st.integers(0, 9),
    count=st.integers(1, 4),
    prefetch=st.integers(0, 4),
    split=st.sampled_from(["chunk", "even"]),
)
def test_batches_come_once_in_order_and_split_as_planned(devices, num, size, count, prefetch, split):
    used = devices(count)
    loader = batches(num, size)
    out = list(Feeder(loader, used, prefetch=prefetch, split=split))
    assert len(out) == num
    for (x, y), (expected_x, expected_y) in zip(out, loader):
        assert x.device == y.device == used[0]
        assert gather(x).cpu().equal(expected_x)
        assert gather(y).cpu().equal(expected_y)
        shards = everygpu.scatter(expected_x, used, split=split)
        if isinstance(x, ShardedBatch):
            assert [s.shape for s in x.shards] == [s.shape for s in shards]
            assert [s.device for s in x.shards] == used[: len(shards)]


def test_data_parallel_uses_the_shards_where_they_are(devices):
    used = devices(3)
    model = DataParallel(nn.Linear(3, 2), used)
    for x, y in Feeder(batches(3), model):
        assert isinstance(x, ShardedBatch)
        (shards,) = [[s.data_ptr() for s in everygpu.scatter(x, used)]]
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

    def test_options_come_before_the_models(self):
        model = DataParallel(nn.Linear(3, 2), ["cpu"] * 2, dim=1, split=[1, 3])
        (x,) = Feeder([torch.ones(8, 3)], model, dim=0, split="even")
        assert [tuple(s.shape) for s in x.shards] == [(4, 3), (4, 3)]

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

    def test_a_bare_module_is_on_one_device(self):
        assert Feeder([], nn.Linear(3, 2)).devices == [CPU]
        assert Feeder([], nn.Identity()).devices == [CPU]

    def test_names(self):
        assert Feeder([], "cpu").devices == [CPU]
        assert Feeder([], ["cpu", "cpu"]).devices == [CPU] * 2

    def test_every_device_when_left_out(self):
        assert Feeder([]).devices == everygpu.devices.parse_devices(None)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"prefetch": -1}, "prefetch must be a whole number from 0, got -1"),
            ({"prefetch": 1.5}, "prefetch must be"),
            ({"prefetch": True}, "prefetch must be"),
            ({"timeout": 0}, "timeout must be more than 0"),
            ({"timeout": "3"}, "timeout must be more than 0 seconds, got '3'"),
            ({"timeout": True}, "timeout must be more than 0 seconds, got True"),
            ({"timeout": float("nan")}, "timeout must be more than 0 seconds, got nan"),
            ({"timeout": 1, "prefetch": 0}, "needs a thread"),
            ({"dim": "0"}, "dim must be an int, got '0'"),
            ({"dim": True}, "dim must be an int, got True"),
            ({"split": "most"}, "split: must be"),
            ({"split": [1, 2]}, "split: must be"),
        ],
        ids=str,
    )
    def test_wrong_options(self, options, message):
        with pytest.raises(OptionError, match=message):
            Feeder([], ["cpu"] * 3, **options)

    @pytest.mark.parametrize(
        ("loader", "named"), [(None, "NoneType"), (5, "int"), (DataLoader, "the class DataLoader")]
    )
    def test_what_can_not_be_iterated(self, loader, named):
        with pytest.raises(OptionError, match=f"loader must be an iterable of batches, got {named}. Pass"):
            Feeder(loader, "cpu")

    def test_what_is_iterated_by_index_alone(self):
        dataset = TensorDataset(torch.arange(3.0))
        assert [x.item() for (x,) in Feeder(dataset, "cpu")] == [0, 1, 2]

    @pytest.mark.parametrize(
        ("target", "named"),
        [
            (nn.Linear, "the class Linear"),
            (torch.optim.SGD([torch.ones(1)]), "SGD"),
            (1.5, "float"),
            (DataLoader(TensorDataset(torch.ones(2))), "DataLoader"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_what_is_neither_model_nor_devices(self, target, named):
        with pytest.raises(OptionError, match=f"must be a model, a TrainStep or devices, got {named}. Leave"):
            Feeder([], target)

    def test_unknown_device(self):
        with pytest.raises(DeviceError):
            Feeder([], "gpu0")


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
        shards = everygpu.scatter(out, used)
        masks = [mask["mask"] for _, mask in shards]
        assert [m.device for m in masks] == used
        assert len({m.data_ptr() for m in masks}) == len(used), "replicas must not share memory"
        assert all(m.tolist() == [0, 1, 2, 3, 4] for m in masks)
        again = everygpu.scatter(out, used)
        assert [m[1]["mask"].data_ptr() for m in again] == [m.data_ptr() for m in masks], "it was copied again"

    def test_a_replicated_value_that_was_replaced(self):
        (out,) = Feeder([(torch.ones(4), Replicated(torch.zeros(2)))], ["cpu"] * 2)
        out[1].value = torch.ones(2)
        assert [s[1].tolist() for s in everygpu.scatter(out, ["cpu"] * 2)] == [[1, 1]] * 2

    def test_on_one_device_tensors_are_plain(self):
        x, mask = torch.ones(3, 2), torch.ones(5)
        (out,) = Feeder([(x, Replicated(mask), torch.tensor(2.0))], "cpu")
        assert out[0] is x
        assert out[1] is mask
        assert out[2] == 2

    def test_on_one_device_rows_may_differ(self):
        (out,) = Feeder([(torch.ones(3), torch.ones(5))], "cpu")
        assert [len(x) for x in out] == [3, 5]

    def test_a_batch_of_one_row_is_plain(self, devices):
        used = devices(3)
        (out,) = Feeder([torch.ones(1, 2)], used)
        assert type(out) is torch.Tensor
        assert out.device == used[0]

    def test_zero_dim_tensors_go_to_the_first_device(self, devices):
        used = devices(2)
        (out,) = Feeder([(torch.ones(4), torch.tensor(3.0))], used)
        assert out[1].device == used[0]
        assert out[1].item() == 3

    def test_an_input_that_takes_gradients(self, devices):
        used = devices(2)
        (x,) = Feeder([torch.ones(4, requires_grad=True)], used)
        (x * 3).sum().backward()
        assert x.grad.tolist() == [3] * 4

    def test_replicas_may_write_into_their_shards(self):
        (x,) = Feeder([torch.ones(4)], ["cpu"] * 2)
        first, second = everygpu.scatter(x, ["cpu"] * 2)
        weight = torch.ones((), requires_grad=True)
        product = second * weight
        first.zero_()
        product.sum().backward()
        assert weight.grad == 2

    def test_a_batch_that_is_sharded_already(self):
        (x,) = Feeder([torch.ones(4)], ["cpu"] * 2)
        (y,) = Feeder([x], ["cpu"] * 2)
        assert y is x

    def test_rows_that_differ_are_an_error_at_that_batch(self):
        feed = iter(Feeder([torch.ones(2), (torch.ones(2), torch.ones(3)), torch.ones(2)], ["cpu"] * 2))
        next(feed)
        with pytest.raises(SplitError, match=r"got 2 in batch\[0\] and 3 in batch\[1\]"):
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
        (pid,) = (w.pid for w in loader._iterator._workers)
        for _ in feeder:
            break
        assert values(feeder) == expected
        assert [w.pid for w in loader._iterator._workers] == [pid]
        loader._iterator._shutdown_workers()

    def test_persistent_workers_leave_a_pass_for_the_next_one(self):
        loader = numbered(40, batch_size=2, num_workers=2, persistent_workers=True)
        feeder = Feeder(loader, ["cpu"] * 2)
        expected = values(feeder)
        for _ in range(5):
            first = iter(feeder)
            next(first)
            assert values(feeder) == expected
            assert list(first) == []
        loader._iterator._shutdown_workers()

    def test_an_iterable_without_a_length(self):
        feeder = Feeder((x for x in batches(3)), ["cpu"] * 2)
        with pytest.raises(TypeError):
            len(feeder)
        assert len(list(feeder)) == 3
        assert list(feeder) == []

    def test_an_infinite_loader(self):
        feeder = Feeder((torch.full((2,), i) for i in itertools.count()), ["cpu"] * 2)
        firsts = [x[0].item() for x in itertools.islice(feeder, 5)]
        assert firsts == list(range(5))

    def test_loops_side_by_side(self):
        feeder = Feeder(batches(3), ["cpu"] * 2)
        pairs = [(a[0][0, 0].item(), b[0][0, 0].item()) for a, b in zip(feeder, feeder)]
        assert pairs == [(0, 0), (1, 1), (2, 2)]

    def test_no_more_than_prefetch_batches_are_made_ahead(self):
        made = []
        feed = iter(Feeder((made.append(i) or torch.ones(2) for i in itertools.count()), ["cpu"] * 2, prefetch=3))
        next(feed)
        deadline = time.monotonic() + 2
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(made) == 4  # one in use, three ready
        feed.close()

    def test_without_prefetch_there_is_no_thread(self):
        made = []
        feed = iter(Feeder((made.append(i) or torch.ones(2) for i in itertools.count()), "cpu", prefetch=0))
        next(feed)
        assert made == [0]
        assert not feeder_threads()
        feed.close()
        assert list(feed) == []


class Broken(Dataset):
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 10

    def __getitem__(self, i):
        if i == 4:
            raise self.error
        return torch.full((2,), float(i))


class TestEndings:
    @pytest.mark.parametrize("workers", [0, 1])
    @pytest.mark.parametrize("prefetch", [0, 2, 8])
    def test_an_error_of_the_loader_comes_at_its_batch(self, workers, prefetch):
        loader = DataLoader(Broken(ZeroDivisionError("item 4")), batch_size=2, num_workers=workers)
        seen = []
        with pytest.raises(ZeroDivisionError, match="item 4"):
            seen.extend(x[0, 0].item() for x in Feeder(loader, ["cpu"] * 2, prefetch=prefetch))
        assert seen == [0, 2]

    def test_the_errors_traceback_leads_to_the_loader(self):
        def load():
            yield torch.ones(2)
            raise KeyError("the shelf")

        feed = iter(Feeder(load(), "cpu"))
        next(feed)
        with pytest.raises(KeyError, match="the shelf") as caught:
            next(feed)
        assert caught.traceback[-1].name == "load"
        assert list(feed) == []

    def test_an_error_when_iterating_begins(self):
        class Refuses:
            def __iter__(self):
                raise LookupError("no data")

        with pytest.raises(LookupError, match="no data"):
            iter(Feeder(Refuses(), "cpu"))

    @pytest.mark.parametrize("workers", [0, 2])
    def test_leaving_the_loop_ends_thread_and_workers(self, workers):
        loader = numbered(1000, num_workers=workers)
        for _ in Feeder(loader, ["cpu"] * 2):
            break
        assert not feeder_threads()
        assert not torch.multiprocessing.active_children()

    def test_an_error_in_the_loop_ends_the_thread(self):
        def train():
            for _ in Feeder(numbered(1000), "cpu"):
                raise ArithmeticError

        with pytest.raises(ArithmeticError):
            train()
        assert not feeder_threads()

    def test_a_dropped_iterator_ends_its_thread(self):
        feed = iter(Feeder(itertools.repeat(torch.ones(2)), "cpu"))
        next(feed)
        assert feeder_threads()
        del feed
        assert not feeder_threads()

    def test_an_iterator_in_a_cycle_ends_its_thread(self):
        feed = iter(Feeder(itertools.repeat(torch.ones(2)), "cpu"))
        cycle = [feed]
        cycle.append(cycle)
        del feed, cycle
        gc.collect()
        assert not feeder_threads()

    @pytest.mark.parametrize("of", ["feeder", "feed"])
    def test_with_closes(self, of):
        feeder = Feeder(itertools.repeat(torch.ones(2)), "cpu")
        feed = iter(feeder)
        with feeder if of == "feeder" else feed:
            next(feed)
        assert not feeder_threads()
        assert list(feed) == []
        feed.close()
        feeder.close()

    def test_a_generators_cleanup_runs_when_the_loop_is_left(self):
        cleaned = []

        class Loads:
            def __iter__(self):
                try:
                    yield from itertools.repeat(torch.ones(2))
                finally:
                    cleaned.append(threading.current_thread().name)

        feeder = Feeder(Loads(), "cpu")
        for _ in feeder:
            break
        assert cleaned == ["everygpu-feeder"]

    def test_one_thread_a_pass(self):
        feeder = Feeder(itertools.repeat(torch.ones(2)), ["cpu"] * 3)
        with iter(feeder) as feed:
            next(feed)
            assert len(feeder_threads()) == 1

    def test_batches_are_not_kept(self):
        loader = (torch.ones(2) for _ in range(3))
        feed = iter(Feeder(loader, "cpu"))
        refs = [weakref.ref(next(feed)) for _ in range(3)]
        assert list(feed) == []
        gc.collect()
        assert [r() for r in refs] == [None] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_ends_although_the_thread_was_at_the_channel():
    feed = iter(Feeder(batches(3), "cpu"))
    next(feed)
    is_held, is_over = threading.Event(), threading.Event()

    def hold():
        with feed._channel._changed:
            is_held.set()
            is_over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        feed.close()
        os._exit(7)
    _, status = os.waitpid(child, 0)
    is_over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 7
    assert len(list(feed)) == 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(12))


class Remembering:
    """A loader that keeps its own position, as torchdata's StatefulDataLoader does."""

    def __init__(self, num):
        self.num, self.at, self.resumed_at = num, 0, None

    def __iter__(self):
        while self.at < self.num:
            self.at += 1
            yield (torch.tensor([self.at - 1, self.at - 1]),)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = self.resumed_at = state["at"]


class Counting(Dataset):
    """Notes which items are loaded."""

    def __init__(self, num):
        self.num, self.loaded = num, []

    def __len__(self):
        return self.num

    def __getitem__(self, i):
        self.loaded.append(i)
        return (torch.tensor(i),)


def interrupted(make, stop_after, **options):
    """Run two passes, stopping after some batches; go on in a new feeder. Return what came before and after."""
    torch.manual_seed(3)
    first = Feeder(make(), ["cpu"] * 2, **options)
    before = []
    for x in itertools.islice(itertools.chain(first, first), stop_after):
        before.append(gather(x[0]).tolist())
        state = first.state_dict()
    first.close()
    torch.manual_seed(99)  # the other process draws other numbers
    second = Feeder(make(), ["cpu"] * 2, **options)
    second.load_state_dict(state)
    after = [gather(x[0]).tolist() for x in second]
    return before, after, second


def unbroken(make):
    torch.manual_seed(3)
    feeder = Feeder(make(), ["cpu"] * 2)
    return values(feeder)


class TestPosition:
    def test_counts_what_was_handed_out(self):
        feeder = Feeder(batches(5), "cpu", prefetch=4)
        assert (feeder.state_dict()["epoch"], feeder.state_dict()["batch"]) == (0, 0)
        feed = iter(feeder)
        next(feed)
        next(feed)
        assert (feeder.state_dict()["epoch"], feeder.state_dict()["batch"]) == (0, 2)
        list(feed)
        assert (feeder.state_dict()["epoch"], feeder.state_dict()["batch"]) == (1, 0)

    def test_a_pass_left_early_counts(self):
        feeder = Feeder(batches(5), "cpu")
        for _ in feeder:
            break
        for _ in feeder:
            break
        assert (feeder.state_dict()["epoch"], feeder.state_dict()["batch"]) == (1, 1)

    def test_of_the_pass_begun_last(self):
        feeder = Feeder(batches(5), "cpu")
        old = iter(feeder)
        next(old)
        new = iter(feeder)
        next(old)
        assert feeder.state_dict()["batch"] == 0
        next(new)
        assert feeder.state_dict()["batch"] == 1
        old.close()
        new.close()

    @pytest.mark.parametrize("workers", [0, 1])
    @pytest.mark.parametrize("own", [False, True])
    @pytest.mark.parametrize("stop_after", [1, 3, 5])
    def test_resuming_goes_on_in_the_same_order(self, workers, own, stop_after):
        def make():
            generator = torch.Generator().manual_seed(5) if own else None
            return numbered(12, batch_size=2, shuffle=True, num_workers=workers, generator=generator)

        before, after, _ = interrupted(make, stop_after)
        assert [*before, *after] == unbroken(make)

    def test_resuming_leaves_the_generator_alone(self):
        _, _, feeder = interrupted(lambda: numbered(12, batch_size=2, shuffle=True), 3)
        feeder.load_state_dict({"epoch": 0, "batch": 2, "generator": bytes(torch.get_rng_state().tolist())})
        torch.manual_seed(7)
        expected = torch.get_rng_state()
        iter(feeder).close()
        assert torch.get_rng_state().equal(expected)

    def test_what_is_skipped_is_not_loaded(self):
        dataset = Counting(12)
        feeder = Feeder(DataLoader(dataset, batch_size=2), "cpu")
        feeder.load_state_dict({"epoch": 1, "batch": 4})
        assert values(feeder) == [[8, 9], [10, 11]]
        assert dataset.loaded == [8, 9, 10, 11]
        assert feeder.state_dict()["epoch"] == 2
        assert values(feeder)[0] == [0, 1]

    @pytest.mark.parametrize(
        "make",
        [
            lambda: DataLoader(Stream(), batch_size=2, collate_fn=lambda items: (torch.tensor(items),)),
            lambda: [(torch.tensor([i, i + 1]),) for i in range(0, 12, 2)],
            lambda: numbered(12, batch_sampler=[[i, i + 1] for i in range(0, 12, 2)]),
        ],
        ids=["stream", "list", "batch_sampler"],
    )
    def test_any_loader(self, make):
        before, after, feeder = interrupted(make, 4)
        assert (before[-1], after) == ([6, 7], [[8, 9], [10, 11]])
        assert feeder.state_dict()["epoch"] == 1

    @pytest.mark.parametrize("prefetch", [0, 1, 3])
    def test_a_loader_that_keeps_its_own_position(self, prefetch):
        before, after, feeder = interrupted(lambda: Remembering(6), 3, prefetch=prefetch)
        assert [x[0] for x in [*before, *after]] == list(range(6))
        assert feeder.loader.resumed_at == 3  # what was prepared ahead does not count

    def test_resuming_between_two_passes(self):
        def make():
            return numbered(12, batch_size=2, shuffle=True)

        torch.manual_seed(3)
        feeder = Feeder(make(), "cpu")
        values(feeder)
        state, rng = feeder.state_dict(), torch.get_rng_state()
        second = values(feeder)
        other = Feeder(make(), "cpu")
        other.load_state_dict(state)
        torch.set_rng_state(rng)
        assert other.state_dict()["epoch"] == 1
        feed = iter(other)
        head = gather(next(feed)[0]).tolist()
        middle = other.state_dict()
        assert [head, *values(feed)] == second
        other.load_state_dict(middle)
        assert values(other) == second[1:]

    def test_a_checkpoint_keeps_it(self, tmp_path):
        feeder = Feeder(numbered(12, batch_size=2, shuffle=True), "cpu")
        feed = iter(feeder)
        next(feed)
        everygpu.save(tmp_path / "checkpoint", feeder=feeder)
        rest = values(feed)
        other = Feeder(numbered(12, batch_size=2, shuffle=True), "cpu")
        everygpu.load(tmp_path / "checkpoint", feeder=other)
        assert values(other) == rest

    @pytest.mark.parametrize(
        "state", [{}, {"epoch": 1, "position": 3}, {"epoch": -1}, {"batch": "3"}, None, {"generator": "x"}], ids=str
    )
    def test_another_state_is_refused(self, state):
        feeder = Feeder(batches(3), "cpu")
        if state == {}:
            feeder.load_state_dict(state)  # the beginning
            assert len(list(feeder)) == 3
            return
        with pytest.raises(OptionError, match="what Feeder.state_dict returned"):
            feeder.load_state_dict(state)


def test_grad_mode_of_the_loop_does_not_matter():
    with torch.inference_mode():
        out = [x for x, _ in Feeder(batches(2), ["cpu"] * 2)]
    assert torch.stack([gather(x) for x in out]).mean() == 0.5


def test_the_generator_is_drawn_from_in_a_fixed_order():
    orders = []
    for _ in range(3):
        torch.manual_seed(0)
        feeder = Feeder(numbered(12, batch_size=2, shuffle=True), ["cpu"] * 2)
        seen = []
        for (x,) in feeder:
            torch.rand(3)  # as dropout does
            seen.append(gather(x).tolist())
        orders.append(seen)
    assert orders[0] == orders[1] == orders[2]


def test_interrupt_before_the_thread_starts_ends_the_pass_quietly(monkeypatch):
    start = threading.Thread.start

    def interrupt(thread):
        if thread.name == "everygpu-feeder":
            raise KeyboardInterrupt
        start(thread)

    feeder = Feeder([torch.ones(2)] * 2, ["cpu"])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            iter(feeder)
    gc.collect()  # an exception in a finalizer fails the test
    assert len(list(feeder)) == 2
