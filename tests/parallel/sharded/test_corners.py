"""Where torch's own functions treat subclasses unlike plain tensors, a batch is like a plain one all the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import everygpu
from everygpu.parallel.sharded.rules import call_on_parts
from everygpu.torch_private.core import without_torch_function
from tests.parallel.batches import Rows, assert_same_call, lay_out, numbers
from tests.parallel.sharded.uses import C, Use, ones


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def written(function: Callable[..., Any], *args: Any, out: Tensor) -> Tensor:
    function(*args, out=out)
    return out


SPARSE: list[Callable[[Tensor], Any]] = [
    lambda x: eye(len(x)).to_sparse() @ x,
    lambda x: x @ eye(C).to_sparse(),
    lambda x: eye(len(x)).to_sparse_csr() @ x,
    lambda x: x @ eye(C).to_sparse_csr(),
    lambda x: eye(len(x)).to_sparse() @ x[:, 0],
    lambda x: F.linear(x, eye(C).to_sparse()),
    lambda x: (x.to_sparse_csr().to_dense(), x.detach().to_sparse_csc().to_dense(), x.to_sparse().to_dense()),
    lambda x: torch.nested.as_nested_tensor(x.detach()).to_padded_tensor(0.0),
    lambda x: torch.quantize_per_tensor(x.detach().float(), 0.1, 0, torch.qint8).dequantize(),
    lambda x: x.detach().float().to_mkldnn().to_dense(),
]
DROPPED: list[Callable[[Tensor], Any]] = [
    lambda x: F.l1_loss(x, x.detach() * 2, weight=numbers(*x.shape)),
    lambda x: F.l1_loss(x, x.detach() * 2, reduction="sum", weight=numbers(*x.shape)),
    lambda x: F.l1_loss(x, x.detach() * 2),
    lambda x: written(torch.linalg.matrix_rank, x.detach(), out=torch.zeros((), dtype=torch.int64)),
    lambda x: ones(*x.shape).map_(x.detach(), lambda a, b: a + b),
    lambda x: x.detach().clone().map_(ones(*x.shape), lambda a, b: a + b),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*prototype", "ignore:.*quantiz")
@pytest.mark.parametrize("use", SPARSE)
class TestOtherLayouts(Use):
    pass


@pytest.mark.parametrize("use", DROPPED)
class TestArgumentsThatTorchDrops(Use):
    pass


def test_statistics_that_are_written_without_a_word_are_those_of_the_shards() -> None:
    mean, var = (lay_out(torch.zeros(C), [3, 2]) for _ in range(2))
    torch.native_batch_norm(numbers(6, C).float(), None, None, mean, var, True, 0.5, 1e-5)
    torch.testing.assert_close(torch.cat(mean.shards), everygpu.parallel.gather(mean))
    assert all(s.any() for s in mean.shards)


MISTAKES: list[Callable[[Tensor], Any]] = [
    lambda x: x @ ones(C + 1, 2),
    lambda x: F.linear(x, ones(3, 3)),
    lambda x: torch.addmm(ones(3), x, ones(C, 2)),
    lambda x: x @ ones(3),
    lambda x: x + ones(len(x) + 1, C),
    lambda x: x.lerp(ones(len(x), 3), 0.5),
    lambda x: x.gather(1, torch.full((len(x), 1), 9)),
    lambda x: F.mse_loss(x, ones(len(x), 3)),
    lambda x: x.softmax(3),
    lambda x: x.view(7, 3),
]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_name_the_shape_of_the_whole(mistake: Callable[[Tensor], Any]) -> None:
    with pytest.raises((RuntimeError, IndexError)) as plain:
        mistake(numbers(5, C))
    with pytest.raises(plain.type) as ours:
        mistake(lay_out(numbers(5, C), [3, 2]))
    assert str(ours.value) == str(plain.value)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_device_that_fails_on_a_part_is_not_asked_for_the_whole(kind: type[Exception]) -> None:
    def fail(x: Tensor) -> Tensor:
        raise kind("CUDA error: device-side assert triggered")

    with pytest.raises(kind, match="device-side assert"):
        call_on_parts(fail, [[ones(1)]], {})


def test_is_printed_where_torch_asks_for_no_override() -> None:
    x = numbers(3, 2)
    with without_torch_function():
        assert repr(lay_out(x, [2, 1])) == repr(x)


# Modes of torch's dispatch.

FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.sin(),
    lambda x: (x * x).sum(0),
    lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.int64)),
    lambda x: (x * 1).view(-1).mul_(2),
]


def gradient(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def compute(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(function(leaf).sum(), leaf)[0]

    return compute


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_trace_is_of_the_whole(function: Callable[[Tensor], Tensor]) -> None:
    x, other = numbers(5, C), numbers(5, C, seed=1)
    for traced in (function, gradient(function)):
        found = make_fx(traced)(lay_out(x, [3, 2]))(other)
        torch.testing.assert_close(found, traced(other))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_linear_approximation_is_of_the_whole(function: Callable[[Tensor], Tensor]) -> None:
    x, tangent = numbers(5, C), numbers(5, C, seed=1)
    expected = torch.func.jvp(function, (x,), (tangent,))[1]
    torch.testing.assert_close(torch.func.linearize(function, lay_out(x, [3, 2]))[1](tangent), expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_fake_tensors_are_left_behind_in_no_batch(function: Callable[[Tensor], Tensor]) -> None:
    x = numbers(5, C)
    batch = lay_out(x, [3, 2])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert type(function(batch)) is type(function(x)) is type(mode.from_tensor(batch))
    assert_same_call(lambda x: x.roll(1), (Rows(x, 0),), [3, 2])
    torch.testing.assert_close(batch.roll(1), x.roll(1))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.kl_div(numbers(1, 3), x, reduction="batchmean"),
        lambda x: F.kl_div(x.mean(), x, reduction="batchmean"),
        lambda x: F.kl_div(target=x, input=x[:1], reduction="batchmean"),
        lambda x: F.one_hot((x * 9).long(), 5),
        lambda x: F.one_hot((x * 9).long(), 9),
        lambda x: F.one_hot((x * 9).long()[:, 0], num_classes=9),
        lambda x: F.one_hot((x * 9).long() - 1, 9),
        lambda x: F.one_hot((x * 9).long()),
    ],
)
def test_rows_are_counted_and_classes_checked_as_of_a_plain_tensor(call):
    assert_same_call(call, (Rows(numbers(7, 3), 0),), [4, 0, 3])
