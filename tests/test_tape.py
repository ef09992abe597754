"""CUDA graphs acted out on the CPU do what the tests of captures rely on."""

import ctypes
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tape import HERE, Stream, Tape


def tape() -> Tape:
    return Tape([torch.device("cpu")])


def test_capture_changes_nothing_that_was_there() -> None:
    x, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    mean, var = torch.zeros(3), torch.ones(3)

    def function() -> Tensor:
        x.add_(1)
        (weight * torch.rand(3)).sum().backward()
        return F.batch_norm(torch.rand(4, 3), mean, var, training=True)

    random, graph = torch.get_rng_state(), tape()
    assert graph.capture(function).isnan().all(), "there is no result yet"
    assert (x.tolist(), mean.tolist()) == ([1] * 3, [0] * 3)
    assert torch.get_rng_state().equal(random)
    graph.replay()
    assert x.tolist() == [2] * 3
    assert not mean.equal(torch.zeros(3))
    assert torch.isfinite(weight.grad).all()


def test_replays_use_the_memory_of_the_capture_and_draw_anew() -> None:
    x, weight, graph = torch.ones(2), torch.nn.Parameter(torch.ones(2)), tape()
    kept = weight.data
    y, drawn = graph.capture(lambda: ((weight * x).detach()[1:], torch.rand(4)))
    place, version = y.data_ptr(), weight._version
    weight.data = torch.full((2,), 7.0)  # which a capture doesn't see
    for value, written in ((1, 3), (2, 3)):
        kept.fill_(value)
        x.fill_(written)
        torch.manual_seed(3)
        expected = torch.rand(4)
        torch.manual_seed(3)
        graph.replay()
        assert y.tolist() == [value * written]
        assert drawn.equal(expected)
        graph.replay()
        assert not drawn.equal(expected)
    assert (y.data_ptr(), weight._version) == (place, version)


def test_memory_that_was_let_go_is_overwritten() -> None:
    views: list[int] = []

    def function() -> Tensor:
        x = torch.ones(3)
        views.append(x.data_ptr())
        y = x + 1
        del x
        return y

    graph = tape()
    y = graph.capture(function)
    read: list[list[float]] = []
    address = torch.tensor(views)
    graph.call(lambda a: read.append(_at(int(a))), [address])
    graph.replay()
    assert y.tolist() == [2, 2, 2]
    assert all(map(math.isnan, read[0]))


def test_memory_that_its_owner_has_freed_is_missed() -> None:
    inputs = [torch.ones(3)]
    graph = tape()
    graph.capture(lambda: inputs[0] + 1)
    inputs.clear()
    with pytest.raises(AssertionError, match="freed"):
        graph.replay()


def test_a_second_capture_reads_what_the_first_has_made() -> None:
    table, classes, graph = torch.arange(3.0), torch.tensor([2, 0]), tape()
    rows = graph.capture(lambda: classes + 0)
    backward = graph.new_in_same_pool()
    found = backward.capture(lambda: table.gather(0, rows) * 2)
    assert found.isnan().all()
    assert rows.tolist() == [-1, -1], "there are none before a replay"
    graph.replay()
    backward.replay()
    assert found.tolist() == [4, 0]


def test_numbers_that_are_written_are_kept_and_writes_are_not_counted() -> None:
    x, graph = torch.zeros(2), tape()

    def function() -> None:
        x[0] = 3
        x.add_(1)

    graph.capture(function)
    version = x._version
    graph.replay()
    assert x.tolist() == [4, 1]
    assert x._version == version


def test_kernels_run_as_soon_as_they_may() -> None:
    seen: list[float] = []
    x, graph = torch.zeros(1), tape()

    def function() -> None:
        x.add_(1)
        moment = graph.mark()
        x.add_(1)
        stream = Stream()
        stream.wait_event(moment)
        HERE.streams.append(stream)
        graph.call(lambda t: seen.append(t.item()), [x])
        HERE.streams.pop()
        graph.call(lambda t: seen.append(t.item()), [x])

    graph.capture(function)
    graph.replay()
    assert seen == [1, 2]


@pytest.mark.parametrize("wait", [Tensor.item, Tensor.nonzero, bool, lambda x: x[x > 0], lambda x: x.equal(x)])
def test_waiting_is_refused(wait: Callable[[Tensor], Any]) -> None:
    x = torch.ones(1)
    with pytest.raises(RuntimeError, match="capturing"):
        tape().capture(lambda: wait(x))


def _at(address: int) -> list[float]:
    return list((ctypes.c_float * 3).from_address(address))
