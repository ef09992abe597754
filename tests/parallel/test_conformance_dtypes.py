"""Complex and sparse tensors, half precision, integers."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import everygpu
from tests.parallel.oracle import TOLERANCE, assert_same, assert_same_grads, pair, rows, score

pytestmark = pytest.mark.usefixtures("in_threads")


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(3, 4, dtype=torch.complex128))
        self.shift = nn.Parameter(torch.randn(4))
        self.register_buffer("phase", torch.randn(4, dtype=torch.complex128))

    def to(self, device, dtype=None):
        for p in self.parameters():
            p.data = p.data.to(device, torch.complex128 if p.is_complex() else torch.float64)
        self.phase = self.phase.to(device)
        return self

    def forward(self, x):
        z = x.to(torch.complex128) @ self.spectrum.conj() + self.shift * self.phase
        return z.conj() * z.abs(), (z * self.spectrum[0]).imag


def test_complex_parameters(devices):
    devs = devices(3)
    model, bare = pair(Complex, devs)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, bare)]
    for seed in range(3):
        assert_same(model, bare, rows(7, 3, device=devs[0], seed=seed).requires_grad_())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for m in (model, bare):
        outputs = m(rows(7, 3, device=devs[0]))
        first = torch.autograd.grad(score(outputs), list(m.parameters()), create_graph=True)
        sum(g.abs().square().sum() for g in first).backward()
    assert_same_grads(model, bare)


class Words(nn.Module):
    def __init__(self, tied=False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4, sparse=True)
        self.bag = nn.EmbeddingBag(11, 4, sparse=True, mode="sum")
        self.head = nn.Linear(4, 2)
        self.tied = tied

    def forward(self, ids):
        out = self.head(self.embed(ids).mean(1) + self.bag(ids))
        # 7 begins the last of three shards: there the gradient is dense, in the others sparse.
        dense = self.tied and int(ids[0, 0]) == 7
        return out + F.linear(self.embed.weight, self.embed.weight).sum() if dense else out


def test_sparse_gradients(devices):
    devs = devices(3)
    model, bare = pair(Words, devs)
    sparse = [torch.optim.SparseAdam([m.embed.weight, m.bag.weight], lr=0.01) for m in (model, bare)]
    dense = [torch.optim.SGD(m.head.parameters(), lr=0.1) for m in (model, bare)]
    for step in range(3):
        ids = (torch.arange(21, device=devs[0]).reshape(7, 3) * (step + 1)) % 11
        for optimizer in (*sparse, *dense):
            optimizer.zero_grad()
        assert_same(model, bare, ids)
        assert model.embed.weight.grad.is_sparse
        assert model.bag.weight.grad.is_sparse
        for optimizer in (*sparse, *dense):
            optimizer.step()
        torch.testing.assert_close(dict(model.state_dict()), dict(bare.state_dict()), **TOLERANCE)


def test_sparse_and_dense_gradients_of_one_parameter(devices):
    devs = devices(3)
    model, bare = pair(functools.partial(Words, tied=True), devs)
    ids = torch.arange(21, device=devs[0]).reshape(7, 3) % 11
    shards = ids.chunk(len(devs))
    score(model(ids)).backward()
    score(torch.cat([bare(shard) for shard in shards])).backward()
    torch.testing.assert_close(model.embed.weight.grad.to_dense(), bare.embed.weight.grad.to_dense(), **TOLERANCE)
    torch.testing.assert_close(model.bag.weight.grad.to_dense(), bare.bag.weight.grad.to_dense(), **TOLERANCE)


def test_half_precision_and_integer_tensors_travel_unchanged(devices):
    devs = devices(3)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                self.register_parameter("p_" + str(dtype)[6:], nn.Parameter(torch.arange(5, dtype=dtype)))
            for dtype in (torch.int8, torch.int64, torch.bool, torch.complex64):
                self.register_buffer("b_" + str(dtype)[6:], torch.arange(5).to(dtype))
            self.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
            self.register_parameter("scalar", nn.Parameter(torch.tensor(2.0)))

        def forward(self, x):
            own = [*self.parameters(), *self.buffers()]
            return [str(t.dtype) for t in own], [t.tolist() for t in own], [tuple(t.shape) for t in own]

    module = Mixed().to(devs[0])
    assert everygpu.DataParallel(module, devs)(rows(6, 2, device=devs[0])) == module(None)
