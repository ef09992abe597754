"""When work beside a backward is queued, and what it waits for."""

from typing import Any

import pytest
import torch
from torch import Tensor

from everygpu.parallel.cuda_graphs import ready_events
from everygpu.parallel.cuda_graphs.ready_events import ReadyEvents

CPU = torch.device("cpu")


class Stream:
    """Notes what it waits for."""

    def __init__(self, moments: list[Any] | None = None) -> None:
        self.waits: list[Any] = []
        self._moments = [] if moments is None else moments

    def record_event(self) -> int:
        self._moments.append(None)
        return len(self._moments)

    def wait_event(self, event: int) -> None:
        self.waits.append(event)

    def wait_stream(self, stream: "Stream") -> None:
        self.waits.append(stream)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """The streams beside backward; events are numbered as they are recorded."""
    moments: list[Any] = []
    made: list[Stream] = []

    def kept_stream(device: torch.device, purpose: str) -> Stream:
        made.append(Stream())
        return made[-1]

    monkeypatch.setattr(ready_events, "kept_stream", kept_stream)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: Stream(moments))
    return made


def make_groups(num: int, num_replicas: int) -> list[list[Tensor]]:
    return [[torch.zeros(1) for _ in range(num_replicas)] for _ in range(num)]


def run(taken: ReadyEvents, num: int) -> list[int]:
    order: list[int] = []
    taken.run_beside({g: lambda g=g: order.append(g) for g in range(num)})  # type: ignore[misc]
    return order


def test_groups_come_as_they_are_ready_on_all_replicas(beside: list[Stream]) -> None:
    taken, groups = ReadyEvents([CPU] * 2), make_groups(3, 2)
    notes = [[taken.counter(g, j, [t]) for j, t in enumerate(row)] for g, row in enumerate(groups)]
    for g, j in [(1, 0), (2, 0), (2, 1), (0, 0), (1, 1), (0, 1)]:
        notes[g][j](groups[g][j])
    assert run(taken, 3) == [2, 1, 0]
    # Each waits for both replicas: the moments are numbered as above.
    assert beside[0].waits == [2, 3, 1, 5, 4, 6]


def test_a_gradient_that_comes_again_counts_when_it_came_last(beside: list[Stream]) -> None:
    taken, groups = ReadyEvents([CPU]), make_groups(2, 1)
    first, second = (taken.counter(g, 0, row) for g, row in enumerate(groups))
    first(groups[0][0])
    second(groups[1][0])
    first(groups[0][0])
    assert run(taken, 2) == [1, 0]


def test_what_is_not_marked_comes_last_and_waits_for_all(beside: list[Stream]) -> None:
    taken, groups = ReadyEvents([CPU]), make_groups(3, 1)
    for g, (t,) in enumerate(groups):
        taken.counter(g, 0, [t])(t)
    taken.forget(0, 0)
    assert run(taken, 3) == [1, 2, 0]
    assert beside[0].waits == [2, 3, 4]


def test_a_group_is_ready_with_its_last_tensor(beside: list[Stream]) -> None:
    taken = ReadyEvents([CPU])
    tensors = [torch.zeros(1) for _ in range(2)]
    note, other = taken.counter(0, 0, tensors), torch.zeros(1)
    note(tensors[0])
    taken.counter(1, 0, [other])(other)
    note(tensors[1])
    assert run(taken, 2) == [1, 0]
