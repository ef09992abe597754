"""When a process stands still, and when it moves; see tests/faults/test_watchdog.py, too."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from everygpu._watchdog import Threads
from everygpu.progress import progress, running


@pytest.fixture(autouse=True)
def is_watched() -> Iterator[None]:
    """Operations are entered."""
    progress().is_watched = True
    yield
    progress().is_watched = False
    assert progress().operations == {}


@contextmanager
def beside(function: Callable[[threading.Event], object]) -> Iterator[None]:
    """Run a function in a thread; it ends once its event is set."""
    over = threading.Event()
    thread = threading.Thread(target=function, args=(over,), name="beside")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def is_asleep(thread: threading.Thread) -> bool:
    """Tell it where the system does; elsewhere it is taken for granted."""
    stat = Path(f"/proc/self/task/{thread.native_id}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "S"


def settled() -> Threads:
    """Look once the threads are where they wait."""
    num_times = 0  # asleep one after another: one that is woken may not have run yet
    while num_times < 3:
        num_times = num_times + 1 if all(is_asleep(t) for t in threading.enumerate() if t.name == "beside") else 0
        time.sleep(0.01)
    return Threads()


def test_of_nested_operations_the_inner_one_counts_and_the_next_one_at_the_same_place_is_a_move() -> None:
    steps = [threading.Event() for _ in range(3)]

    def work(over: threading.Event) -> None:
        with running("update", torch.device("cpu"), 1):
            for step in steps:
                with running("sum over ranks", waits_for="ranks"):
                    step.wait()
            over.wait()

    with beside(work):
        before = settled()
        for step in steps:
            now = settled()
            assert now.places == ["sum over ranks in thread beside"]
            assert now.wait_for_ranks
            assert now.is_unchanged_since(before)
            step.set()
            before = settled()
            assert not now.is_unchanged_since(before)
        assert before.places == ["update of replica 1 on cpu in thread beside"]
        assert not before.wait_for_ranks
    assert settled().places == []


def test_one_backward_is_told_from_the_next_at_the_same_place() -> None:
    steps = [threading.Event() for _ in range(2)]

    def work(over: threading.Event) -> None:
        for step in (*steps, over):
            y = torch.ones(1, requires_grad=True) * 2
            y.register_hook(lambda _, step=step: step.wait(60) and None)
            torch.autograd.grad(y, y)

    with beside(work):
        first, again = settled(), settled()
        assert first.places == ["backward in thread beside"]
        assert again.is_unchanged_since(first)
        for step in steps:
            step.set()
            later = settled()
            assert not later.is_unchanged_since(again)
            again = later


def test_an_error_ends_an_operation_and_nothing_is_entered_while_nothing_watches() -> None:
    with pytest.raises(ZeroDivisionError), running("forward"), running("barrier"):
        raise ZeroDivisionError
    assert progress().operations == {}
    progress().is_watched = False
    with running("forward"):
        assert progress().operations == {}
    assert running("forward") is running("backward")
