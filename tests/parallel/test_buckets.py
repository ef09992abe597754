"""Buckets: sizes, layout, what is sent, and gradients on the way back."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import everygpu
from everygpu.comm.streams import Streams
from everygpu.errors import OptionError
from everygpu.parallel.buckets import (
    ALIGNMENT_BYTES,
    MIB,
    NUM_UPDATE_BUCKETS,
    REPLICA_BYTES,
    UPDATE_BYTES,
    BroadcastBucket,
    broadcast_tensor,
    plan_buckets,
    replica_bucket_bytes,
    update_bucket_bytes,
)
from tests import tape

TINY = 1e-5
CPU = ["cpu"] * 2


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 6), torch.randn(6, 3)


def test_defaults_and_a_cap() -> None:
    small, large = [torch.empty(10)], [torch.empty(240 * MIB, device="meta")]
    assert replica_bucket_bytes(None) == REPLICA_BYTES == 25 * MIB
    assert replica_bucket_bytes(0.5) == MIB // 2
    assert update_bucket_bytes(small, None) == 12 * MIB
    assert update_bucket_bytes(large, None) == 20 * MIB
    assert update_bucket_bytes(large, 1) == MIB
    assert update_bucket_bytes(small, None, over_ranks=True) == REPLICA_BYTES
    assert replica_bucket_bytes(1e-9) == 1


@pytest.mark.parametrize("cap", [0, -1.0, float("nan"), float("inf"), True, "25"])
def test_what_is_no_size_is_refused(cap: Any) -> None:
    net = make_net()
    with pytest.raises(OptionError, match="DataParallel: bucket_cap_mb must be a finite number of MiB above 0"):
        everygpu.DataParallel(net, CPU, bucket_cap_mb=cap)
    with pytest.raises(OptionError, match="ShardedOptimizer: bucket_cap_mb must be"):
        everygpu.ShardedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), CPU, bucket_cap_mb=cap)


@pytest.mark.parametrize("engine", ["threads", "capture"])
def test_data_parallel_with_a_bucket_for_each_parameter(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tape.install(monkeypatch, fused=True)
    plain = make_net()
    model = everygpu.DataParallel(copy.deepcopy(plain), CPU, engine=engine, bucket_cap_mb=TINY)
    for _ in range(6):
        x, y = batch()
        for net in (plain, model):
            net.zero_grad()
            F.mse_loss(net(x), y).backward()
        torch.testing.assert_close([p.grad for p in model.module.parameters()], [p.grad for p in plain.parameters()])
    recorder = getattr(model._engine, "captured_forward", None)
    groups = recorder.sync.groups if recorder else model._replicas._buckets  # type: ignore[union-attr]
    assert len(groups) == 4


@pytest.mark.parametrize("fused", [False, True])
def test_train_step_takes_its_buckets_from_the_model(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tape.install(monkeypatch, fused=fused)
    plain, ours = make_net(), make_net()
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in (plain, ours)]
    model = everygpu.DataParallel(ours, CPU, bucket_cap_mb=TINY)
    step = everygpu.TrainStep(model, F.mse_loss, optimizers[1])
    for _ in range(6):
        x, y = batch()
        optimizers[0].zero_grad()
        F.mse_loss(plain(x), y).backward()
        optimizers[0].step()
        step(x, y)
    assert len(step._strategy.flat_params.plans) == 4
    torch.testing.assert_close(list(ours.parameters()), list(plain.parameters()))


def test_sharded_optimizer_with_a_bucket_for_each_parameter() -> None:
    plain, ours = make_net(), make_net()
    stock = torch.optim.AdamW(plain.parameters(), lr=0.1)
    sharded = everygpu.ShardedOptimizer(torch.optim.AdamW(ours.parameters(), lr=0.1), CPU, bucket_cap_mb=TINY)
    for _ in range(3):
        x, y = batch()
        for net, optimizer in ((plain, stock), (ours, sharded)):
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
    assert len(sharded._shards._plans) == 4
    torch.testing.assert_close(list(ours.parameters()), list(plain.parameters()))
    assert copy.deepcopy(sharded).bucket_cap_mb == TINY


shapes = st.lists(st.lists(st.integers(0, 40), min_size=0, max_size=3), min_size=1, max_size=8)


@given(shapes=shapes, num_chunks=st.integers(1, 9))
def test_whole_parameters_are_in_one_chunk(shapes, num_chunks):
    params = [torch.zeros(shape) for shape in shapes]
    for plan in plan_buckets(params, num_chunks, whole=True):
        pieces = [list(plan.pieces(chunk)) for chunk in range(num_chunks)]
        found = sorted((piece.index, piece.numel) for row in pieces for piece in row)
        assert found == sorted((slot.index, slot.numel) for slot in plan.slots)
        slots = sorted((slot.start, slot.start + slot.numel) for slot in plan.slots if slot.numel)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(slots))
        largest = max(p.numel() for p in params)
        assert plan.chunk_numel <= sum(p.numel() for p in params) / num_chunks + largest + 1024 * len(params)


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


gpu_only = pytest.mark.parametrize("devices", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


@pytest.fixture
def dirty_memory():
    """Let ``torch.empty`` be filled with nan, so that reading what nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make_bucket(originals, used):
    return BroadcastBucket(originals, used[0], used[1:])


def every_replica(used):
    return list(range(len(used) - 1))


def parameters_on(device, *shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in shapes]


class TestCopies:
    def test_that_trust_versions_are_sent_when_torch_counts_a_write_or_memory_is_replaced(self, devices):
        used = devices(3)
        originals = [p.requires_grad_(False) for p in parameters_on(used[0], (3, 2), (5,))]
        bucket = BroadcastBucket(originals, used[0], used[1:], trusts_versions=True)
        everyone = every_replica(used)

        def values(replicas):
            return [row[1].cpu() for row in bucket.refresh(originals, replicas)]

        values(everyone)
        originals[1].data.fill_(1)
        assert not any(value.equal(torch.ones(5)) for value in values(everyone)), "torch doesn't count it"
        bucket.forget()
        assert all(value.equal(torch.ones(5)) for value in values(everyone))
        originals[1].add_(1)
        assert values([0])[0].equal(torch.full((5,), 2.0))
        # Assigned twice, so that the second could get the memory of before the first.
        originals[1].data = originals[1].data * 2
        originals[1].data = originals[1].data * 2
        assert values([0])[0].equal(torch.full((5,), 8.0))
        assert all(value.equal(torch.full((5,), 8.0)) for value in values(everyone)), "also one that was idle"

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            lambda: torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
            lambda: torch.randn(3, 4).t(),
            lambda: torch.randn(3, 4),
        ],
        ids=["channels_last", "channels_last_3d", "transposed", "contiguous"],
    )
    def test_strides_of_dense_tensors_are_kept(self, devices, make):
        used = devices(2)
        original = nn.Parameter(make().to(used[0]))
        ((copy,),) = make_bucket([original], used).refresh([original], [0])
        assert copy.stride() == original.stride()
        assert copy.cpu().equal(original.cpu())
        copy.sum().backward()
        assert original.grad.stride() == original.stride()

    @pytest.mark.parametrize("make", [lambda: torch.ones(3, 1).expand(3, 4), lambda: torch.arange(12.0)[::2]])
    def test_tensors_with_gaps_or_overlaps_become_contiguous(self, devices, make):
        used = devices(2)
        original = make().to(used[0])
        ((copy,),) = make_bucket([original], used).refresh([original], [0])
        assert copy.is_contiguous()
        assert copy.cpu().equal(original.cpu())

    def test_begin_at_aligned_addresses(self, devices):
        used = devices(2)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex128):
            originals = parameters_on(used[0], (3,), (1,), (65,), (), dtype=dtype)
            (row,) = make_bucket(originals, used).refresh(originals, [0])
            starts = [copy.data_ptr() - row[0].data_ptr() for copy in row]
            assert all(start % ALIGNMENT_BYTES == 0 for start in starts)
            ends = [start + copy.nbytes for start, copy in zip(starts, row)]
            assert all(end <= start for end, start in zip(ends, starts[1:]))


class TestGraphs:
    """A graph goes backward through the values of its forward, or raises torch's error."""

    @pytest.mark.parametrize("fixed", [True, False])
    def test_buffers_written_in_between(self, devices, fixed):
        used = devices(2)
        buffers = [torch.ones(2, device=used[0]), torch.ones(2, device=used[0])]
        bucket = BroadcastBucket(buffers, used[0], used[1:], fixed=fixed)
        x = torch.ones(2, device=used[1], requires_grad=True)
        first, second = bucket.refresh(buffers, [0])[0]
        kept, lost = (x * second).sum(), (x * first).sum()
        buffers[0].fill_(2)
        bucket.refresh(buffers, [0])
        kept.backward()
        if not fixed:
            lost.backward()
            assert x.grad.tolist() == [2, 2]
            return
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            lost.backward()


class TestGradients:
    @pytest.mark.usefixtures("dirty_memory")
    def test_sum_grads_in_every_pattern(self, devices):
        used = devices(3)
        originals = parameters_on(used[0], (2,), (1,), (3,))
        bucket = make_bucket(originals, used)
        grads = [[torch.ones(2, device=d), None, torch.ones(3, device=d) if i == 0 else None]
                 for i, d in enumerate(used[1:])]  # fmt: skip
        totals = bucket.sum_grads(grads)
        assert totals[0].tolist() == [len(used) - 1] * 2
        assert totals[1] is None
        assert totals[2].tolist() == [1] * 3
        assert bucket.sum_grads([[None] * 3 for _ in used[1:]]) == [None] * 3


class TestBroadcastTensor:
    def test_writing_into_one_copy_changes_no_other(self, devices):
        used = devices(3)
        leaf = torch.ones(2, device=used[0], requires_grad=True)
        copies = broadcast_tensor(leaf * 1, used)
        copies[1].mul_(5)
        assert [c.tolist() for c in copies] == [[5, 5] if i == 1 else [1, 1] for i in range(len(used))]
        sum(c.sum().to(used[0]) for c in copies).backward()
        assert leaf.grad.tolist() == [5 + len(used) - 1] * 2


sizes = st.lists(st.integers(0, 40), max_size=12)


@gpu_only
def test_streams_of_the_forward_are_current_again(devices):
    device = devices(2)[1]
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        streams = Streams(torch.device("cpu"), device, device)
    assert torch.cuda.current_stream(device) != side
    with streams.current():
        assert torch.cuda.current_stream(device) == side
    assert torch.cuda.current_stream(device) != side
