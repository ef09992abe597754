"""Parameters on their way to all devices, and gradients on their way back, by kernels and by copies."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from everygpu.comm.streams import synchronize_streams
from everygpu.parallel.buckets.memory import Grads
from everygpu.parallel.cuda_graphs.transfer.backends import (
    CopyBackend,
    KernelBackend,
    _KernelGradReducer,
)
from everygpu.parallel.cuda_graphs.transfer.parameter_sync import ParameterSync

Devices = Callable[[int], list[torch.device]]


def make_params(device: torch.device) -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(300, 7), (5,), (0,), (), (3000,)]
    found = [torch.randn(shape, device=device) for shape in shapes]
    found += [found[0].double(), found[1].bfloat16(), torch.randn(4, 6, device=device).t()]
    return [nn.Parameter(t) for t in found]


def add_up(
    exchange: ParameterSync, devices: Sequence[torch.device], grads: Sequence[Sequence[Grads]]
) -> list[Tensor | None]:
    """Add gradients up as a launch does, for each group and device; all parameters count as reached."""
    sums = exchange.make_reducers()
    for total, rows in zip(sums, grads):
        total.take(rows)
        total.write_tables()
    exchange.make_room()
    synchronize_streams(devices)
    for total in sums:
        total.run()
    synchronize_streams(devices)
    return exchange.totals([True] * len(exchange.params))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_parameters_arrive_and_gradients_add_up(either_way: Devices, count: int) -> None:
    devices = either_way(count)
    params = make_params(devices[0])
    exchange = ParameterSync(params, devices, limit_bytes=4096)
    exchange.send()
    for p, twins in zip(params, map(exchange.twins().get, map(id, params))):
        assert len(twins or ()) == len(devices) - 1
        assert all(twin.cpu().equal(p.cpu()) for twin in twins or ())

    def draw(p: Tensor, d: torch.device, j: int) -> Tensor | None:
        return None if p.shape == (5,) and j > 0 else torch.randn(p.shape, device=d).to(p.dtype)

    grads = [[[draw(p, d, j) for p in b.originals] for j, d in enumerate(devices)] for b in exchange.groups]
    expected = {
        id(p): sum(row[k].cpu() for row in rows if row[k] is not None)  # type: ignore[union-attr]
        for b, rows in zip(exchange.groups, grads)
        for k, p in enumerate(b.originals)
    }
    launched = add_up(exchange, devices, grads)
    exchange.make_room()
    exchange.add(grads)
    for found in (launched, exchange.totals([True] * len(params))):
        for p, t in zip(params, found):
            assert t is not None
            assert t.device == devices[0]
            assert t.stride() == p.stride()
            tolerance = 0.05 if p.dtype is torch.bfloat16 else 1e-5
            torch.testing.assert_close(t.cpu(), expected[id(p)], rtol=tolerance, atol=tolerance)


def test_sums_are_the_callers_own(either_way: Devices) -> None:
    devices = either_way(2)
    params = [nn.Parameter(torch.zeros(2000, device=devices[0]))]
    exchange = ParameterSync(params, devices)
    kept = []
    for value in (1.0, 2.0):
        kept += add_up(exchange, devices, [[[torch.full((2000,), value, device=d)] for d in devices]])
        exchange.make_room()
        exchange.add([[[torch.full((2000,), 10 * value, device=d)] for d in devices]])
        kept += exchange.totals([True])
    assert [t[0].item() for t in kept if t is not None] == [2.0, 20.0, 4.0, 40.0]


def test_other_memory_does_not_fit(either_way: Devices) -> None:
    devices = either_way(2)
    params = [nn.Parameter(torch.randn(4, 4, device=devices[0]))]
    exchange = ParameterSync(params, devices)
    assert exchange.fits(params)
    assert not exchange.fits([*params, nn.Parameter(torch.zeros(1, device=devices[0]))])
    held = params[0].data
    params[0].data = held.t()
    assert not exchange.fits(params)
    params[0].data = held.clone()
    assert not exchange.fits(params)


def test_kernels_are_loaded_before_a_recording(either_way: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, ran = either_way(2), []
    reducers = {KernelBackend: _KernelGradReducer, CopyBackend: CopyBackend}
    for owner, name in (*((b, "send") for b in reducers), *((r, "run") for r in reducers.values())):
        run = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda me, run=run: (ran.append(run.__qualname__), run(me)))
    exchange = ParameterSync(make_params(devices[0]), devices)
    used = {type(group.backend) for group in exchange.groups}
    assert set(ran) == {f"{b.__name__}.send" for b in used} | {f"{reducers[b].__name__}.run" for b in used}


def test_with_a_default_device(either_way: Devices) -> None:
    devices = either_way(2)
    params = [nn.Parameter(torch.ones(2000, device=devices[0]))]
    with torch.device("meta"):
        exchange = ParameterSync(params, devices)
        exchange.send()
        (found,) = add_up(exchange, devices, [[[torch.ones(2000, device=d)] for d in devices]])
    assert found is not None
    assert found.cpu().equal(torch.full((2000,), 2.0))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32])
def test_what_kernels_do_not_know_is_copied(either_way: Devices, dtype: torch.dtype) -> None:
    devices = either_way(2)
    unaligned = torch.randn(9, device=devices[0]).to(dtype)[1:]
    exchange = ParameterSync([nn.Parameter(unaligned)], devices)
    assert isinstance(exchange.groups[0].backend, CopyBackend)
    exchange.send()
    (twins,) = exchange.twins().values()
    assert twins[0].cpu().equal(unaligned.cpu())
