"""Which threads stand still, and which do not."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from everygpu.progress import progress, running
from everygpu.watchdog.stuck import Judge


@pytest.fixture
def judge() -> Iterator[Judge]:
    """A judge, while operations are entered."""
    progress().is_watched = True
    yield Judge(progress())
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
    return [(str(place).partition(",")[0], place.since_s) for place in judge.look(now_s)]


def test_an_operation_that_waits_is_found_with_since_when(judge: Judge) -> None:
    def work(over: threading.Event) -> None:
        with running("forward", torch.device("cpu"), 1):
            over.wait()

    with beside(work):
        assert settled(judge, 5) == [("forward of replica 1 on cpu", 5)]
        assert settled(judge, 700) == [("forward of replica 1 on cpu", 5)]
    assert settled(judge, 800) == []


def test_of_nested_operations_the_inner_one_counts_and_each_end_is_a_move(judge: Judge) -> None:
    steps = [threading.Event() for _ in range(3)]

    def work(over: threading.Event) -> None:
        with running("update"):
            for step in steps:
                with running("sum over ranks", waits_for="ranks"):
                    pass
                step.wait()
            over.wait()

    with beside(work):
        for now_s, step in enumerate(steps):
            assert settled(judge, now_s) == [("update", now_s)]
            step.set()
    assert settled(judge, 9) == []


def test_what_waits_for_other_replicas_is_not_stuck_and_ranks_have_more_time(judge: Judge) -> None:
    def work(over: threading.Event) -> None:
        with running("forward"), running("barrier", waits_for="replicas"):
            over.wait()

    with beside(work):
        assert settled(judge, 0) == []

    def collective(over: threading.Event) -> None:
        with running("barrier over ranks", waits_for="ranks"):
            over.wait()

    with beside(collective):
        settled(judge, 0)
        (place,) = judge.look(1)
    assert (place.patience_s(10), place.patience_s(1000)) == (11, 1010)


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


def test_computing_on_the_cpu_is_moving(judge: Judge) -> None:
    if sys.platform != "linux":
        pytest.skip("needs /proc")

    def work(over: threading.Event) -> None:
        x = torch.ones(1200, 1200)
        with running("forward", torch.device("cpu")):
            while not over.is_set():
                torch.linalg.matrix_power(x, 60)  # long calls of C++

    with beside(work):
        begun = time.monotonic()
        while not (places := judge.look(time.monotonic())) or places[0].since_s < begun + 0.1:
            assert time.monotonic() < begun + 60
            time.sleep(0.02)


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
        steps[0].set()
        assert settled(judge, 10) == [("backward", 10)]
        steps[1].set()
        (found,) = settled(judge, 11)
        assert found == ("backward", 11)


def test_nothing_is_entered_while_nothing_watches() -> None:
    assert progress().is_watched is False
    with running("forward"):
        assert progress().operations == {}
    assert running("forward") is running("backward")


def test_an_error_ends_an_operation(judge: Judge) -> None:
    with pytest.raises(ZeroDivisionError), running("forward"), running("barrier"):
        raise ZeroDivisionError
    assert progress().operations == {}


def test_of_two_threads_in_a_debugger_neither_stands_still(judge: Judge) -> None:
    scope: dict[str, object] = {"__name__": "pdb"}
    exec("def interaction(over): over.wait()", scope)

    def work(over: threading.Event) -> None:
        with running("forward"):
            over.wait()

    with beside(work), beside(scope["interaction"]):  # type: ignore[arg-type]
        assert settled(judge, 0) == []
    with beside(work):
        assert settled(judge, 1) == [("forward", 1)]
