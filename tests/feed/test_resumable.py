"""A Feeder over a ResumableLoader: saved through either, a run goes on after the last batch that its loop was given."""

import itertools
import os
import signal

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import everygpu
from everygpu import CheckpointManager, Feeder, ResumableLoader
from everygpu.errors import CheckpointMismatchError, OptionError, WorkerError

NUM_EPOCHS = 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter((value,) for value in torch.randperm(12))


def numbered(**options):
    generator = torch.Generator().manual_seed(options.pop("seed")) if "seed" in options else None
    return DataLoader(TensorDataset(torch.arange(12)), batch_size=2, shuffle=True, generator=generator, **options)


LOADERS = {
    "shuffled": numbered,
    "by a generator": lambda: numbered(seed=int(torch.randint(99, ()))),
    "workers": lambda: numbered(num_workers=2),
    "persistent workers": lambda: numbered(num_workers=1, persistent_workers=True),
    "stream": lambda: DataLoader(Stream(), 2),
}


class Run:
    """Trains, as far as the data is concerned: gets batches, and draws random numbers in between."""

    def __init__(self, seed, make, prefetch=2):
        torch.manual_seed(seed)
        self.data = ResumableLoader(make())
        self.feeder = Feeder(self.data, ["cpu"] * 2, prefetch=prefetch)
        self.seen = []

    def run(self, num_batches=None, num_epochs=NUM_EPOCHS):
        """Go on until so many batches were seen, or all epochs are over."""
        while self.data.epoch < num_epochs:
            for (x,) in self.feeder:
                self.seen.append((everygpu.gather(x).tolist(), torch.rand(()).item()))
                if len(self.seen) == num_batches:
                    return self.seen
        return self.seen


@pytest.mark.parametrize(("saved", "prefetch"), [("data", 0), ("data", 9), ("feeder", 2)])
@pytest.mark.parametrize("make", LOADERS.values(), ids=list(LOADERS))
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning", "ignore:.*fork:DeprecationWarning")
def test_a_resumed_run_sees_what_comes_next(tmp_path, make, saved, prefetch):
    expected = Run(1, make, prefetch).run()
    assert len(expected) == 18
    for stop in (1, 5, 6, 8) if make in (numbered, LOADERS["by a generator"]) else (8,):
        stopped = Run(1, make, prefetch)
        seen = list(stopped.run(stop))
        everygpu.save(tmp_path / "ckpt", **{saved: getattr(stopped, saved)})
        resumed = Run(2, make, prefetch)
        everygpu.load(tmp_path / "ckpt", **{saved: getattr(resumed, saved)}, rng=True)
        assert [*seen, *resumed.run()] == expected


@pytest.mark.parametrize("asynchronous", [False, True])
def test_saved_in_the_loop_and_after_it(tmp_path, asynchronous):
    expected = Run(1, numbered).run()
    run = Run(1, numbered)
    with CheckpointManager(tmp_path, keep=99, asynchronous=asynchronous) as checkpoints:
        run.run(num_epochs=1)
        feed = iter(run.feeder)  # the second epoch, begun without a batch
        checkpoints.save(0, data=run.data)
        for step, (x,) in enumerate(feed, 7):
            run.seen.append((everygpu.gather(x).tolist(), torch.rand(()).item()))
            checkpoints.save(step, data=run.data)
        checkpoints.save(99, data=run.data)
        seen = list(run.seen)
    for step, num_seen in ((0, 6), (7, 7), (12, 12), (99, 12)):
        resumed = Run(2, numbered)
        CheckpointManager(tmp_path).load(step, data=resumed.data, rng=True)
        assert [*seen[:num_seen], *resumed.run()][: len(expected)] == expected


class TestPosition:
    @pytest.fixture
    def data(self):
        return ResumableLoader(DataLoader(TensorDataset(torch.arange(12)), batch_size=2))

    def position(self, data):
        state = data.state_dict()
        return state["epoch"], state["num_batches"]

    def test_what_is_fetched_ahead_does_not_count(self, data):
        feeder = Feeder(data, "cpu", prefetch=9)
        feed = iter(feeder)
        next(feed)
        feed._thread.join()  # it has fetched the whole epoch
        assert self.position(data) == (0, 1)
        assert (feeder.state_dict()["epoch"], feeder.state_dict()["batch"]) == (0, 1)
        list(feed)
        assert self.position(data) == (1, 0)

    def test_a_loop_that_is_left_early(self, data):
        for _ in Feeder(data, "cpu"):
            break
        assert self.position(data) == (0, 1)
        next(iter(data))  # the loader alone
        assert self.position(data) == (1, 1)
        assert len(list(Feeder(data, "cpu"))) == 6
        assert self.position(data) == (3, 0)

    def test_an_error_of_the_dataset(self):
        class Faulty(Dataset):
            def __len__(self):
                return 6

            def __getitem__(self, i):
                if i == 4:
                    raise LookupError
                return i

        data = ResumableLoader(DataLoader(Faulty()))
        with pytest.raises(LookupError):
            list(Feeder(data, "cpu"))
        assert self.position(data) == (0, 4)

    def test_an_interrupt_while_a_batch_is_made_ready(self, data, monkeypatch):
        feed = iter(Feeder(data, "cpu"))
        next(feed)

        def interrupt(step):
            raise KeyboardInterrupt

        monkeypatch.setattr(feed._meter, "add", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(feed)
        assert self.position(data) == (0, 1)

    def test_two_feeders_over_one_loader(self, data):
        first, second = iter(Feeder(data, "cpu")), iter(Feeder(data, "cpu"))
        next(first)
        next(second)
        next(first)
        assert self.position(data) == (0, 1)  # of the pass begun last
        list(first)
        assert self.position(data) == (0, 1)
        list(second)
        assert self.position(data) == (1, 0)

    def test_what_wraps_the_loader_is_iterated_as_it_is(self, data):
        with iter(Feeder(itertools.islice(data, 4), "cpu", prefetch=9)) as feed:
            next(feed)
            feed._thread.join()
            assert self.position(data) == (0, 4)  # as the documentation says

    def test_a_loaded_feeder_moves_the_loader_at_once(self, data):
        other = Feeder(ResumableLoader(data.loader), "cpu")
        list(other)
        Feeder(data, "cpu").load_state_dict(other.state_dict())
        assert data.epoch == 1

    def test_positions_of_other_kinds_are_refused(self, data):
        feeder, other = Feeder(data, "cpu"), Feeder([torch.ones(2)], "cpu")
        with pytest.raises(OptionError, match="a loader that keeps its own position, as the saved one did"):
            other.load_state_dict(feeder.state_dict())
        with pytest.raises(CheckpointMismatchError, match=r"what ResumableLoader.state_dict returned"):
            feeder.load_state_dict({"loader": {"at": 3}})
        with pytest.raises(CheckpointMismatchError, match="into a Feeder"):
            data.load_state_dict(feeder.state_dict())


class Dying(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_its_workers_are_watched():
    with pytest.raises(WorkerError, match="SIGKILL"):
        list(Feeder(ResumableLoader(DataLoader(Dying(), num_workers=1)), "cpu"))


def test_workers_are_tuned():
    data = ResumableLoader(numbered())
    report = everygpu.tune_workers(data, "cpu", candidates=[0], seconds=0.01)
    assert report.num_workers == 0
    assert (data.epoch, data.state_dict()["num_batches"]) == (0, 0)
