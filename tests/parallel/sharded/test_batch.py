"""A batch of shards can't be told from the joined tensor, whatever a script does with it."""

import contextlib
import copy
import functools
import gc
import io
import pickle
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import everygpu
from everygpu.errors import GatherError, OptionError
from everygpu.parallel.sharded.batch import ShardedBatch, has_shards, join, shard_batch
from tests.parallel.batches import CPU, Rows, assert_like, assert_same_call, attempt, lay_out, numbers, row_counts
from tests.parallel.oracle import TOLERANCE, Mlp, rows

PROPERTY = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
C = 5


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def labels(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0]) % C


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
    lambda x: (abs(x), x @ ones(C, 2), ones(2, x.shape[0]) @ x),
    lambda x: (x @ ones(C), x.matmul(ones(3, C, 2)), x @ x.t(), x.t() @ x),
    lambda x: (x == x, x != 0.5, x > 0.5, x.ge(0.5), x > 0.5, ~(x > 0.5), (x > 0.5) & (x < 0.7), (x > 0.5) ^ (x < 0.7)),
    lambda x: (x == None, x != None, x is None),  # noqa: E711
    lambda x: (x * np.float64(2), np.float64(2) * x, x * np.float32(2), x + True, x * 2j),
    lambda x: (x.float(), x.double(), x.half(), x.int()),
    lambda x: (x.bool(), x.to(torch.float32), x.to("cpu", torch.int8), x.long()),
    lambda x: (x.to(x), x.to(ones(1).float()), x.type_as(labels(x)), x.type(torch.float32), x.to(dtype=torch.half)),
    lambda x: (x.float() is x, x.double() is x, x.contiguous() is x, x.to("cpu") is x, x.cpu() is x, x.clone() is x),
    lambda x: (ones(2).float().type_as(x), labels(x).type_as(x), ones(1, C).type_as(x)),
    lambda x: (torch.where(x > 0.5, x, 0), torch.where(x > 0.5, 1.0, x), x.where(labels(x)[:, None] > 0, x * 2)),
    lambda x: (torch.where(x > 0.5), (x > 0.5).nonzero(), x[x > 0.5], x.masked_select(x > 0.5)),
    lambda x: (x.masked_fill(x > 0.5, 0), x.masked_fill((labels(x) > 0)[:, None], ones(())), x.lerp(x * 2, 0.3)),
    lambda x: (x.clamp(0.3), x.clamp(max=0.5), x.clamp(ones(C) * 0.4, x * 0 + 0.6), x.clip(max=ones(()) * 0.3)),
    lambda x: (torch.add(x, x, alpha=2), torch.sub(1, x)),
    lambda x: (torch.addcmul(x, x, ones(C), value=2), x.pow(x), x.pow(exponent=3)),
    lambda x: (x.isclose(x + 1e-9), torch.allclose(x, x), torch.equal(x, x), x.equal(ones(1)), x.isnan(), x.signbit()),
    lambda x: (x.softmax(1), x.softmax(0)),
    lambda x: (F.softmax(x, -1), F.log_softmax(x, dim=1, dtype=torch.float32), x.log_softmax(-2)),
    lambda x: (F.relu(x), F.gelu(x, approximate="tanh"), F.silu(x)),
    lambda x: (F.leaky_relu(x, 0.2), F.prelu(x, ones(C)), F.glu(x[:, :4])),
    lambda x: (F.elu(x), F.softplus(x), F.hardtanh(x)),
    lambda x: (F.logsigmoid(x), F.hardswish(x), F.threshold(x, 0.3, 2), F.mish(x)),
    lambda x: F.dropout(x, 0.5, training=False) is x,
    lambda x: (F.normalize(x), F.cosine_similarity(x, x * 2), F.pairwise_distance(x, x + 1), F.layer_norm(x, (C,))),
    lambda x: (F.linear(x, ones(3, C), ones(3)), F.one_hot(x.argmax(1), C)),
    lambda x: (F.pad(x, (1, 1)), F.embedding(x.argmax(1), ones(C, 2))),
    lambda x: (torch.einsum("nc,dc->nd", x, ones(3, C)), torch.einsum("nc,nc->n", x, x), torch.outer(x[0], x[0])),
    lambda x: x + ones(x.shape[0] + 2, C),
    lambda x: x.unsqueeze(0) * ones(4, 1, C),
]  # fmt: skip
REDUCTIONS: list[Callable[[Tensor], Any]] = [
    lambda x: (x.sum(), x.sum(0), x.sum(1)),
    lambda x: (x.sum(-1, True), x.sum(dim=(0, 1)), x.sum(axis=0, keepdims=True), torch.sum(x)),
    lambda x: (x.mean(), x.mean(0), x.mean(1), x.mean((0,), True), torch.mean(x, dim=0), x.mean(dtype=torch.float32)),
    lambda x: (x.sum(()), x.sum([]), x.mean(dim=None)),
    lambda x: (x.sum(dtype=torch.int64), (x > 0.5).sum(), (x > 0.5).float().mean()),
    lambda x: x.mean(5),
    lambda x: x.int().mean(),
    lambda x: (x.max(), x.min(), x.max(1)),
    lambda x: (x.max(1, keepdim=True)[0], x.max(0), x.min(dim=-1).indices, torch.max(x, x * 2)),
    lambda x: (x.amax(1), x.amax(), x.amin(0), x.amax((0, 1)), x.aminmax(dim=1), x.argmax(), x.argmax(1), x.argmin(0)),
    lambda x: (x.var(), x.var(1), x.std(1, correction=0), x.std(1, unbiased=False), torch.std_mean(x, 0), x.var(0)),
    lambda x: (x.norm(), x.norm(2, 1), x.norm(p=1, dim=-1)),
    lambda x: (x.norm(3, 1, True), x.norm(dim=0), torch.linalg.norm(x, dim=1)),
    lambda x: ((x > 0).all(), (x > 1).any(), (x > 0.5).any(1), (x > 0.5).all(dim=0), (x > 0.5).all(1, True)),
    lambda x: (x.prod(1), x.prod(), x.logsumexp(1), x.logsumexp((0, 1))),
    lambda x: (x.cumsum(1), x.cumsum(0), x.median(), x.nansum(1)),
    lambda x: (x.sort(1), x.sort(0), x.sort(descending=True)[0]),
    lambda x: (x.argsort(1), x.topk(2), x.topk(1, 0), x.kthvalue(2, 1)),
    lambda x: (x.gather(1, labels(x)[:, None]).squeeze(1), x.gather(1, torch.zeros(1, 1, dtype=torch.int64))),
    lambda x: x.scatter(1, labels(x)[:, None], 7.0),
    lambda x: (x.scatter_add(1, labels(x)[:, None], x), x.index_select(1, torch.tensor([2]))),
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
        torch.testing.assert_close(everygpu.gather(actual), expected)
    if expected.requires_grad:
        (first,) = torch.autograd.grad(expected.abs().sum(), x)
        torch.testing.assert_close(torch.autograd.grad(actual.abs().sum(), x)[0], first)


def relu_of_double(x: Tensor) -> Tensor:
    return (x * 2 - 1).relu().sum(1)


# Writing.


def written_through_a_view(x: Tensor) -> Any:
    x[:, 1].mul_(2)
    return x, x * 2


def written_through_a_view_of_a_view(x: Tensor) -> Any:
    x.t()[2:][1].mul_(3)
    return x, x.sum(1)


def written_through_a_reshaped_view(x: Tensor) -> Any:
    flat = x.view(-1)
    x.mul_(2)
    flat[3] = 7
    return x, flat


def written_before_views_are_read(x: Tensor) -> Any:
    one, other = x[:, 0], x.t()
    x.add_(1)
    one.zero_()
    return one, other, x


def detached_and_zeroed(x: Tensor) -> Any:
    y = x * 2
    x.detach().zero_()
    return x + y


def data_written(x: Tensor) -> Any:
    x.data.add_(1)
    x.data[0] = 5
    return x, x * 2


def data_replaced(x: Tensor) -> Any:
    x.data = ones(*x.shape)
    return x * 2


def written_as_an_array(x: Tensor) -> Any:
    y = x.sum()
    x.detach().numpy()[0] = 4
    return x * 2, y


def written_without_gradients(x: Tensor) -> Any:
    with torch.no_grad():
        x.add_(1)
        x[0] = 3
        row = x[-1]
        row.zero_()
    return x * 2


def written_in_inference_mode(x: Tensor) -> Any:
    with torch.inference_mode():
        y = x.clone()
        row = y[0]
        y.mul_(2)
        row.zero_()
        return y.clone(), y[0].clone()


def joined_first_and_used_later(x: Tensor) -> Any:
    with torch.no_grad():
        str(x)
        total = x.sum().item()
        x.tolist()
    with torch.inference_mode():
        x.sum()
        str(x)
        x[0] + 1
    return x.softmax(1), (x * total).sum(0), x[0]


def gradients_switched_on_within(x: Tensor) -> Any:
    with torch.no_grad():
        y = x * 2
        with torch.enable_grad():
            z = x * y
    return y, z, z.sum()


def updated_in_place(x: Tensor) -> Any:
    y = x * 1
    y *= 2
    y += x
    y -= ones(C)
    y /= 3
    y.clamp_(-1, 1).relu_()
    y **= 2
    return y, F.relu(y * 1, inplace=True), y.sum()


def assigned(x: Tensor) -> Any:
    y = x * 1
    y[:, 0] = 0
    y[1:2] = 1
    y[y > 0.5] = 7
    y[:, 1:3].copy_(ones(2))
    y.masked_fill_(y > 6, 2)
    return y


def copied_into(x: Tensor) -> Any:
    plain = torch.empty(x.shape, dtype=torch.float64)
    plain.copy_(x)
    batch = x * 0
    batch.copy_(torch.arange(5.0))
    return plain, batch


def given_as_out(x: Tensor) -> Any:
    batch, plain = x.detach().clone(), torch.empty(x.shape, dtype=torch.float64)
    torch.add(batch, 1, out=batch)
    torch.mul(batch, 2, out=plain)
    return batch, plain, batch * 1


def reshaped_in_place(x: Tensor) -> Any:
    y = x.detach().clone()
    shapes = []
    for change in (
        lambda: y.t_(),
        lambda: y.unsqueeze_(1),
        lambda: y.squeeze_(),
        lambda: y.resize_(2, 2),
        lambda: y.set_(ones(3)),
    ):
        change()
        shapes.append((y.shape, y.stride(), (y + 1).clone()))
    return y, shapes


def views_of_what_is_reshaped(*changes: Callable[[Tensor], Any]) -> list[Callable[[Tensor], Any]]:
    def use(x: Tensor, change: Callable[[Tensor], Any], look: bool) -> Any:
        y = x * 1
        views = [y[:, 0], y.t(), y[:1], y.detach(), y[:, 1:].detach()]
        if look:
            y[0, 0].item()
        change(y)
        shapes = [(v.shape, v.stride()) for v in (y, *views)]
        with torch.no_grad():
            views[3].mul_(2)
        return shapes, y, views, y * 2, views[0] * 2, views[1].sum(0)

    return [functools.partial(use, change=change, look=look) for change in changes for look in (False, True)]


RESHAPED = views_of_what_is_reshaped(
    lambda y: y.t_(),
    lambda y: y.unsqueeze_(1),
    lambda y: y.unsqueeze_(0),
    lambda y: y.transpose_(0, 1),
    lambda y: y.swapaxes_(0, 1).mul_(3),
    lambda y: y.squeeze_(),
    lambda y: y.detach().resize_(1, 2),
    lambda y: y.detach().as_strided_((2,), (2,), 1),
    lambda y: y.detach().set_(ones(3)),
)


def attributes_after_reshaping(x: Tensor) -> Any:
    y = x * 1
    y.note = 5
    same = y.t_()
    return same is y, y.note, y.is_leaf, y.grad_fn is not None, y


def retained_and_reshaped(x: Tensor) -> Any:
    y = x * 1
    y.retain_grad()
    (y.t_() * 2).sum().backward(retain_graph=True)
    return y.grad.shape


def overwritten_after_it_was_saved(x: Tensor) -> Any:
    y = x.exp()
    z = y * 2
    y.add_(1)
    return torch.autograd.grad(y.sum() + z.sum(), x)


WRITING = [
    written_through_a_view,
    written_through_a_view_of_a_view,
    written_through_a_reshaped_view,
    written_before_views_are_read,
    detached_and_zeroed,
    data_written,
    data_replaced,
    written_as_an_array,
    written_without_gradients,
    written_in_inference_mode,
    joined_first_and_used_later,
    gradients_switched_on_within,
    updated_in_place,
    assigned,
    copied_into,
    given_as_out,
    reshaped_in_place,
    *RESHAPED,
    attributes_after_reshaping,
    retained_and_reshaped,
    overwritten_after_it_was_saved,
]

# Gradients.


def hooked_after_use(x: Tensor) -> Any:
    y = (x * 2).sum(1)
    x.register_hook(lambda grad: grad * 3)
    return y


def retained_after_use(x: Tensor) -> Any:
    y = x * 2
    x.retain_grad()
    (y**2).sum().backward(retain_graph=True)
    return x.grad, y


def hooked_at_its_node(x: Tensor) -> Any:
    seen: list[Tensor] = []
    x.register_hook(lambda grad: seen.append(grad.clone()))
    x.softmax(1).pow(2).sum().backward(retain_graph=True)
    return seen, x


def gradient_to_the_batch(x: Tensor) -> Any:
    y = (x * x).sum() + F.cross_entropy(x, labels(x)) + x[0].sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
    return first, second


def gradient_among_uses(x: Tensor) -> Any:
    a, b = x * 1, x * 1
    return torch.autograd.grad((a * 2 + b * 3).sum(), [b, a, x], retain_graph=True)


def a_new_leaf(x: Tensor) -> Any:
    leaf = x.detach().requires_grad_()
    (leaf**3).sum().backward()
    first = leaf.grad.clone()
    (leaf[0] * 2).sum().backward()
    return first, leaf.grad, leaf


def an_optimized_leaf(x: Tensor) -> Any:
    leaf = x.detach()
    leaf.requires_grad = True
    optimizer = torch.optim.Adam([leaf], 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        leaf.pow(2).sum().backward()
        nn.utils.clip_grad_norm_([leaf], 0.1)
        optimizer.step()
    return leaf


def a_parameter(x: Tensor) -> Any:
    parameter = nn.Parameter(x.detach())
    (parameter**2).sum().backward()
    return parameter.grad, isinstance(parameter, nn.Parameter)


def backward_with_a_gradient(x: Tensor) -> Any:
    leaf = x.detach().requires_grad_()
    (leaf * 2).backward(gradient=torch.arange(float(x.numel())).view_as(x).double())
    return leaf.grad


def of_a_leaf_in_place(x: Tensor) -> Any:
    return x.detach().requires_grad_().add_(1)


GRADIENTS = [
    hooked_after_use,
    retained_after_use,
    hooked_at_its_node,
    gradient_to_the_batch,
    gradient_among_uses,
    a_new_leaf,
    an_optimized_leaf,
    a_parameter,
    backward_with_a_gradient,
    of_a_leaf_in_place,
]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized", "ignore:.*lazily", "ignore:.*jit")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("use", [*SHAPES, *ARITHMETIC, *REDUCTIONS, *OUTSIDE, *WRITING, *GRADIENTS])
class TestUse:
    @PROPERTY
    @given(sizes=row_counts(12))
    def test_like_the_joined_tensor(self, use: Callable[[Tensor], Any], sizes: list[int]) -> None:
        def both(x: Tensor) -> Any:
            return use(x), x  # what became of the operand

        assert_same_call(both, (Rows(numbers(sum(sizes), C), 0),), sizes)

    def test_on_the_other_dimension(self, use: Callable[[Tensor], Any]) -> None:
        assert_same_call(lambda x: use(x), (Rows(numbers(5, 5), 1),), [2, 0, 3])

    def test_after_the_batch_was_joined(self, use: Callable[[Tensor], Any]) -> None:
        def joined(x: Tensor) -> Any:
            x[0]  # a view of rows: the joined tensor is made and handed out
            return use(x)

        assert_same_call(joined, (Rows(numbers(6, C), 0),), [4, 2])


@pytest.mark.parametrize(
    "change",
    [lambda v: v.t_(), lambda v: v.unsqueeze_(-1), lambda v: v.transpose_(0, 1).unsqueeze_(0).squeeze_(0)],
)
def test_a_view_reshaped_in_place_and_written(change: Callable[[Tensor], Any]) -> None:
    def use(x: Tensor) -> Any:
        view = x[:, 1:]
        entry = view[:, 0]
        change(view)
        view.mul_(2)
        return x, view, entry

    assert_same_call(use, (Rows(numbers(5, C), 0),), [3, 2], twice=True)


@pytest.mark.parametrize("sizes", [[1, 1], [1, 0, 1], [2, 1], [1], [5]])
def test_memory_is_laid_out_as_in_the_joined_tensor(sizes: list[int]) -> None:
    n = sum(sizes)

    def layouts(x: Tensor) -> Any:
        pictures = x.view(n, 2, 3, 4).contiguous(memory_format=torch.channels_last)
        last = (pictures * 2).permute(0, 2, 3, 1)
        results = (x * 2, (x.t() * 2).t(), pictures * 2, last, last.clone(), pictures.relu().transpose(0, 1) + 1)
        return [(r.is_contiguous(), attempt(lambda r=r: r.view(-1))[1]) for r in results]

    assert_same_call(layouts, (Rows(numbers(n, 24), 0),), sizes)


# Random chains.


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad * 2)
    return x


STEPS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda x, y: x + y,
    lambda x, y: x * y.sigmoid(),
    lambda x, y: x - y.mean(0),
    lambda x, y: x.t(),
    lambda x, y: x.view(-1, 2, 3),
    lambda x, y: x.reshape(-1, 6),
    lambda x, y: x.flatten(1),
    lambda x, y: x[:, 1:],
    lambda x, y: x[:, 0],
    lambda x, y: x.unsqueeze(1),
    lambda x, y: x.squeeze(),
    lambda x, y: x.softmax(-1),
    lambda x, y: x.sort(-1)[0],
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: x.max(-1)[0],
    lambda x, y: x.sum(0, keepdim=True),
    lambda x, y: x.detach(),
    lambda x, y: x.clone(),
    lambda x, y: x @ ones(x.shape[-1], 6),
    lambda x, y: torch.cat([x, y], -1),
    lambda x, y: torch.stack([x, y], 1),
    lambda x, y: x[:2],
    lambda x, y: x.mul_(2),
    lambda x, y: x.add_(y),
    lambda x, y: x.clamp_(-1, 1),
    lambda x, y: x[:, 0].mul_(0.5),
    lambda x, y: x[0].zero_(),
    lambda x, y: x.detach().mul_(1.5),
    lambda x, y: x.copy_(y),
    lambda x, y: x.data.mul_(0.9),
    lambda x, y: x.expand(2, *x.shape),
    lambda x, y: x.unbind(-1)[0],
    lambda x, y: x.mean(),
    lambda x, y: x.float().double(),
    lambda x, y: hooked(x * 1),
    lambda x, y: x.numpy(force=True) is not None and x * 1,
]


def walk(
    starts: list[Tensor], steps: list[tuple[int, int, int]], menu: list[Callable[[Tensor, Tensor], Any]] = STEPS
) -> list[Any]:
    """Take steps, each from two of the tensors found so far; keep what fails as the error's type."""
    found: list[Any] = list(starts)
    for step, one, other in steps:
        tensors = [t for t in found if isinstance(t, Tensor)]
        result, error = attempt(menu[step], tensors[one % len(tensors)], tensors[other % len(tensors)])
        found.append(result if error is None else error.__name__)
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=row_counts(9),
    steps=st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9), st.integers(0, 9)), max_size=12),
)
@pytest.mark.filterwarnings("ignore")
def test_random_chains(sizes: list[int], steps: list[tuple[int, int, int]]) -> None:
    n = sum(sizes)
    args = (Rows(numbers(n, 6), 0), Rows(numbers(n, 6, seed=1), 0), numbers(n, 6, seed=2))
    assert_same_call(lambda *starts: walk(list(starts), steps), args, sizes, twice=True)


LOOKING_AND_RESHAPING: list[Callable[[Tensor, Tensor], Any]] = [
    *STEPS,
    lambda x, y: x[0].sum().item() and x,
    lambda x, y: [v.sum().item() for v in x.detach()] and x,
    lambda x, y: x[:],
    lambda x, y: x[...],
    lambda x, y: x.t_(),
    lambda x, y: x.unsqueeze_(0),
    lambda x, y: x.unsqueeze_(-1),
    lambda x, y: x.squeeze_(),
    lambda x, y: x.swapaxes_(0, -1).mul_(2),
    lambda x, y: x.detach().unsqueeze_(1),
    lambda x, y: torch.std_mean(x),
    lambda x, y: x.nanmean(),
    lambda x, y: F.mse_loss(x, y),
    lambda x, y: torch.cat([x, y]),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(4))
def test_programs_that_look_and_reshape(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(15):
        sizes = draw.choice([[3, 2], [2, 2, 1], [1, 3, 1], [4, 0]])
        last = len(LOOKING_AND_RESHAPING) - 1
        steps = [(draw.randint(0, last), draw.randint(0, 9), draw.randint(0, 9)) for _ in range(draw.randint(2, 8))]
        args = (Rows(numbers(sum(sizes), 6), 0), Rows(numbers(sum(sizes), 6, seed=1), 0))
        assert_same_call(lambda *x, steps=steps: walk(list(x), steps, LOOKING_AND_RESHAPING), args, sizes)


# Weights: results per replica.

KEEPING: list[Callable[[Tensor], Any]] = [
    lambda x: x.reshape(-1)[0].item() and x,
    lambda x: x.detach().numpy() is not None and x,
    lambda x: [float(v.sum()) for v in x.detach()] and x,
    lambda x: x * 2,
    lambda x: x + x.detach().sin(),
    lambda x: x.exp().log1p(),
    lambda x: torch.special.expit(x),
    lambda x: (x * 1).mul_(0.5),
    lambda x: x.view(-1),
    lambda x: x.reshape(-1, 1),
    lambda x: x[:],
    lambda x: x[None],
    lambda x: (x * 1).unsqueeze_(-1),
    lambda x: (x * 1).squeeze_(),
    lambda x: (x * 1).transpose_(0, -1),
    lambda x: torch.cat([x.reshape(-1), x.reshape(-1) * 3]),
    lambda x: x.clone().detach_().add_(1) * x,
    lambda x: torch.where(x > 0.5, x, x.float().double() * 3),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [[3, 2], [5, 1, 2]])
def test_programs_on_results_weigh_as_if_each_row_had_its_replicas_result(rows: list[int]) -> None:
    draw = random.Random(0)
    for _ in range(60):
        steps = [draw.choice(KEEPING) for _ in range(draw.randint(1, 7))]
        leaves = numbers(len(rows)).requires_grad_(), numbers(len(rows)).requires_grad_()
        batch = shard_batch([x * 1 for x in torch.split(leaves[0], 1)], CPU, 0, rows)
        means = []
        for x in (batch, leaves[1].repeat_interleave(torch.tensor(rows))):
            y = functools.reduce(lambda y, step: step(y), steps, x)
            means += [y.mean(), torch.var_mean(y)[1], F.mse_loss(y, torch.zeros_like(y))]
        torch.testing.assert_close(means[:3], means[3:])
        grads = [torch.autograd.grad(m, leaf, allow_unused=True)[0] for m, leaf in zip((means[0], means[3]), leaves)]
        torch.testing.assert_close(*grads)


LOOKS: list[Callable[[Tensor], Any]] = [
    lambda x: None,
    lambda x: x[0].item(),
    lambda x: [float(v) for v in x.detach()],
    lambda x: bool(x[0] > 1),
    lambda x: (x.detach().numpy(), x.tolist(), str(x)),
    lambda x: (join(x), x[1:]),
]


class TestResultsPerReplica:
    def batch(self, values: list[float], rows: list[int]) -> tuple[ShardedBatch, list[Tensor]]:
        entries = [torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in values]
        return shard_batch(entries, CPU, 0, rows), entries

    @PROPERTY
    @given(data=st.data(), rows=st.lists(st.integers(1, 9), min_size=1, max_size=5))
    def test_the_mean_weighs_by_rows(self, data: Any, rows: list[int]) -> None:
        values = data.draw(st.lists(st.floats(-5, 5), min_size=len(rows), max_size=len(rows)))
        expected = sum(v * n for v, n in zip(values, rows)) / sum(rows)
        for mean in (
            Tensor.mean,
            torch.mean,
            lambda x: x.mean(0),
            lambda x: x.mean(dim=-1),
            lambda x: torch.mean(x, [0]),
        ):
            x, entries = self.batch(values, rows)
            result = mean(x)
            result.backward()
            torch.testing.assert_close(result.item(), expected)
            torch.testing.assert_close([e.grad.item() for e in entries], [n / sum(rows) for n in rows])

    @pytest.mark.parametrize(
        "change",
        [
            lambda x: x * 2,
            lambda x: x.mul_(2),
            lambda x: 2 * x.float().double(),
            lambda x: x.unsqueeze(1).squeeze(1) * 2,
            lambda x: x.view(-1) + x,
            lambda x: torch.stack([x, x]).sum(0),
            lambda x: torch.stack([x * 2, x * 2]),
            lambda x: x.detach() * 2,
            lambda x: x.clone().div_(0.5),
            lambda x: x[:] * 2,
            lambda x: x[0:3, None][...] * 2,
            lambda x: x.unsqueeze_(0).mul_(2),
            lambda x: (x * 2).view(1, 3).squeeze_(0),
            lambda x: (x * 2).view(1, 3).swapaxes_(0, 1),
            lambda x: x.reshape(3, 1).flatten() * 2,
            lambda x: torch.stack([x * 2, x * 2], 1),
            lambda x: torch.cat([x]) * 2,
            lambda x: torch.cat([x, x * 2, x * 3]),
            lambda x: x * torch.full((3,), 2.0),
            lambda x: torch.erfinv(torch.erf(x.detach())) * 2,
            lambda x: torch.where(x > 0, 2 * x, 0).clamp(max=torch.full((3,), 9.0)),
            lambda x: x.float_power(2).sqrt().data * 2,
            lambda x: F.dropout(x * 2, 0.0),
            lambda x: copy.deepcopy(x.detach()) * 2,
            lambda x: x.cpu().to("cpu") * 2,
            lambda x: torch.zeros_like(x).copy_(x) * 2,
        ],
    )
    @pytest.mark.parametrize("look", LOOKS)
    def test_weights_stay_with_what_is_computed(
        self, change: Callable[[Tensor], Tensor], look: Callable[[Tensor], Any]
    ) -> None:
        x, entries = self.batch([1.0, 2.0, 4.0], [3, 2, 1])
        losses = x * 1
        look(losses)
        mean = change(losses).mean()
        torch.testing.assert_close(mean.item(), 2 * 11 / 6)
        if mean.requires_grad:
            mean.backward()
            torch.testing.assert_close([e.grad.item() for e in entries], [1.0, 2 / 3, 1 / 3])

    @pytest.mark.parametrize("look", LOOKS)
    def test_means_that_weigh(self, look: Callable[[Tensor], Any]) -> None:
        x, _ = self.batch([1.0, 2.0, 4.0], [3, 2, 1])
        look(x)
        zeros = torch.zeros(3, dtype=torch.float64)
        out = torch.mean(x.detach(), dim=0, out=zeros.new_empty(()))
        means = [out, torch.std_mean(x)[1], torch.var_mean(x, 0)[1], torch.var_mean(x, dim=0, keepdim=True)[1][0]]
        means += [torch.std_mean(x, False)[1], F.l1_loss(x, zeros), x.nanmean(), torch.nanmean(x, 0, keepdim=True)[0]]
        torch.testing.assert_close([m.item() for m in means], [11 / 6] * 8)
        assert torch.std_mean(x)[0] == x.std()
        squares = [F.mse_loss(x, zeros), F.smooth_l1_loss(x + 0.5, zeros) * 2, F.huber_loss(x + 0.5, zeros) * 2]
        torch.testing.assert_close([s.item() for s in squares], [27 / 6, 22 / 6, 22 / 6])

    def test_a_mean_without_nan_weighs_what_is_left(self) -> None:
        x, entries = self.batch([1.0, float("nan"), 4.0], [3, 2, 1])
        x.nanmean().backward()
        assert x.nanmean().item() == pytest.approx(7 / 4)
        assert [e.grad.item() for e in entries] == pytest.approx([0.75, 0, 0.25])

    @pytest.mark.parametrize("loss", [F.mse_loss, F.huber_loss, F.smooth_l1_loss])
    def test_a_loss_of_results_weighs_as_the_mean_of_its_terms(self, loss: Callable[..., Tensor]) -> None:
        gradients = []
        for take in (loss, lambda x, y: loss(x, y, reduction="none").mean()):
            x, entries = self.batch([0.5, 2.0, float("nan")], [3, 1, 0])
            take(x, torch.zeros(3, dtype=torch.float64)).backward()
            gradients.append([e.grad.item() for e in entries[:2]])
        torch.testing.assert_close(gradients[0], gradients[1])

    def test_results_of_several_calls_weigh_by_all_rows(self) -> None:
        x, entries = self.batch([1.0, 2.0], [3, 1])
        y, others = self.batch([5.0], [4])
        mean = torch.cat([x, y]).mean()
        mean.backward()
        assert mean.item() == (3 + 2 + 20) / 8
        assert [e.grad.item() for e in entries + others] == [3 / 8, 1 / 8, 1 / 2]

    def test_weights_move_to_another_device(self) -> None:
        x, _ = self.batch([1.0, 2.0], [3, 1])
        assert x.to("meta").shard_rows == (3, 1)
        assert {s.device.type for s in x.detach().to("meta").shards} == {"meta"}

    @pytest.mark.parametrize(
        "use",
        [
            join,
            lambda x: x[1],
            lambda x: x[1:],
            lambda x: x[x > 0],
            lambda x: x[[0, 1]],
            lambda x: x.flip(0),
            lambda x: x.sort()[0],
            lambda x: torch.stack([*x]),
            lambda x: torch.cat([x, ones(1)]),
            lambda x: pickle.loads(pickle.dumps(x.detach())),
            lambda x: x.as_subclass(Tensor),
        ],
    )
    def test_what_picks_entries_is_plain(self, use: Callable[[Tensor], Tensor]) -> None:
        x, _ = self.batch([1.0, 2.0], [3, 1])
        assert type(use(x)) is Tensor

    def test_weights_outlive_a_write(self) -> None:
        x, _ = self.batch([1.0, 2.0, 4.0], [3, 2, 1])
        y = x * 1
        y[0] = 7
        torch.testing.assert_close(y.mean().item(), (21 + 4 + 4) / 6)

    def test_a_replica_without_rows_counts_for_nothing(self) -> None:
        x, entries = self.batch([1.0, float("nan")], [3, 0])
        x.mean().backward()
        assert x.mean().item() == 1
        assert [e.grad.item() for e in entries] == [1, 0]

    def test_others_do_not_weigh(self) -> None:
        x, _ = self.batch([1.0, 2.0], [3, 1])
        assert x.sum().item() == 3
        assert x.tolist() == [1, 2]
        assert join(x).mean().item() == 1.5
        assert x.std().item() == pytest.approx(0.5**0.5)
        assert x.shard_rows == (3, 1)

    def test_in_half_precision(self) -> None:
        x = shard_batch([torch.tensor([60000.0]).half(), torch.tensor([60000.0]).half()], CPU, 0, [5, 3])
        assert x.mean().item() == torch.tensor(60000.0).half().item()
        assert x.mean().dtype == torch.float16


class TestShards:
    def test_are_connected_and_in_order(self) -> None:
        x = numbers(7, 2).requires_grad_()
        batch = lay_out(x, [3, 0, 4])
        first, _, last = batch.shards
        assert torch.equal(first, x[:3])
        (last * 2).sum().backward()
        assert torch.equal(x.grad, torch.cat([torch.zeros(3, 2), torch.full((4, 2), 2.0)]).double())
        assert batch.shard_dim == 0
        assert batch.shard_rows is None
        assert batch._joined.tensor is None

    def test_after_a_write_are_cut_from_the_joined_tensor(self) -> None:
        batch = lay_out(numbers(4, 2), [3, 1])
        batch[3] = 8
        assert not has_shards(batch)
        assert batch.shards[1].tolist() == [[8, 8]]

    def test_memory_is_freed_without_the_garbage_collector(self) -> None:
        gc.disable()
        try:
            batch = lay_out(numbers(4, 2), [3, 1])
            view = batch.t() * 2
            kept = weakref.ref(batch)
            del batch, view
            assert kept() is None
        finally:
            gc.enable()

    def test_a_pointer_is_refused_rather_than_null(self) -> None:
        with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="data"):
            lay_out(numbers(4, 2), [3, 1]).data_ptr()

    def test_data_of_another_shape_is_an_error(self) -> None:
        with pytest.raises(GatherError, match="must have shape"):
            lay_out(numbers(4, 2), [3, 1]).data = ones(3)

    def test_gather_joins_on_purpose(self) -> None:
        batch = lay_out(numbers(4, 2), [3, 1])
        assert type(everygpu.gather(batch)) is Tensor
        assert type(everygpu.gather({"out": [batch]})["out"][0]) is Tensor
        with pytest.raises(OptionError, match="target_device"):
            everygpu.gather([ones(2)])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_loss_runs_as_written(backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda x, y: F.cross_entropy(x * 2, y) + x.exp().mean(), backend=backend)
    assert_same_call(compiled, (Rows(numbers(7, C), 0), labels(ones(7, 1))), [4, 3])
    assert not torch._dynamo.utils.counters["graph_break"]


# Unmodified scripts.

REPLICAS = ["cpu"] * 3


class Outputs(nn.Module):
    """Returns things of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Mlp()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.calls += 1
        out = self.net(x)
        return {"out": out, "input": x, "scale": self.scale, "calls": self.calls.expand(len(x), 2), "list": [out * 2]}


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Mlp()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)


class TinyGpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.table(tokens)))


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def pair(make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    bare = make().double()
    return everygpu.DataParallel(copy.deepcopy(bare), REPLICAS, **options), bare


def trained(model: nn.Module, batches: list[Any], loss_of: Callable[..., Any]) -> tuple[list[float], list[Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    for batch in batches:
        loss, *numbers_seen = loss_of(model, *batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += [loss.item(), *numbers_seen]
    return losses, list(model.parameters())


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    loss = nn.CrossEntropyLoss()(out, y)
    return loss, (out.argmax(1) == y).sum().item(), (out.topk(1)[1].squeeze(1) == y).float().mean().item()


def next_token(model: nn.Module, tokens: Tensor) -> Any:
    logits = model(tokens[:, :-1])
    return (F.cross_entropy(logits.view(-1, 11), tokens[:, 1:].reshape(-1)),)


def shifted(model: nn.Module, tokens: Tensor) -> Any:
    logits = model(tokens)
    shift_logits, shift_labels = logits[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return (nn.CrossEntropyLoss()(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1)),)


def segment(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    smooth = 1 - (out.softmax(1) * F.one_hot(y.clamp(min=0), 5).permute(0, 3, 1, 2)).sum((0, 2, 3)).mean() / y.numel()
    pixels = (out.argmax(dim=1) == y)[y != -100].float().mean().item()
    return F.cross_entropy(out, y, ignore_index=-100) + smooth, pixels


def by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    logp = out.log_softmax(-1)
    picked = logp.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    focal = -((1 - picked.exp()) ** 2 * picked).mean()
    out.retain_grad()
    return focal + 0.1 * out.pow(2).mean() + F.l1_loss(
        out, torch.zeros_like(out)
    ), out.detach().cpu().numpy().mean().item()


def smoothed(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    loss = F.cross_entropy(model(x), y, label_smoothing=0.1, weight=numbers(2))
    loss /= 2
    return (loss,)


def vectors(num_rows: int) -> tuple[Tensor, Tensor]:
    return rows(num_rows, 3, device=CPU, seed=num_rows), torch.arange(num_rows) % 2


def pictures(num_rows: int) -> tuple[Tensor, Tensor]:
    y = torch.arange(num_rows * 16).view(num_rows, 4, 4) % 5
    y[:2] = -100
    return rows(num_rows, 3, 4, 4, device=CPU), y


def tokens(num_rows: int) -> tuple[Tensor]:
    return (torch.arange(num_rows * 6).view(num_rows, 6) * 7 % 11,)


LOOPS = [
    (Mlp, vectors, classify),
    (Mlp, vectors, by_hand),
    (Mlp, vectors, smoothed),
    (TinyGpt, tokens, next_token),
    (TinyGpt, tokens, shifted),
    (Segmenter, pictures, segment),
]


class TestScripts:
    @pytest.mark.parametrize(("make", "batch", "loss_of"), LOOPS, ids=lambda v: v.__name__)
    def test_a_training_loop_equals_one_device(self, make: Any, batch: Any, loss_of: Any) -> None:
        model, bare = pair(make)
        batches = [batch(n) for n in (10, 7, 4, 10)]
        torch.testing.assert_close(trained(model, batches, loss_of), trained(bare, batches, loss_of), **TOLERANCE)

    @pytest.mark.parametrize(("make", "batch", "loss_of"), LOOPS[2:], ids=lambda v: v.__name__)
    def test_outputs_are_never_joined(self, make: Any, batch: Any, loss_of: Any) -> None:
        seen: list[ShardedBatch] = []
        model, _ = pair(make)
        model.register_forward_hook(lambda module, args, out: seen.append(out))
        loss_of(model, *batch(10))[0].backward()
        assert isinstance(seen[0], ShardedBatch)
        assert seen[0]._joined.tensor is None
        assert has_shards(seen[0])

    @pytest.mark.parametrize("num_rows", [10, 7, 4, 1])
    def test_a_module_that_returns_its_loss(self, num_rows: int) -> None:
        model, bare = pair(WithLoss)
        model(*vectors(num_rows)).mean().backward()
        bare(*vectors(num_rows)).backward()
        expected = [p.grad for p in bare.parameters()]
        torch.testing.assert_close([p.grad for p in model.parameters()], expected, **TOLERANCE)

    def test_outputs_of_every_kind(self) -> None:
        model, bare = pair(Outputs)
        x = rows(7, 3, device=CPU)
        ours, theirs = model(x), bare(x)
        assert_like({k: everygpu.gather(ours[k]) for k in ("out", "list")}, {k: theirs[k] for k in ("out", "list")})
        assert ours["scale"].shape == (3,)

    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
    def test_outputs_keep_what_was_returned(self, mode: Any) -> None:
        """Inputs, parameters and buffers that a module returned may be written before the output is read."""
        model, _ = pair(Outputs)
        x = rows(7, 3, device=CPU)
        with mode():
            out = model(x)
            expected = {k: everygpu.gather(model(x)[k]).clone() for k in ("input", "scale")}
            with torch.no_grad():
                model.module.scale.add_(1)
                x.zero_()
                model.module.calls.add_(5)
        for name, value in expected.items():
            assert torch.equal(everygpu.gather(out[name]), value)
        assert everygpu.gather(out["calls"]).unique().numel() == 1

    def test_joined_on_request(self) -> None:
        model, bare = pair(Mlp, gather="joined")
        x = rows(7, 3, device=CPU)
        assert type(model(x)) is Tensor
        assert type(model(x[:1])) is Tensor
        torch.testing.assert_close(model(x), bare(x), **TOLERANCE)
        with pytest.raises(OptionError, match="gather"):
            everygpu.DataParallel(Mlp(), REPLICAS, gather="some")

    def test_an_output_outlives_its_model(self) -> None:
        model, bare = pair(Mlp)
        parameters = list(model.parameters())
        x = rows(7, 3, device=CPU)
        out = model(x)
        del model
        gc.collect()
        out.pow(2).sum().backward()
        bare(x).pow(2).sum().backward()
        torch.testing.assert_close([p.grad for p in parameters], [p.grad for p in bare.parameters()], **TOLERANCE)

    def test_one_model_after_another(self) -> None:
        first, bare_first = pair(Mlp)
        second, bare_second = pair(lambda: nn.Linear(2, 2))
        x = rows(7, 3, device=CPU)
        second(first(x)).pow(2).mean().backward()
        bare_second(bare_first(x)).pow(2).mean().backward()
        expected = [p.grad for p in [*bare_first.parameters(), *bare_second.parameters()]]
        actual = [p.grad for p in [*first.parameters(), *second.parameters()]]
        torch.testing.assert_close(actual, expected, **TOLERANCE)
