"""Gradients found where backward left them."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from everygpu.parallel.buckets.plan import BLOCK_NUMEL, plan_buckets
from everygpu.parallel.cuda_graphs.transfer import GradTables, block_addresses, block_lengths, lay_out

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
