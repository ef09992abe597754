"""Who captures now, and on which streams."""

import threading
from collections.abc import Callable
from unittest.mock import MagicMock

import pytest
import torch

from everygpu.comm import streams
from everygpu.parallel.cuda_graphs import multi_gpu_graph
from everygpu.parallel.cuda_graphs.multi_gpu_graph import CaptureLock, MultiGpuGraph


def in_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "nobody waits for a turn"


def test_one_has_the_turn_and_nobody_waits() -> None:
    turn, found = CaptureLock(), []

    def ask() -> None:
        with turn.taken() as is_ours:
            found.append(is_ours)

    with turn.taken() as is_ours:
        assert is_ours
        ask()
        in_a_thread(ask)
    in_a_thread(ask)
    with pytest.raises(ValueError, match="failed"), turn.taken():
        raise ValueError("failed")
    ask()
    assert found == [False, False, True, True]


def test_what_waits_for_gpus_is_put_off() -> None:
    turn, calls = CaptureLock(), []
    turn.defer_until_idle(lambda: calls.append("at once"))
    assert calls == ["at once"]
    with turn.taken():
        turn.defer_until_idle(lambda: calls.append("by its own thread"))
        in_a_thread(lambda: turn.defer_until_idle(lambda: calls.append("by another")))
        assert calls == ["at once"]
        turn.run_deferred()
        assert sorted(calls) == ["at once", "by another", "by its own thread"]
        turn.defer_until_idle(lambda: calls.append("afterwards"))
        assert len(calls) == 3
    assert calls[3:] == ["afterwards"]


def test_what_is_put_off_may_put_off() -> None:
    """Freeing one capture, Python may come upon others."""
    turn, calls = CaptureLock(), []

    def first() -> None:
        turn.defer_until_idle(lambda: calls.append("second"))
        calls.append("first")

    turn.defer_until_idle(first)
    assert calls == ["first", "second"]


def test_nothing_that_is_put_off_is_forgotten() -> None:
    turn, calls = CaptureLock(), []

    def work() -> None:
        for _ in range(500):
            with turn.taken():
                pass
            turn.defer_until_idle(lambda: calls.append(1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 2000


class State:
    """Stands in for the place of a generator's state in a graph that draws nothing."""

    num_fills = 0

    def fill(self) -> None:
        self.num_fills += 1

    def is_used(self) -> bool:
        return False


def test_nothing_is_drawn_while_another_thread_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDAGraph", "graph_pool_handle", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    graph, state, turn = MultiGpuGraph([torch.device("cuda", i) for i in range(2)]), State(), CaptureLock()
    monkeypatch.setattr(multi_gpu_graph, "CAPTURE_LOCK", turn)
    graph._random = [state]  # type: ignore[list-item]
    found: list[bool] = []

    def ask() -> None:
        with graph.may_replay() as may_replay:
            found.append(may_replay)
            if may_replay:
                graph.replay()

    with turn.taken():
        in_a_thread(ask)
    assert (found, state.num_fills, graph._random) == ([False], 0, [state])
    ask()
    assert (found, state.num_fills, graph._random) == ([False, True], 1, [])
    with turn.taken():  # it is known to draw nothing
        in_a_thread(ask)
    assert found == [False, True, True]
    assert state.num_fills == 1
    assert graph._graph.replay.call_count == 2


@pytest.mark.parametrize("other", ["replay", "free"])
def test_brief_work_of_another_thread_is_waited_for(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    """Only who captures keeps others from replaying."""
    for name in ("CUDAGraph", "graph_pool_handle", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    lock, begun, may_end = CaptureLock(), threading.Event(), threading.Event()
    monkeypatch.setattr(multi_gpu_graph, "CAPTURE_LOCK", lock)
    graph = MultiGpuGraph([torch.device("cuda", i) for i in range(2)])
    graph._random = [State()]  # type: ignore[list-item]

    def work() -> None:
        begun.set()
        assert may_end.wait(60)

    def replay() -> None:
        with graph.may_replay() as may_replay:
            assert may_replay
            work()

    thread = threading.Thread(target=replay if other == "replay" else lambda: lock.defer_until_idle(work))
    thread.start()
    assert begun.wait(60)
    threading.Timer(0.01, may_end.set).start()
    with graph.may_replay() as may_replay:
        assert may_replay
        assert may_end.is_set()
    thread.join(60)


def test_threads_that_ask_first_get_the_same_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Barrier(4)
    pause = threading.Event()

    def make(device: torch.device) -> object:
        pause.wait(0.05)
        return object()

    found: list[object] = []

    def ask() -> None:
        start.wait()
        found.append(streams.kept_stream(torch.device("cpu"), "asked for by many"))

    monkeypatch.setattr("torch.cuda.Stream", make)
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
