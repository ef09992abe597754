"""Calls in a helper: exceptions, second derivatives, and graphs without a backward."""

from collections.abc import Iterator

import pytest
import torch

import everygpu
from everygpu.errors import ReplicaError
from tests.parallel.engines.processes.failing import Net


@pytest.fixture(scope="module")
def model() -> Iterator[everygpu.DataParallel]:
    made = everygpu.DataParallel(Net(), ["cpu"] * 2, engine="processes")
    made(torch.ones(4, 4).double())  # starts the helper
    yield made
    made.release()


def test_an_exception_that_is_not_made_of_its_message(model: everygpu.DataParallel) -> None:
    x = torch.ones(4, 4).double()
    x[:2] = -1  # the helper's rows alone are refused
    model.module.fails = True
    with pytest.raises(RuntimeError, match="TooManyError: 3 of 2") as raised:
        model(x)
    model.module.fails = False
    assert isinstance(raised.value.__cause__, ReplicaError)
    assert "replica 1" in str(raised.value.__cause__)
    assert model(x).shape == (4, 4)


@pytest.mark.parametrize("num", [1, 3])
def test_gradients_that_are_differentiated_again(model: everygpu.DataParallel, num: int) -> None:
    x = torch.randn(4, 4).double().requires_grad_()
    for _ in range(num):
        alone = x.detach().clone().requires_grad_()
        model.zero_grad()
        (ours,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        ours.square().sum().backward()
        found = model.module.layer.weight.grad.clone()
        model.zero_grad()
        (theirs,) = torch.autograd.grad(model.module(alone).square().sum(), alone, create_graph=True)
        theirs.square().sum().backward()
        torch.testing.assert_close(found, model.module.layer.weight.grad)


def test_graphs_without_a_backward_are_dropped(model: everygpu.DataParallel) -> None:
    for _ in range(20):
        model(torch.randn(4, 4).double())
    helper = model._engine._helpers[1]
    assert len(helper.calls) <= 1
    assert len(helper.dropped) <= 1
