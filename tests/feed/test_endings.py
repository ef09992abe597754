"""Nothing is left behind, however a loop over a feeder ends."""

import contextlib
import gc
import itertools
import os
import signal
import threading
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from everygpu import Feeder
from everygpu.errors import WorkerError
from tests.feed.loaders import batches, feeder_threads, numbered


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

    @pytest.mark.parametrize("workers", [0, 2])
    def test_leaving_the_loop_ends_thread_and_workers(self, workers):
        loader = numbered(1000, num_workers=workers)
        for _ in Feeder(loader, ["cpu"] * 2):
            break
        assert not feeder_threads()
        assert not torch.multiprocessing.active_children()

    def test_a_dropped_iterator_ends_its_thread(self):
        feed = iter(Feeder(itertools.repeat(torch.ones(2)), "cpu"))
        next(feed)
        assert feeder_threads()
        del feed
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

    def test_batches_are_not_kept(self):
        loader = (torch.ones(2) for _ in range(3))
        feed = iter(Feeder(loader, "cpu"))
        refs = [weakref.ref(next(feed)) for _ in range(3)]
        assert list(feed) == []
        gc.collect()
        assert [r() for r in refs] == [None] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_can_close_a_pass_and_not_go_on_with_it():
    feed = iter(Feeder(batches(3), "cpu", prefetch=1))
    next(feed)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        with contextlib.suppress(WorkerError):
            for _ in range(3):
                next(feed)
            os._exit(1)
        feed.close()
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert len(list(feed)) == 2


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
