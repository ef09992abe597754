"""Parameters on their way to all devices, and gradients on their way back."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from everygpu.comm.streams import synchronize_streams
from everygpu.parallel.buckets.memory import Grads
from everygpu.parallel.buckets.plan import BLOCK_NUMEL, plan_buckets
from everygpu.parallel.cuda_graphs import transfer
from everygpu.parallel.cuda_graphs.transfer import GradTables, ParameterSync, block_addresses, block_lengths, lay_out

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


CPU = torch.device("cpu")
shapes = st.lists(st.lists(st.integers(0, 40), min_size=0, max_size=3), min_size=1, max_size=8)


def test_tables_have_the_address_of_each_block() -> None:
    params = [torch.zeros(BLOCK_NUMEL + 1), torch.zeros(3, dtype=torch.float64)]
    plans = plan_buckets(params, 2)
    assert [[slot.index for slot in plan.slots] for plan in plans] == [[1], [0]]
    wide, sources = (GradTables(plan, [CPU] * 2, [CPU] * 3) for plan in plans)
    grads = [torch.zeros(BLOCK_NUMEL + 1) for _ in range(3)]
    assert not any(sources.take(replica, {0: grad}) for replica, grad in enumerate(grads))
    assert wide.take(1, {1: None})  # zeros
    assert all(not table.any() for table in (*wide.tables, *sources.tables))
    wide.write()
    sources.write()
    first, second = sources.tables
    assert first[:, 0].tolist() == [g.data_ptr() for g in grads]
    assert second[:, 0].tolist() == [g.data_ptr() + 4 * BLOCK_NUMEL for g in grads]
    zeros, _ = wide.tables
    assert zeros[0, 0] == zeros[2, 0] == 0 != zeros[1, 0]


def test_a_gradient_in_another_layout_is_laid_out_anew() -> None:
    weight = torch.randn(4, 3)
    (plan,) = plan_buckets([weight], 1)
    sources = GradTables(plan, [CPU], [CPU])
    assert sources.take(0, {0: weight.t().contiguous().t()})
    sources.write()
    assert sources.tables[0].item() not in (0, weight.data_ptr())


@given(shapes=shapes, num_chunks=st.integers(1, 9))
def test_blocks_say_where_their_elements_are(shapes, num_chunks):
    params = [torch.zeros(shape) for shape in shapes]
    for plan in plan_buckets(params, num_chunks):
        known = {slot.index: torch.randn(slot.numel) for slot in plan.slots[1:]}
        seen = {slot.index: 0 for slot in plan.slots}
        for chunk in range(num_chunks):
            lengths, addresses = block_lengths(plan, chunk), block_addresses(plan, chunk, known, missing=7)
            assert lengths.shape == addresses.shape == (plan.chunk_numel // BLOCK_NUMEL,)
            for piece in plan.pieces(chunk):
                assert int(lengths[piece.blocks].sum()) == piece.numel
                seen[piece.index] += piece.numel
                for k, address in enumerate(addresses[piece.blocks].tolist()):
                    start = piece.offset + k * BLOCK_NUMEL
                    assert address == (known[piece.index][start:].data_ptr() if piece.index in known else 7)
            assert int(lengths.sum()) == sum(piece.numel for piece in plan.pieces(chunk))
        assert seen == {slot.index: slot.numel for slot in plan.slots}


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
