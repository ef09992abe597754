"""Replicas on one device take turns, and all of them may meet half-way."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import everygpu
from everygpu.errors import ReplicaError
from everygpu.parallel.engines.scheduler import Cancelled, ReplicaScheduler, barrier

CPU = torch.device("cpu")
OTHER = torch.device("meta")


def run(devices: list[torch.device], body: Callable[[ReplicaScheduler, int], Any]) -> list[Any]:
    """Run the body once per replica, each in a thread; return what each returned or raised."""
    scheduler = ReplicaScheduler(devices)
    results: list[Any] = [None] * len(devices)

    def replica(i: int) -> None:
        try:
            with scheduler.turn(i):
                results[i] = body(scheduler, i)
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=replica, args=(i,)) for i in range(len(devices))]
    random.Random(0).shuffle(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("devices", [[CPU] * 4, [CPU, OTHER] * 2, [CPU, CPU, OTHER], [CPU]])
def test_everyone_gets_a_part_of_what_all_brought(devices: list[torch.device]) -> None:
    def body(scheduler: ReplicaScheduler, i: int) -> list[Any]:
        return [barrier((i, k), lambda brought, k=k: [(k, brought)] * len(brought)) for k in range(3)]

    everyone = range(len(devices))
    expected = [(k, [(i, k) for i in everyone]) for k in range(3)]
    if len(devices) > 1:
        assert run(devices, body) == [expected] * len(devices)
    else:
        assert run(devices, body) == [[(k, [(0, k)]) for k in range(3)]]


def test_after_a_meeting_they_go_on_in_order() -> None:
    seen: list[Any] = []

    def body(scheduler: ReplicaScheduler, i: int) -> None:
        for k in range(3):
            seen.append((k, i))
            time.sleep(0.002)
            barrier(None, lambda brought: brought)
        seen.append((3, i))

    run([CPU] * 3, body)
    assert seen == [(k, i) for k in range(4) for i in range(3)]


def test_without_others_one_meets_oneself() -> None:
    assert barrier(3, lambda brought: [value + 1 for value in brought]) == 4


def test_a_failure_ends_the_wait() -> None:
    def body(scheduler: ReplicaScheduler, i: int) -> None:
        if i == 2:
            raise ArithmeticError("broken")
        barrier(i, lambda brought: brought)

    results = run([CPU] * 4, body)
    assert isinstance(results[2], ArithmeticError)
    assert all(isinstance(results[i], Cancelled) for i in (0, 1, 3))


def test_a_failure_in_the_meeting_reaches_one_and_stops_all() -> None:
    def combine(brought: list[Any]) -> list[Any]:
        raise ArithmeticError("broken")

    results = run([CPU] * 3, lambda scheduler, i: barrier(i, combine))
    assert sorted(type(r).__name__ for r in results) == ["ArithmeticError", "Cancelled", "Cancelled"]


def test_someone_who_does_not_come_is_named() -> None:
    results = run([CPU] * 3, lambda scheduler, i: None if i == 1 else barrier(i, lambda brought: brought))
    errors = [r for r in results if isinstance(r, ReplicaError)]
    assert errors
    assert "which replica 1 ended without reaching" in str(errors[0])


def test_random_numbers_are_drawn_in_the_same_order_every_time() -> None:
    class Drawing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = torch.rand(len(x))
            barrier(None, lambda brought: brought)
            return torch.stack([first, torch.rand(len(x))], 1)

    model = everygpu.DataParallel(Drawing(), ["cpu"] * 3)
    runs = []
    for _ in range(3):
        torch.manual_seed(0)
        runs.append(everygpu.parallel.gather(model(torch.zeros(6, 1))))
    assert runs[0].equal(runs[1])
    assert runs[0].equal(runs[2])
    assert runs[0].unique().numel() == 12


def test_a_forward_within_a_replica_has_meetings_of_its_own() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + barrier(len(x), lambda brought: [sum(brought)] * len(brought))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = everygpu.DataParallel(Inner(), ["cpu"] * 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = everygpu.parallel.gather(self.inner(x))
            return y + 100 * barrier(len(x), lambda brought: [sum(brought)] * len(brought))

    out = everygpu.DataParallel(Outer(), ["cpu"] * 2)(torch.zeros(8))
    assert everygpu.parallel.gather(out).tolist() == [804.0] * 8
