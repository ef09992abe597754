"""A batch of shards can't be told from the joined tensor, whatever a script computes with it."""

import contextlib
import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import everygpu
from tests.parallel.batches import Rows, assert_same_call, attempt, lay_out, numbers
from tests.parallel.sharded.uses import C, Use, labels, ones


def saved_and_loaded(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def in_a_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.numpy() is not None and x.clone().mul_(2) * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 4 * x


class Dirtied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def relu_of_double(x: Tensor) -> Tensor:
    return (x * 2 - 1).relu().sum(1)


# Each takes a tensor of shape (rows, 5) that is not a leaf. Where it is written, it is returned too.

SHAPES: list[Callable[[Tensor], Any]] = [
    lambda x: (x.view(-1), x.view(-1, C), x.view(1, -1), x.view(x.shape[0], C, 1), x.view_as(ones(x.shape[0] * C))),
    lambda x: x.view(3, 4),
    lambda x: x.t().view(-1),
    lambda x: (x.reshape(-1), x.reshape(C, -1), x.t().reshape(-1), x.reshape(-1, 1, C), x.reshape(x.shape)),
    lambda x: (
        x.flatten(),
        x.flatten(0, 1),
        x.flatten(1),
        x.unsqueeze(1).flatten(1),
        x.ravel(),
        x.unflatten(1, (5, 1)),
    ),
    lambda x: (x.T, x.mT, x.t(), x.transpose(0, 1), x.transpose(-1, -2), x.swapaxes(0, 1), x.movedim(0, -1)),
    lambda x: (x.permute(1, 0), x.permute((1, 0)), torch.permute(x, (-1, 0)), x.permute(dims=(0, 1))),
    lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x.unsqueeze(dim=1), x[None], x[:, None], x[..., None]),
    lambda x: (x.squeeze(), x.unsqueeze(0).squeeze(), x.unsqueeze(1).squeeze(1), x.squeeze(0), x.squeeze((0, 1))),
    lambda x: (x[:, 0], x[:, -1], x[:, 1:], x[:, ::2], x[..., :-1], x[:, 0:0], x[...], x[:, None, 1:3], x[:]),
    lambda x: (x[0], x[-1], x[0:1], x[:2], x[::2], x[0, 1], x[[0]], x[torch.tensor([0, 0])], x[labels(x) == 0]),
    lambda x: (x[torch.arange(len(x)), labels(x)], x[:, [0, 2]], x[:, torch.tensor([True, False] * 2 + [True])]),
    lambda x: x[99],
    lambda x: x[:, 99],
    lambda x: x[0, 0, 0],
    lambda x: (
        x.expand(2, -1, -1),
        x.expand_as(ones(3, *x.shape)),
        x.broadcast_to(2, *x.shape),
        x[:, :1].expand(-1, 3),
    ),
    lambda x: (x.repeat(1, 2), x.tile(2), x.repeat_interleave(2, 0), x.flip(0), x.flip(1), x.roll(1), x.rot90()),
    lambda x: (x.chunk(2, 1), x.split(2, 1), x.split([1, 4], -1), x.unbind(1), x.chunk(2), x.split(1), x.unbind()),
    lambda x: (torch.cat([x, x]), torch.cat([x, ones(2, C)]), torch.cat([x, x.float()], 1), torch.stack([x, x], -1)),
    lambda x: (x.narrow(1, 1, 2), x.narrow(0, 0, 1), x.diagonal(), x.unfold(1, 2, 1), x.tril(), x.select(1, 2)),
    lambda x: (x.unsqueeze(2).contiguous(memory_format=torch.contiguous_format), x.t().contiguous()),
    lambda x: x.view(-1, C, 1, 1).contiguous(memory_format=torch.channels_last).clone(),
    lambda x: (
        (x.view(-1, C, 1, 1).contiguous(memory_format=torch.channels_last) * 2).permute(0, 2, 3, 1).reshape(-1, C)
    ),
    lambda x: ((x.t() * 2).t().view(-1), (x.t() * 2).t().is_contiguous()),
    lambda x: x.detach().view(torch.int64),
    lambda x: x.as_strided((2, 2), (1, 1)),
]
ARITHMETIC: list[Callable[[Tensor], Any]] = [
    lambda x: (x + 1, 1 + x, x - 2, 2 - x, x * 3, 3 * x, x / 2, 2 / x, x**2, 2**x, x % 0.3, 0.3 % x, x // 0.2, -x, +x),
    lambda x: (x == None, x != None, x is None),  # noqa: E711
    lambda x: (x * np.float64(2), np.float64(2) * x, x * np.float32(2), x + True, x * 2j),
    lambda x: (x.float() is x, x.double() is x, x.contiguous() is x, x.to("cpu") is x, x.cpu() is x, x.clone() is x),
    lambda x: (ones(2).float().type_as(x), labels(x).type_as(x), ones(1, C).type_as(x)),
    lambda x: (x.masked_fill((labels(x) > 0)[:, None], ones(())), x.clamp(ones(C) * 0.4, x * 0 + 0.6)),
    lambda x: (x.isclose(x + 1e-9), torch.allclose(x, x), torch.equal(x, x), x.equal(ones(1)), x.isnan(), x.signbit()),
    lambda x: F.dropout(x, 0.5, training=False) is x,
    lambda x: (F.normalize(x), F.cosine_similarity(x, x * 2), F.pairwise_distance(x, x + 1), F.layer_norm(x, (C,))),
    lambda x: (torch.einsum("nc,dc->nd", x, ones(3, C)), torch.einsum("nc,nc->n", x, x), torch.outer(x[0], x[0])),
    lambda x: x + ones(x.shape[0] + 2, C),
    lambda x: (x.sum(-1, True), x.sum(dim=(0, 1)), x.sum(axis=0, keepdims=True), torch.sum(x), x.mean(dim=None)),
    lambda x: (x.mean((0,), True), torch.mean(x, dim=0), x.mean(dtype=torch.float32), (x > 0.5).float().mean()),
    lambda x: x.mean(5),
    lambda x: x.int().mean(),
    lambda x: (x.gather(1, labels(x)[:, None]).squeeze(1), x.gather(1, torch.zeros(1, 1, dtype=torch.int64))),
    lambda x: sum(row.sum() for row in x),
]  # fmt: skip
OUTSIDE: list[Callable[[Tensor], Any]] = [
    lambda x: (x.detach().numpy(), np.asarray(x.detach()), np.array(x.detach()), x.detach().numpy().sum()),
    lambda x: x.numpy(),
    lambda x: (x.tolist(), x[0, 0].item(), len(x)),
    lambda x: (bool(x.detach().sum() > 0), float(x.detach()[0, 0]), int(x.detach().sum())),
    lambda x: bool(x),
    lambda x: (repr(x.detach()), str(x.detach()), f"{x.detach()}", f"{x.detach().sum():.3f}", format(x.detach())),
    lambda x: (0.5 in x.detach(), {x: 1}[x], x in [x], next(iter(x.detach())), [*x.detach()][-1], {"a": x}["a"] is x),
    lambda x: (x.shape, x.size(0), x.dim(), x.ndim, x.dtype),
    lambda x: (x.device, x.numel(), x.layout, x.itemsize, x.nbytes, x.type()),
    lambda x: (x.is_leaf, x.requires_grad, x.is_contiguous()),
    lambda x: (x.stride(), x.storage_offset(), x.is_floating_point(), x.names),
    lambda x: (x.grad_fn is None, x.detach().grad_fn, x.detach().is_leaf, x._version, x.grad if x.is_leaf else None),
    lambda x: (x.untyped_storage().nbytes(), x.data_ptr() == x.data_ptr(), x.detach().data_ptr() == x.data_ptr()),
    lambda x: (isinstance(x, Tensor), torch.is_tensor(x), hasattr(x, "numpy"), callable(getattr(x, "backward", None))),
    lambda x: (copy.deepcopy(x.detach()), copy.copy(x.detach()), pickle.loads(pickle.dumps(x.detach()))),
    lambda x: copy.deepcopy(x),
    lambda x: saved_and_loaded(x.detach()),
    lambda x: (saved_and_loaded({"all": x.detach(), "one": x.detach()[0]}), saved_and_loaded(x)),
    lambda x: (torch.as_tensor(x), torch.from_dlpack(x.detach()), torch.tensor([x.detach()[0, 0], x.detach()[0, 1]])),
    lambda x: (x.as_subclass(Tensor), x.data, x.new_tensor([1.0])),
    lambda x: (x.new_zeros(2), torch.zeros_like(x), torch.full_like(x, 3)),
    lambda x: (torch.rand_like(x).shape, F.dropout(x).shape, x.new_empty(3).shape, torch.empty_like(x).shape),
    lambda x: in_a_thread(lambda: F.cross_entropy(x, labels(x))),
    lambda x: (Doubled.apply(x.clone()), Dirtied.apply(x.clone())),
    lambda x: checkpoint(lambda y: y.exp().sum(1), x, use_reentrant=False),
    lambda x: torch.func.vmap(lambda row: row.sum() * row)(x),
    lambda x: (torch.func.grad(lambda y: (y**2).sum())(x.detach()), torch.func.grad(lambda y: y.mean())(x.detach())),
    lambda x: torch.autograd.functional.jacobian(lambda y: (y**2).sum(0), x.detach()),
    lambda x: x.detach().clone().apply_(lambda v: v * 2),
    lambda x: torch.jit.script(relu_of_double)(x),
    lambda x: torch.tensor_split(torch.arange(9.0), x.argmax(1).sort()[0]),
    lambda x: nn.utils.rnn.pack_padded_sequence(ones(len(x), C, 2), x.argmax(1) * 0 + 3, batch_first=True).data,
    lambda x: F.ctc_loss(x[:, None].log_softmax(-1), torch.tensor([[1]]), x.argmax(1)[:1] * 0 + 1, torch.tensor([1])),
]  # fmt: skip


COMPLEX: list[Callable[[Tensor], Any]] = [
    torch.linalg.pinv,
    torch.pinverse,
    lambda x: torch.linalg.lstsq(x, x * 2)[0],
    torch.fft.hfft,
    torch.fft.hfft2,
    torch.fft.hfftn,
    lambda x: torch.fft.hfft2(x.real),
    lambda x: torch.linalg.vecdot(x, x * 1j),
    lambda x: x @ x.mH,
    lambda x: torch._neg_view(x) * x.conj(),
    lambda x: x.conj().imag.exp(),
]
"""Operations that make lazily conjugated or negated tensors on the way."""


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("use", COMPLEX)
def test_lazily_conjugated_numbers(use: Callable[[Tensor], Any], mode: Any) -> None:
    x = torch.complex(numbers(5, 4), numbers(5, 4, seed=1)).requires_grad_(mode is contextlib.nullcontext)
    with mode():
        expected, actual = use(x * 1), use(lay_out(x * 1, [3, 2]))
        torch.testing.assert_close(everygpu.parallel.gather(actual), expected)
    if expected.requires_grad:
        (first,) = torch.autograd.grad(expected.abs().sum(), x)
        torch.testing.assert_close(torch.autograd.grad(actual.abs().sum(), x)[0], first)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized", "ignore:.*lazily", "ignore:.*jit")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("use", [*SHAPES, *ARITHMETIC, *OUTSIDE])
class TestUse(Use):
    pass


@pytest.mark.parametrize("sizes", [[1, 1], [1, 0, 1], [2, 1], [1], [5]])
def test_memory_is_laid_out_as_in_the_joined_tensor(sizes: list[int]) -> None:
    n = sum(sizes)

    def layouts(x: Tensor) -> Any:
        pictures = x.view(n, 2, 3, 4).contiguous(memory_format=torch.channels_last)
        last = (pictures * 2).permute(0, 2, 3, 1)
        results = (x * 2, (x.t() * 2).t(), pictures * 2, last, last.clone(), pictures.relu().transpose(0, 1) + 1)
        return [(r.is_contiguous(), attempt(lambda r=r: r.view(-1))[1]) for r in results]

    assert_same_call(layouts, (Rows(numbers(n, 24), 0),), sizes)
