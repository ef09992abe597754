"""Flat buffers copied to every device, and summed on one."""

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import everygpu
from everygpu import comm
from everygpu.comm import copies

PROPERTY = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.uint8]
NUMELS = [0, 1, 5]


ODD = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])


@pytest.mark.parametrize("source", [ODD, *(torch.tensor([1, 0, 3]).to(dtype) for dtype in [*DTYPES, torch.bool])])
def test_broadcast_overwrites_every_target_to_the_bit(devices, source):
    used = devices(3)
    targets = [torch.ones_like(source, device=d) for d in used]
    addresses = [t.data_ptr() for t in targets]
    comm.broadcast(source.to(used[0]), targets)
    comm.broadcast(source, [])
    for target, device, address in zip(targets, used, addresses):
        assert target.device == device
        assert target.data_ptr() == address
        assert target.cpu().view(torch.uint8).equal(source.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_adds_up_on_the_device_asked_for(devices, dtype):
    used = devices(3)
    for numel, target in itertools.product(NUMELS, set(used)):
        sources = [torch.full((numel,), i + 1, device=d).to(dtype) for i, d in enumerate(used)]
        total = comm.reduce([s.clone() for s in sources], target)
        assert total.device == target
        assert total.dtype is dtype
        assert total.tolist() == [sum(range(1, len(used) + 1))] * numel


@PROPERTY
@given(count=st.integers(1, 9), seed=st.integers(0, 1000))
def test_reduce_adds_in_the_order_given(devices, count, seed):
    used = devices(count)
    generator = torch.Generator().manual_seed(seed)
    sources = [torch.randn(16, generator=generator) * 10**i for i in range(len(used))]
    expected = sources[0].clone()
    for source in sources[1:]:
        expected = expected + source
    # Exactly: another order would round differently.
    assert comm.reduce([s.to(d, copy=True) for s, d in zip(sources, used)], used[0]).cpu().equal(expected)


def test_reduce_leaves_all_but_the_first_alone(devices):
    used = devices(3)
    sources = [torch.full((2,), float(i), device=d) for i, d in enumerate(used)]
    comm.reduce(sources, used[0])
    assert [s.tolist() for s in sources[1:]] == [[float(i)] * 2 for i in range(1, len(used))]


def chunked(used, numel, dtype=torch.float32):
    """One buffer per device, all different, of ``numel`` elements for each device."""
    return [(torch.arange(numel * len(used)) * (i + 1) + i).to(dtype).to(d) for i, d in enumerate(used)]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_reduce_scatter_leaves_each_device_the_sum_of_its_chunk(devices, count):
    for dtype, numel in itertools.product(DTYPES[:6], NUMELS):
        buffers = chunked(devices(count), numel, dtype)
        total = sum(b.cpu() for b in buffers)
        comm.reduce_scatter(buffers)
        for j, buffer in enumerate(buffers):
            own = slice(j * numel, (j + 1) * numel)
            assert buffer[own].cpu().equal(total[own]), (dtype, numel)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_all_gather_makes_the_buffers_equal(devices, count):
    for dtype, numel in itertools.product(DTYPES, NUMELS):
        buffers = chunked(devices(count), numel, dtype)
        expected = torch.cat([b.cpu()[j * numel : (j + 1) * numel] for j, b in enumerate(buffers)])
        comm.all_gather(buffers)
        assert all(b.cpu().equal(expected) for b in buffers), (dtype, numel)


def test_copies_to_and_from_several_devices(devices):
    used = devices(3)
    x = torch.arange(6.0, device=used[0]).view(2, 3)
    copies = comm.copy_to_each(x, used)
    assert copies[0] is x
    assert [c.device for c in copies] == used
    assert all(c.cpu().equal(x.cpu()) for c in copies)
    back = comm.copy_from_each(copies, used[0])
    assert back[0] is x
    assert all(b.device == used[0] and b.equal(x) for b in back)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_copies_whose_gradients_come_back_are_in_turn_with_the_device(monkeypatch, requires_grad):
    beside = []

    @contextlib.contextmanager
    def note(source, index):
        beside.append(index)
        yield

    monkeypatch.setattr(copies, "_on_side_stream", note)
    x = torch.ones(2, requires_grad=requires_grad)
    comm.copy_to_each(x, [torch.device(d) for d in ("cpu", "meta", "meta")])
    assert beside == ([] if requires_grad else [1, 2])
    assert copies._is_raw(torch.zeros(4))
    assert not copies._is_raw(torch._efficientzerotensor(4)), "it has no bytes"


def test_a_leaf_goes_to_another_gpu_as_a_view(monkeypatch):
    """Its gradient comes from a node on its own GPU then, or autograd warns that streams don't match."""
    here, there = torch.device("cuda:0"), torch.device("cuda:1")

    def acted_out(**changed):
        like = {"is_cuda": True, "device": here, "requires_grad": True, "is_leaf": True, "layout": torch.strided}
        return SimpleNamespace(**like | changed, view_as=lambda x: "view")

    leaf = acted_out()
    assert copies.with_own_node(leaf, there) == "view"
    others = [acted_out(requires_grad=False), acted_out(is_leaf=False), acted_out(layout=torch.sparse_coo)]
    for x, device in [(leaf, here), (leaf, torch.device("cpu")), *((x, there) for x in others)]:
        assert copies.with_own_node(x, device) is x
    x = torch.ones(2, requires_grad=True)
    monkeypatch.setattr(copies, "with_own_node", lambda x, device: x * 3)
    assert copies.copy(x, torch.device("cpu")).tolist() == [3, 3]


def test_gradients_of_leaves_on_all_devices(devices):
    used = devices(3)
    leaves = [torch.ones(2, device=d, requires_grad=True) for d in used]
    everygpu.parallel.gather(leaves, used[0]).sum().backward()
    assert [leaf.grad.tolist() for leaf in leaves] == [[1, 1]] * 3
