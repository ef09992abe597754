"""The meter: right by rows, no graph kept, no waiting in update."""

import gc
import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everygpu import Meter
from everygpu.errors import OptionError

updates = st.lists(
    st.tuples(st.floats(-100, 100, width=32), st.integers(0, 50), st.booleans()), min_size=1, max_size=20
)


@given(updates)
def test_it_is_the_mean_over_rows(updates: list[tuple[float, int, bool]]) -> None:
    meter = Meter()
    for value, rows, as_tensor in updates:
        meter.update(torch.tensor(value) if as_tensor else value, rows)
    total = sum(rows for _, rows, _ in updates)
    assert meter.num_rows == total
    if total == 0:
        assert math.isnan(meter.avg)
    else:
        expected = math.fsum(value * rows for value, rows, _ in updates) / total
        assert meter.avg == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    "value",
    [True, 2, 2.5, np.float32(2.5), np.int64(2), torch.tensor(2), torch.tensor(True), torch.tensor([2, 3])],
    ids=repr,
)
def test_every_kind_of_number_is_taken(value: Any) -> None:
    meter = Meter()
    meter.update(value, np.int64(2))
    assert meter.avg == pytest.approx(float(torch.as_tensor(value, dtype=torch.float64).mean()))


def test_no_graph_is_kept() -> None:
    meter = Meter()
    weight = torch.ones(3, requires_grad=True)
    saved = weight * 2
    loss = (saved * saved).sum()
    meter.update(loss, 3)
    watched = [weakref.ref(thing) for thing in (weight, saved, loss)]
    del weight, saved, loss
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3
    assert meter.avg == 12.0


READS = ["item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__"]


@pytest.mark.parametrize("name", READS)
def test_update_does_not_read_the_value(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"update called {name}")

    meter = Meter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, name, refuse)
        for value in (torch.tensor(1.0, requires_grad=True), torch.tensor([1.0, 3.0]), torch.tensor(3)):
            meter.update(value, 2)
    assert meter.avg == 2.0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_update_does_not_wait_for_a_gpu() -> None:
    meter = Meter()
    values = [torch.full((2,), float(i), device=f"cuda:{i}") for i in range(torch.cuda.device_count())]
    try:
        torch.cuda.set_sync_debug_mode("error")
        for value in values:
            meter.update(value, 2)
            meter.update(value.mean(), 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert meter.avg == pytest.approx(sum(range(len(values))) / len(values))


def test_values_from_several_devices_are_joined(devices) -> None:
    meter = Meter()
    for i, device in enumerate(devices(3)):
        meter.update(torch.tensor(float(i), device=device), i + 1)
    meter.update(10.0, 2)
    num = len(devices(3))
    expected = (sum(i * (i + 1) for i in range(num)) + 20) / (sum(range(1, num + 1)) + 2)
    assert meter.avg == pytest.approx(expected)


def test_edges() -> None:
    meter = Meter()
    assert f"{meter:.3f}" == str(meter) == "nan"
    meter.update(torch.tensor([1.0, 3.0]), 4)
    meter.update(8.0, 2)
    meter.update(torch.tensor(float("inf")), 0)
    assert (meter.avg, meter.num_rows) == (4.0, 6)
    meter.update(torch.tensor(float("nan")))
    assert math.isnan(meter.avg)
    meter.reset()
    value = torch.tensor(1.23456, dtype=torch.float64)
    meter.update(value, 2)
    value.fill_(100)
    assert f"{meter:>8.1f}" == "     1.2"
    assert f"{meter}" == str(meter) == "1.235"
    assert repr(meter) == "Meter(avg=1.23456, num_rows=2)"


def test_it_works_in_any_mode_and_sums_in_double() -> None:
    meter, value = Meter(), torch.tensor(0.1, dtype=torch.bfloat16)
    for _ in range(1000):
        with torch.inference_mode():
            meter.update(value, 7)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            meter.update(value.clone().requires_grad_(), 7)
    assert meter.avg == pytest.approx(value.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("value", "num_rows"),
    [
        *((value, 1) for value in ("1.0", None, [1.0], 1j, torch.tensor(1j), torch.ones(2, 2), torch.ones(0))),
        *((1.0, num_rows) for num_rows in (-1, 2.0, "3", torch.tensor(3))),
    ],
    ids=repr,
)
def test_bad_arguments_are_refused_and_leave_the_meter_as_it_was(value: Any, num_rows: Any) -> None:
    meter = Meter()
    meter.update(3.0, 2)
    with pytest.raises(OptionError, match="Meter: "):
        meter.update(value, num_rows)
    assert (meter.avg, meter.num_rows) == (3.0, 2)
