"""N replicas give what one device gives: outputs, gradients every way, buffers, second derivatives."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import everygpu
from everygpu import tree
from tests.parallel.models import CASES, Case, convolutional

pytestmark = [
    pytest.mark.usefixtures("in_threads"),
    # torch 2.11 says so of any sparse tensor, also of those whose checks are left out explicitly.
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]

Devices = Callable[[int], list[torch.device]]
PROPERTY = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
sizes = st.integers(0, 40)
counts = st.integers(1, 9)


def prepare(case: Case, rows: int, on: torch.device) -> tuple[nn.Module, tuple[Any, ...], list[Tensor]]:
    """The bare module, its inputs as doubles on a device, and those inputs that take a gradient."""
    module = case.make().to(on)
    torch.manual_seed(1)

    def place(leaf: Any) -> Any:
        if isinstance(leaf, everygpu.Replicated):
            return everygpu.Replicated(place(leaf.value))
        return leaf.to(on, torch.float64 if leaf.is_floating_point() else leaf.dtype)

    batch = tree.map_leaves(place, case.batch(rows))
    inputs = [b.value if isinstance(b, everygpu.Replicated) else b for b in batch]
    taking = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    return module, batch, taking


def unmarked(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(b.value if isinstance(b, everygpu.Replicated) else b for b in batch)


def loss_of(output: Any) -> Tensor:
    """A loss with a second derivative, summed so that it doesn't depend on how rows are counted."""
    return sum((leaf.pow(2) * torch.arange(1, leaf.shape[-1] + 1, device=leaf.device)).sum()
               for _, leaf in tree.leaves(output, ""))  # fmt: skip


def dense(tensors: Any) -> list[Tensor]:
    return [t.to_dense() if t.is_sparse else t for t in tensors]


def both(case: Case, rows: int, devices: list[torch.device]) -> tuple[Any, Any]:
    alone = prepare(case, rows, devices[0])
    together = prepare(case, rows, devices[0])
    model = everygpu.DataParallel(together[0], devices)
    return (alone[0], unmarked(alone[1]), alone[2]), (model, together[1], together[2])


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
class TestEqualToOneDevice:
    @PROPERTY
    @given(rows=sizes, count=counts)
    def test_outputs(self, case: Case, devices: Devices, rows: int, count: int) -> None:
        (bare, x, _), (model, y, _) = both(case, rows, devices(count))
        torch.testing.assert_close(model(*y), bare(*x))

    @PROPERTY
    @given(rows=sizes, count=counts)
    def test_gradients_by_backward(self, case: Case, devices: Devices, rows: int, count: int) -> None:
        (bare, x, takes), (model, y, takes_too) = both(case, rows, devices(count))
        loss_of(bare(*x)).backward()
        loss_of(model(*y)).backward()
        expected = [p.grad for p in bare.parameters()]
        torch.testing.assert_close(dense(p.grad for p in model.parameters()), dense(expected))
        torch.testing.assert_close([t.grad for t in takes_too], [t.grad for t in takes])

    @PROPERTY
    @given(rows=sizes, count=counts)
    def test_gradients_by_autograd_grad(self, case: Case, devices: Devices, rows: int, count: int) -> None:
        (bare, x, takes), (model, y, takes_too) = both(case, rows, devices(count))
        # Some operations leave their inputs out of the graph when there are no rows.
        expected = torch.autograd.grad(loss_of(bare(*x)), [*bare.parameters(), *takes], materialize_grads=True)
        actual = torch.autograd.grad(loss_of(model(*y)), [*model.parameters(), *takes_too], materialize_grads=True)
        torch.testing.assert_close(dense(actual), dense(expected))

    @PROPERTY
    @given(rows=st.integers(1, 20), count=counts)
    def test_second_derivatives(self, case: Case, devices: Devices, rows: int, count: int) -> None:
        (bare, x, takes), (model, y, takes_too) = both(case, rows, devices(count))
        expected = second_derivatives(bare, x, takes)
        torch.testing.assert_close(second_derivatives(model, y, takes_too), expected)

    @PROPERTY
    @given(rows=st.integers(1, 20), count=counts)
    def test_two_forwards_before_one_backward(self, case: Case, devices: Devices, rows: int, count: int) -> None:
        (bare, x, _), (model, y, _) = both(case, rows, devices(count))
        (loss_of(bare(*x)) * loss_of(bare(*x))).backward()
        (loss_of(model(*y)) * loss_of(model(*y))).backward()
        expected = [p.grad for p in bare.parameters()]
        torch.testing.assert_close(dense(p.grad for p in model.parameters()), dense(expected))

    def test_a_training_run(self, case: Case, devices: Devices) -> None:
        (bare, x, _), (model, y, _) = both(case, 11, devices(3))
        ours = torch.optim.SGD(model.parameters(), lr=0.01)
        theirs = torch.optim.SGD(bare.parameters(), lr=0.01)
        for _ in range(5):
            for net, batch, optimizer in ((bare, x, theirs), (model, y, ours)):
                optimizer.zero_grad()
                (loss_of(net(*batch)) / 100).backward()
                optimizer.step()
        torch.testing.assert_close(list(model.parameters()), list(bare.parameters()))


def second_derivatives(net: nn.Module, batch: tuple[Any, ...], takes: list[Tensor]) -> list[Tensor]:
    parameters = list(net.parameters())
    # A sparse gradient can't be differentiated again, on one device either.
    once = [p for name, p in net.named_parameters() if "table" not in name]
    # Neither can the fused attention kernels nor cuDNN's recurrent ones.
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        torch.backends.cudnn.flags(enabled=False),
    ):
        first = torch.autograd.grad(loss_of(net(*batch)), [*once, *takes], create_graph=True)
        penalty = sum(g.abs().pow(2).sum() for g in first)
        return dense(torch.autograd.grad(penalty, [*parameters, *takes], materialize_grads=True))


def run_training_mode(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x)
    loss_of(out).backward()
    return out


@PROPERTY
@given(rows=st.integers(4, 40), count=counts, rule=st.sampled_from(["first", "mean"]))
def test_batchnorm_in_training_follows_the_buffer_rule(devices: Devices, rows: int, count: int, rule: str) -> None:
    used = devices(count)
    torch.manual_seed(0)
    bare = convolutional().double().to(used[0])
    model = everygpu.DataParallel(copy.deepcopy(bare), used, buffers=rule)
    x = torch.randn(rows, 2, 5, 5, dtype=torch.float64, device=used[0])
    shards = x.chunk(len(used))
    alone = [copy.deepcopy(bare) for _ in shards]
    expected = torch.cat([run_training_mode(net, shard) for net, shard in zip(alone, shards)])

    torch.testing.assert_close(run_training_mode(model, x), expected)

    for parameters in zip(model.parameters(), *(net.parameters() for net in alone)):
        torch.testing.assert_close(parameters[0].grad, sum(p.grad for p in parameters[1:]))
    for name, mine in model.module.named_buffers():
        theirs = [net.get_buffer(name) for net in alone]
        if rule == "first" or not mine.is_floating_point():
            torch.testing.assert_close(mine, theirs[0])
        else:
            mean = sum(t * (len(shard) / rows) for t, shard in zip(theirs, shards))
            torch.testing.assert_close(mine, mean)
