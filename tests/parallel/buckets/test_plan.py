"""Parameters laid out in buckets, and buckets cut into chunks."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from everygpu.parallel.buckets import NUM_UPDATE_BUCKETS, UPDATE_BYTES, plan_buckets, update_bucket_bytes

shapes = st.lists(st.lists(st.integers(0, 40), min_size=0, max_size=3), min_size=1, max_size=8)


@given(shapes=shapes, num_chunks=st.integers(1, 9), limit_bytes=st.sampled_from([1, 4096, 2**20]))
def test_every_element_is_in_one_piece(shapes, num_chunks, limit_bytes):
    params = [torch.zeros(shape) for shape in shapes]
    seen = [torch.zeros(p.numel(), dtype=torch.int64) for p in params]
    for plan in plan_buckets(params, num_chunks, limit_bytes):
        assert plan.numel == plan.chunk_numel * num_chunks
        for chunk in range(num_chunks):
            for piece in plan.pieces(chunk):
                assert piece.start + piece.numel <= plan.chunk_numel
                seen[piece.index][piece.offset : piece.offset + piece.numel] += 1
    assert all((count == 1).all() for count in seen)


@given(shapes=shapes, num_chunks=st.integers(1, 9))
def test_pieces_say_where_their_elements_are(shapes, num_chunks):
    params = [torch.zeros(shape) for shape in shapes]
    for plan in plan_buckets(params, num_chunks):
        flat = torch.arange(plan.numel)
        for chunk in range(num_chunks):
            part = flat.narrow(0, chunk * plan.chunk_numel, plan.chunk_numel)
            for piece in plan.pieces(chunk):
                slot = next(s for s in plan.slots if s.index == piece.index)
                memory = flat.narrow(0, slot.start, slot.numel)
                expected = memory[piece.offset : piece.offset + piece.numel]
                assert part[piece.start : piece.start + piece.numel].equal(expected)


def test_buckets_hold_one_dtype_and_are_closed_at_a_size():
    params = [torch.zeros(10), torch.zeros(10, dtype=torch.float64), torch.zeros(10), torch.zeros(10)]
    plans = plan_buckets(params, 1, limit_bytes=60)
    assert [[slot.index for slot in plan.slots] for plan in plans] == [[3, 2], [1], [0]]
    assert [plan.dtype for plan in plans] == [torch.float32, torch.float64, torch.float32]


def test_large_models_have_larger_buckets_and_not_more_of_them():
    params = [torch.empty(UPDATE_BYTES // 4) for _ in range(3 * NUM_UPDATE_BUCKETS)]  # never touched
    assert len(plan_buckets(params[:4], 2, update_bucket_bytes(params[:4], None))) == 4
    assert len(plan_buckets(params, 2, update_bucket_bytes(params, None))) <= NUM_UPDATE_BUCKETS + 1


def test_views_have_the_parameters_own_strides():
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    turned = torch.randn(5, 3).t()
    (plan,) = plan_buckets([weight, turned], 3)
    flat = torch.zeros(plan.numel)
    for slot, p in zip(plan.slots, [turned, weight]):
        view = slot.view(flat)
        assert view.shape == p.shape
        assert view.stride() == p.stride()
        view.copy_(p)
    assert plan.slots[1].view(flat).equal(weight)
    assert flat.count_nonzero() == weight.numel() + turned.numel()


def test_recurrent_weights_stay_in_one_piece_of_memory():
    storage = torch.randn(40)
    params = [nn.Parameter(storage[0:10].view(2, 5)), nn.Parameter(storage[10:35]), nn.Parameter(torch.zeros(3))]
    plans = plan_buckets(params, 2)
    starts = {slot.index: (k, slot.start) for k, plan in enumerate(plans) for slot in plan.slots}
    assert starts[0][0] == starts[1][0]
    assert (starts[0][1], starts[1][1]) == (0, 10)
