"""Parameters on their way to all devices, and gradients on their way back."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from everygpu.comm.streams import synchronize_streams
from everygpu.parallel.buckets.memory import Grads
from everygpu.parallel.buckets.plan import plan_buckets
from everygpu.parallel.cuda_graphs import transfer
from everygpu.parallel.cuda_graphs.transfer import ParameterSync, lay_out

Devices = Callable[[int], list[torch.device]]


@pytest.fixture(params=["kernels", "copies"])
def each_way(request: pytest.FixtureRequest, recording: Devices, monkeypatch: pytest.MonkeyPatch) -> str:
    """With kernels, and, on one device, without them."""
    if request.param == "copies":
        monkeypatch.setattr(transfer, "has_kernels", lambda devices: False)
    return str(request.param)


def make_params(device: torch.device) -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(300, 7), (5,), (0,), (), (3000,)]
    found = [torch.randn(shape, device=device) for shape in shapes]
    found += [found[0].double(), found[1].bfloat16(), torch.randn(4, 6, device=device).t()]
    found += [torch.randn(9, device=device)[1:], torch.randn(8, 6, device=device)[:, :3]]  # unaligned; with gaps
    found += [
        torch.randn(5, 3, dtype=torch.complex64, device=device),
        torch.randn(3, dtype=torch.complex128, device=device)[1:],
    ]
    return [nn.Parameter(t) for t in found]


def add_up(
    exchange: ParameterSync, devices: Sequence[torch.device], grads: Sequence[Sequence[Grads]]
) -> list[Tensor | None]:
    """Add gradients up as a launch does, for each group and device; all parameters count as reached."""
    sums = exchange.make_reducers()
    exchange.make_room()
    held = []  # as a recording holds its memory
    for total, rows in zip(sums, grads):
        total.take(rows)
        held.append(total._sources._grads)
        if exchange.groups[0].copied is None:  # tables are filled after the recording
            total.finish()
    synchronize_streams(devices)
    for total in sums:
        total.run()
    synchronize_streams(devices)
    return exchange.totals([True] * len(exchange.params))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_parameters_arrive_and_gradients_add_up(recording: Devices, each_way: str, count: int) -> None:
    if each_way == "copies" and count > 1:
        pytest.skip("several devices need kernels")
    devices = recording(count)
    params = make_params(devices[0])
    exchange = ParameterSync(params, devices, limit_bytes=4096)
    with torch.no_grad():
        for p in params:
            p.mul_(2)
    exchange.send()
    for p, twins in zip(params, map(exchange.twins().get, map(id, params))):
        assert len(twins or ()) == len(devices) - 1
        assert all(twin.cpu().equal(p.cpu()) for twin in twins or ())

    def draw(p: Tensor, d: torch.device, j: int) -> Tensor | None:
        if p.shape == (5,) and (j > 0 or count == 1):
            return None
        return torch.randn(p.shape, dtype=p.dtype, device=d).conj()

    grads = [[[draw(p, d, j) for p in b.originals] for j, d in enumerate(devices)] for b in exchange.groups]
    expected = {
        id(p): sum((row[k].cpu() for row in rows if row[k] is not None), torch.zeros(p.shape))  # type: ignore[union-attr]
        for b, rows in zip(exchange.groups, grads)
        for k, p in enumerate(b.originals)
    }
    for p, t in zip(params, add_up(exchange, devices, grads)):
        assert t is not None
        assert t.device == devices[0]
        tolerance = 0.05 if p.dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(t.cpu(), expected[id(p)].to(p.dtype), rtol=tolerance, atol=tolerance)


def test_sums_are_the_callers_own(recording: Devices, each_way: str) -> None:
    devices = recording(1 if each_way == "copies" else 2)
    params = [nn.Parameter(torch.zeros(2000, device=devices[0]))]
    exchange = ParameterSync(params, devices)
    kept = []
    for value in (1.0, 2.0):
        kept += add_up(exchange, devices, [[[torch.full((2000,), value, device=d)] for d in devices]])
    assert [t[0].item() for t in kept if t is not None] == [len(devices), 2.0 * len(devices)]


def test_other_memory_does_not_fit(recording: Devices) -> None:
    devices = recording(2)
    params = [nn.Parameter(torch.randn(4, 4, device=devices[0]))]
    exchange = ParameterSync(params, devices)
    assert exchange.fits(params)
    assert not exchange.fits([*params, nn.Parameter(torch.zeros(1, device=devices[0]))])
    held = params[0].data
    params[0].data = held.t()
    assert not exchange.fits(params)
    params[0].data = held.clone()
    assert not exchange.fits(params)


def test_with_a_default_device(recording: Devices) -> None:
    devices = recording(2)
    params = [nn.Parameter(torch.ones(2000, device=devices[0]))]
    with torch.device("meta"):
        exchange = ParameterSync(params, devices)
        exchange.send()
        (found,) = add_up(exchange, devices, [[[torch.ones(2000, device=d)] for d in devices]])
    assert found is not None
    assert found.cpu().equal(torch.full((2000,), 2.0))


def test_what_kernels_do_not_know_is_refused(recording: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    params, devices = [nn.Parameter(torch.zeros(3, dtype=torch.complex64))], recording(2)
    assert transfer.why_not_sent(params, devices) is None
    params = [nn.Parameter(torch.zeros(3).to(torch.float8_e5m2), requires_grad=False)]
    assert "float8_e5m2" in str(transfer.why_not_sent(params, devices))
    assert transfer.why_not_sent(params, devices[:1]) is None
    monkeypatch.setattr(transfer, "has_kernels", lambda devices: False)
    assert "Triton" in str(transfer.why_not_sent([], devices))


def test_gradients_are_laid_out_as_their_slots():
    weight = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    (plan,) = plan_buckets([weight], 1)
    (slot,) = plan.slots
    fits = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    assert lay_out(fits, slot, weight.dtype, weight.device) is fits
    contiguous, expanded = torch.randn(4, 3, 2, 2), torch.ones(()).expand(4, 3, 2, 2)
    unaligned = torch.randn(49)[1:].as_strided(slot.shape, slot.strides)
    for grad in (contiguous, expanded, unaligned):
        laid = lay_out(grad, slot, weight.dtype, weight.device)
        assert laid.data_ptr() % 16 == 0
        assert laid.as_strided(slot.shape, slot.strides).equal(grad)
    assert lay_out(None, slot, weight.dtype, weight.device).equal(torch.zeros(48))
