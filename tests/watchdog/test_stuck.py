"""Which threads stand still, and which do not."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from everygpu.progress import progress, running
from everygpu.watchdog.watch import Place, find_places


class Judge:
    """Looks again and again."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}

    def look(self, now_s: float) -> list[Place]:
        self._places = find_places(self._places, now_s)
        return list(self._places.values())


@pytest.fixture
def judge() -> Iterator[Judge]:
    """A judge, while operations are entered."""
    progress().is_watched = True
    yield Judge()
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


def settled(judge: Judge, now_s: float) -> list[tuple[str, float]]:
    """Look once the threads are where they wait."""
    num_times = 0  # asleep one after another: one that is woken may not have run yet
    while num_times < 3:
        num_times = num_times + 1 if all(is_asleep(t) for t in threading.enumerate() if t.name == "beside") else 0
        time.sleep(0.01)
    return [(str(place).partition(" in thread")[0], place.since_s) for place in judge.look(now_s)]


def test_an_operation_that_waits_is_found_with_since_when(judge: Judge) -> None:
    def work(over: threading.Event) -> None:
        with running("forward", torch.device("cpu"), 1):
            over.wait()

    with beside(work):
        assert settled(judge, 5) == [("forward of replica 1 on cpu", 5)]
        assert settled(judge, 700) == [("forward of replica 1 on cpu", 5)]
    assert settled(judge, 800) == []


def test_of_nested_operations_the_inner_one_counts_and_another_one_at_the_same_place_is_a_move(judge: Judge) -> None:
    steps = [threading.Event() for _ in range(3)]

    def work(over: threading.Event) -> None:
        with running("update"):
            for step in steps:
                with running("sum over ranks"):
                    step.wait()
            over.wait()

    with beside(work):
        for now_s, step in enumerate(steps):
            assert settled(judge, now_s) == [("sum over ranks", now_s)]
            step.set()
        assert settled(judge, 9) == [("update", 9)]
    assert settled(judge, 10) == []


def test_what_waits_for_other_replicas_is_not_stuck(judge: Judge) -> None:
    def work(over: threading.Event) -> None:
        with running("forward"), running("barrier", waits_for="replicas"):
            over.wait()

    with beside(work):
        assert settled(judge, 0) == []


def test_other_code_is_none_of_its_business(judge: Judge) -> None:
    with beside(lambda over: over.wait()):
        assert settled(judge, 0) == settled(judge, 900) == []


def test_an_operation_that_an_interrupt_has_left_open_is_none(judge: Judge) -> None:
    def work(over: threading.Event) -> None:
        enter()
        over.wait()
        progress().operations.clear()

    def enter() -> None:
        running("forward").__enter__()

    with beside(work):
        assert settled(judge, 0) == []


def test_one_backward_is_told_from_the_next_at_the_same_place(judge: Judge) -> None:
    steps = [threading.Event() for _ in range(2)]

    def work(over: threading.Event) -> None:
        for step in (*steps, over):
            y = torch.ones(1, requires_grad=True) * 2
            y.register_hook(lambda _, step=step: step.wait(60) and None)
            y.backward()

    with beside(work):
        assert settled(judge, 0) == [("backward", 0)]
        assert settled(judge, 9) == [("backward", 0)]
        (first,) = judge.look(9)
        steps[0].set()
        assert settled(judge, 10) == [("backward", 10)]
        # Frames of the next one may have the same addresses: the tensor that it began from is another.
        (second,) = judge.look(11)
        first.stacks = second.stacks
        (ident,) = find_places({}, 0)
        assert find_places({ident: first}, 12)[ident].since_s == 12
        assert find_places({ident: second}, 12)[ident].since_s == 10
        steps[1].set()


def test_nothing_is_entered_while_nothing_watches() -> None:
    assert progress().is_watched is False
    with running("forward"):
        assert progress().operations == {}
    assert running("forward") is running("backward")


def test_an_error_ends_an_operation(judge: Judge) -> None:
    with pytest.raises(ZeroDivisionError), running("forward"), running("barrier"):
        raise ZeroDivisionError
    assert progress().operations == {}
