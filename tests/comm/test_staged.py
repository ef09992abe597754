"""Transfers through host memory: the same results as direct ones, and used exactly when those can't be trusted."""

import ast
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from everygpu import DataParallel, comm, parallel
from everygpu.comm import copies, staged
from everygpu.devices import p2p
from everygpu.parallel.replicas import module_tree

PROPERTY = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_keeps_every_bit(devices, dtype):
    first, *_, last = devices(2)
    bits = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    assert staged.copy(torch.eye(3, device=first).to_sparse(), last).to_dense().cpu().equal(torch.eye(3))
    x = bits.view(dtype) if dtype is not torch.bool else bits > 99
    arrived = staged.copy(x.to(first), last)
    assert arrived.device == last
    assert arrived.cpu().view(torch.uint8).equal(x.view(torch.uint8))
    assert arrived.data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    "lay_out",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x.expand(3, 4, 6),
        lambda x: x.view(4, 6, 1, 1).to(memory_format=torch.channels_last),
        lambda x: x[:0],
        lambda x: x[0, 0],
    ],
)
def test_copy_has_the_strides_of_a_direct_one(devices, lay_out):
    first, *_, last = devices(2)
    x = lay_out(torch.arange(24.0, device=first).view(4, 6))
    direct, ours = x.to(last, copy=True), staged.copy(x, last)
    assert ours.equal(direct)
    assert ours.stride() == direct.stride()


def test_copy_is_differentiable_twice(devices):
    first, *_, last = devices(2)
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, device=first, requires_grad=True)

    def through(y):
        return staged.copy(y, last) ** 3

    (grad,) = torch.autograd.grad(through(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert grad.device == first
    assert grad.tolist() == [3.0, 12.0, 27.0]
    assert second.tolist() == [6.0, 12.0, 18.0]
    assert not staged.copy(x.detach(), last).requires_grad
    if first.type == "cpu":
        assert torch.autograd.gradcheck(through, x)
        assert torch.autograd.gradgradcheck(through, x)


@PROPERTY
@given(numel=st.integers(0, 70), chunk=st.integers(1, 80), dtype=st.sampled_from(DTYPES))
def test_broadcast_in_chunks_of_any_size(devices, numel, chunk, dtype):
    used = devices(3)
    source = torch.arange(numel, device=used[0]).to(dtype)
    targets = [torch.ones(numel, dtype=dtype, device=d) for d in used]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staged, "_CHUNK_BYTES", chunk)
        staged.broadcast(source, targets)
    assert all(target.cpu().equal(source.cpu()) for target in targets)


@PROPERTY
@given(count=st.integers(1, 6), seed=st.integers(0, 100))
def test_reduce_is_bit_equal_to_copies(devices, count, seed):
    used = devices(count)
    generator = torch.Generator().manual_seed(seed)
    sources = [(torch.randn(16, generator=generator) * 10**i).to(d) for i, d in enumerate(used)]
    expected = copies.reduce([s.clone() for s in sources], used[0])
    assert staged.reduce([s.clone() for s in sources], used[0]).equal(expected)


def test_fill_writes_where_it_is(devices):
    first, *_, last = devices(2)
    target = torch.zeros(4, 3, device=last)
    staged.fill(target[:, 1], torch.arange(4.0, device=first))
    assert target.tolist() == [[0.0, float(i), 0.0] for i in range(4)]


# ---- the choice ---------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """Count what goes through host memory; ``calls.broken`` says that nothing else works."""

    class Calls(list):
        broken = False

    seen = Calls()

    def watch(name):
        plain = getattr(staged, name)

        def watched(*args):
            seen.append(name)
            return plain(*args)

        monkeypatch.setattr(staged, name, watched)

    for name in ("copy", "fill", "broadcast", "reduce"):
        watch(name)
    monkeypatch.setattr(comm, "trusted_peers", lambda devices: list(devices) and not seen.broken)
    return seen


def test_fresh_copies_are_fresh():
    x, here = torch.ones(3), torch.device("cpu")
    assert comm.copy(x, here) is x
    assert comm.copy(x, here, fresh=True).data_ptr() != x.data_ptr()


def test_devices_are_all_asked_about(monkeypatch):
    asked = []
    monkeypatch.setattr(comm, "trusted_peers", lambda devices: asked.append(list(devices)) or True)
    cpu, meta = torch.device("cpu"), torch.device("meta")
    comm.copy(torch.ones(1), meta)
    comm.fill(torch.ones(1, device=meta), torch.ones(1))
    comm.broadcast(torch.ones(1), [torch.ones(1), torch.ones(1, device=meta)])
    comm.reduce([torch.ones(1), torch.ones(1)], meta)
    assert [set(devices) for devices in asked] == [{cpu, meta}] * 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.body(x) * self.scale


def step(model, device):
    """One step of training; gives the loss, its gradients, and that of the input."""
    torch.manual_seed(0)
    x = torch.randn(10, 4).to(device).requires_grad_()
    loss = nn.functional.cross_entropy(model(x), torch.arange(10, device=device) % 3)
    loss.backward()
    return [loss.detach().cpu(), x.grad.cpu(), *(p.grad.cpu() for p in model.parameters())]


@pytest.mark.parametrize("gather", ["sharded", "joined"])
def test_training_through_host_memory_is_bit_equal(calls, gather):
    torch.manual_seed(1)
    net = Net()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    plain = step(DataParallel(net, ["cpu"] * 3, gather=gather), "cpu")
    assert calls == []
    calls.broken = True
    again = Net()
    again.load_state_dict(state)
    through_host = step(DataParallel(again, ["cpu"] * 3, gather=gather), "cpu")
    assert all(a.equal(b) for a, b in zip(plain, through_host))
    assert {"copy", "broadcast", "reduce"} <= set(calls)


def moves(source):
    """Find what moves tensors to a device without asking ``comm``: ``.to`` of more than a dtype, ``.cuda``."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        words = " ".join(ast.unparse(argument) for argument in (*node.args, *(k.value for k in node.keywords)))
        if node.func.attr == "cuda" or (node.func.attr == "to" and "device" in words) or "non_blocking" in words:
            yield ast.unparse(node)


# A module goes to the CPU first where copies can't be trusted. A batch of another library's knows its own way.
ELSEWHERE = {"module.to(device)", "batch.to(device)"}
WITHIN_RANKS = "fully_sharded"
"""A rank has one GPU: between it and the host nothing is in doubt."""


def test_nothing_else_moves_tensors_between_devices():
    folder = Path(parallel.__file__).parent
    paths = [path for path in folder.rglob("*.py") if path.parent.name != WITHIN_RANKS]
    found = {call for path in paths for call in moves(path.read_text())}
    assert found == ELSEWHERE
    assert list(moves("x.to(self.device); x.to(torch.float32); y.cuda()")) == ["x.to(self.device)", "y.cuda()"]


@pytest.mark.parametrize(("trusted", "ways"), [(True, ["meta"]), (False, ["cpu", "meta"])])
def test_module_goes_over_the_cpu_where_copies_cannot_be_trusted(monkeypatch, trusted, ways):
    seen = []

    class Watched(nn.Linear):
        def to(self, device):
            seen.append(str(device))
            return super().to(device)

    monkeypatch.setattr(module_tree, "trusted_peers", lambda devices: trusted)
    module_tree.place_module(Watched(2, 2), torch.device("meta"), "test")
    assert seen == ways


@pytest.mark.gpu
@pytest.mark.cards(2)
class TestOnGpus:
    @pytest.fixture(autouse=True)
    def stage_everything(self, monkeypatch):
        monkeypatch.setenv(p2p.VARIABLE, "staged")
        p2p._broken_pairs.cache_clear()
        yield
        p2p._broken_pairs.cache_clear()

    def test_training_equals_one_device(self):
        torch.manual_seed(1)
        net = Net().cuda(0).eval()  # BatchNorm on each shard's own rows would differ
        expected = step(net, "cuda:0")
        net.zero_grad()
        for ours, theirs in zip(step(DataParallel(net), "cuda:0"), expected):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    def test_copies_wait_for_the_work_before_them(self):
        last = torch.cuda.device_count() - 1
        x = torch.zeros(1 << 22, device="cuda:0")
        torch.cuda._sleep(100_000_000)
        x.fill_(1)
        arrived = comm.copy(x, torch.device("cuda", last))
        x.fill_(2)
        assert arrived.unique().tolist() == [1]

    def test_host_memory_is_not_used_again_too_early(self):
        last = torch.device("cuda", torch.cuda.device_count() - 1)
        sources = [torch.full((1 << 20,), float(i), device="cuda:0") for i in range(50)]
        arrived = [comm.copy(x, last) for x in sources]
        assert [x.unique().tolist() for x in arrived] == [[float(i)] for i in range(50)]
