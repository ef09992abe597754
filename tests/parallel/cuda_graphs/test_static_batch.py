"""Batches at fixed addresses are the batches they were written from."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import everygpu
from everygpu import tree
from everygpu.errors import SplitError
from everygpu.parallel.cuda_graphs.static_batch import NotStatic, StaticBatch, describe_batch
from everygpu.parallel.scatter.split import ScatterSpec

Devices = Callable[[int], list[torch.device]]
PROPERTY = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def route_to(used: list[torch.device], dim: int = 0, split: Any = "chunk") -> ScatterSpec:
    return ScatterSpec(devices=tuple(used), dim=dim, split=split)


def rows_of(num: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(num, *shape, generator=torch.Generator().manual_seed(seed))


def values(batch: Any) -> list[Any]:
    """Plain values of every leaf, ``Replicated`` opened."""
    found = []
    for _, leaf in tree.leaves(batch, ""):
        if isinstance(leaf, everygpu.Replicated):
            found += values(leaf.value)
        else:
            found.append(everygpu.parallel.gather(leaf).cpu() if isinstance(leaf, Tensor) else leaf)
    return found


def assert_same(a: Any, b: Any) -> None:
    for x, y in zip(values(a), values(b), strict=True):
        assert x.equal(y) if isinstance(x, Tensor) else x == y


@PROPERTY
@given(rows=st.integers(1, 20), count=st.integers(1, 5), split=st.sampled_from(["chunk", "even"]))
def test_what_is_written_is_read(devices: Devices, rows: int, count: int, split: str) -> None:
    used = devices(count)
    route = route_to(used, split=split)

    def batch(seed: int) -> Any:
        x, mask = rows_of(rows, 3, seed=seed), rows_of(7, 7, seed=seed + 1)
        inputs = ({"x": x, "scale": torch.tensor(2.0 * seed)}, everygpu.Replicated([mask, "name"]), 5)
        return inputs, {"flag": True, "more": x.double()}, (torch.arange(rows) + seed, None)

    held = StaticBatch(batch(0), route)
    memory = None
    for seed in range(3):
        assert describe_batch(batch(seed), route) == describe_batch(batch(0), route)
        held.write(batch(seed))
        assert_same(held.read(), batch(seed))
        addresses = [t.data_ptr() for t in held.tensors()]
        assert memory in (None, addresses)
        memory = addresses


def test_a_tensor_that_comes_twice_is_kept_once(devices: Devices) -> None:
    route = route_to(devices(2))
    x = rows_of(6, 2)
    batch: Any = (({"inputs": x, "labels": x},), {}, (x,))
    apart: Any = (({"inputs": x, "labels": x.clone()},), {}, (x,))
    assert describe_batch(batch, route) != describe_batch(apart, route)
    held = StaticBatch(batch, route)
    held.write(batch)
    (inputs,), _, (target,) = held.read()
    assert inputs["inputs"] is inputs["labels"] is target
    torch.testing.assert_close(everygpu.parallel.gather(target).cpu(), x)


def test_batches_that_are_spread_already(devices: Devices) -> None:
    used = devices(3)
    route = route_to(used)
    data = [(rows_of(8, 2, seed=i), torch.arange(8) + i) for i in range(3)]
    plain = [((x,), {}, (y,)) for x, y in data]
    fed = [((x,), {}, (y,)) for x, y in everygpu.Feeder(data, used)]
    held = StaticBatch(plain[0], route)
    for a, b in zip(plain, fed):
        assert describe_batch(a, route) == describe_batch(b, route)
        held.write(b)
        assert_same(held.read(), a)


def test_memory_format_is_kept(devices: Devices) -> None:
    used = devices(2)
    x = rows_of(4, 3, 5, 5).to(memory_format=torch.channels_last)
    held = StaticBatch(((x,), {}, ()), route_to(used))
    held.write(((x,), {}, ()))
    (read,), _, _ = held.read()
    assert all(s.is_contiguous(memory_format=torch.channels_last) for s in read.shards)


@pytest.mark.parametrize(
    "other",
    [
        ((torch.ones(4, 2),), {}, ()),
        ((torch.ones(6, 2, dtype=torch.float64),), {}, ()),
        ((torch.ones(2, 6).T,), {}, ()),
        (([torch.ones(6, 2)],), {}, ()),
        ((torch.ones(6, 2), 1), {}, ()),
        ((torch.ones(6, 2),), {"k": None}, ()),
        ((torch.ones(6, 2),), {}, (torch.ones(6),)),
        ((everygpu.Replicated(torch.ones(6, 2)),), {}, ()),
    ],
)
def test_what_differs_is_described_differently(devices: Devices, other: Any) -> None:
    route = route_to(devices(2))
    assert describe_batch(other, route) != describe_batch(((torch.ones(6, 2),), {}, ()), route)


def test_equal_numbers_of_other_types_differ(devices: Devices) -> None:
    route = route_to(devices(2))
    found = [describe_batch(((torch.ones(4, 2), value), {}, ()), route) for value in (1, 1.0, True)]
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        (torch.ones(4, 2, requires_grad=True), "takes a gradient"),
        (torch.ones(4, 2).to_sparse(), "dense"),
        (object(), "object"),
        (lambda: None, "function"),
    ],
)
def test_what_has_no_fixed_address(devices: Devices, leaf: Any, reason: str) -> None:
    with pytest.raises(NotStatic, match=reason):
        describe_batch(((torch.ones(4, 2), leaf), {}, ()), route_to(devices(2)))


def test_shards_of_other_sizes_are_refused(devices: Devices) -> None:
    used = devices(2)
    (x,) = everygpu.Feeder([torch.ones(9, 2)], everygpu.DataParallel(torch.nn.Linear(2, 2), used, split=[2, 1]))
    with pytest.raises(NotStatic, match="laid out"):
        describe_batch(((x,), {}, ()), route_to(used))


def test_tensors_that_disagree_on_the_rows(devices: Devices) -> None:
    with pytest.raises(SplitError):
        describe_batch(((torch.ones(4, 2), torch.ones(5, 2)), {}, ()), route_to(devices(2)))
