"""Calls in a helper: exceptions, second derivatives, and graphs without a backward."""

import sys
import types
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import everygpu
from everygpu.errors import ReplicaError
from everygpu.parallel.engines import auto, table
from tests.parallel.engines.processes.failing import Net, TooManyError
from tests.parallel.engines.processes.pool import HelperPool


@pytest.fixture(scope="module")
def model(helpers: HelperPool) -> Iterator[everygpu.DataParallel]:
    with helpers.serving():
        made = everygpu.DataParallel(Net(), ["cpu"] * 2, engine="processes")
        made(torch.ones(4, 4).double())  # starts the helper
        yield made
        made.release()


def test_an_exception_that_is_not_made_of_its_message(model: everygpu.DataParallel) -> None:
    x = torch.ones(4, 4).double()
    x[:2] = -1  # the helper's rows alone are refused
    model.module.fails = True
    with pytest.raises(TooManyError, match="3 of 2") as raised:
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("quick_guards")
def test_a_compiled_function_that_calls_it(model: everygpu.DataParallel) -> None:
    x = torch.randn(4, 4).double()
    compiled = torch.compile(lambda x: model(x) * 2, backend="eager")
    torch.testing.assert_close(compiled(x), model.module(x) * 2)
    assert model.engine_in_use == "processes"


def test_a_call_that_is_observed_runs_here_and_says_so_once(
    helpers: HelperPool, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped, engines = everygpu.DataParallel(nn.Linear(4, 2), ["cpu"] * 2, engine="processes"), []
    with helpers.serving():
        for observed in (False, True, True, False):
            with torch.autograd.graph.save_on_cpu() if observed else nullcontext():
                wrapped(torch.randn(4, 4))
            engines.append(wrapped.engine_in_use)
    assert engines == ["processes", "threads", "threads", "processes"]
    (line,) = caplog.messages
    assert "save_on_cpu" in line


def test_graphs_without_a_backward_are_dropped(model: everygpu.DataParallel) -> None:
    for _ in range(20):
        model(torch.randn(4, 4).double())
    helper = model._engine._helpers[1]
    assert len(helper.calls) <= 1
    assert len(helper.dropped) <= 1


def test_a_function_of_a_module_that_was_made_here(
    helpers: HelperPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As PyG's layers have, whose modules are written while they are made."""
    made = types.ModuleType("made_while_running")
    exec("def double(x):\n    return x * 2", vars(made))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    net = Net()
    net.double = made.double
    with helpers.serving():
        model, x = everygpu.DataParallel(net, ["cpu"] * 2, engine="processes"), torch.ones(4, 4).double()
        torch.testing.assert_close(model(x), net(x))
        assert model.engine_in_use == "threads"
        model.release()
    assert "No module named 'made_while_running'" in caplog.text


class Moving(nn.Sequential):
    """Moves its weights in forward, as a recurrent layer's ``flatten_parameters`` does on GPUs."""

    def forward(self, x: Tensor) -> Tensor:
        for p in self.parameters():
            p.data = p.data.clone()
        output: Tensor = super().forward(x)
        return output


def test_weights_that_forward_moves(helpers: HelperPool) -> None:
    x, found = torch.randn(6, 4), []
    for engine in ("threads", "processes"):
        torch.manual_seed(0)
        wrapped = everygpu.DataParallel(Moving(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), ["cpu"] * 2, engine=engine)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        with helpers.serving():
            for _ in range(4):
                optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                optimizer.step()
        assert wrapped.engine_in_use == engine
        found.append([p.detach().clone() for p in wrapped.parameters()])
    torch.testing.assert_close(*found)


def test_a_helper_that_is_lost_as_a_call_begins_loses_no_gradients(
    helpers: HelperPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default such a call runs in threads, where each parameter has to be connected."""
    monkeypatch.setattr(table, "choose_engine", lambda name, context: name)
    monkeypatch.setattr(auto, "NUM_PERIODS", 1)
    net = nn.Linear(4, 2)
    wrapped, x = everygpu.DataParallel(net, ["cpu"] * 2), torch.randn(6, 4)
    with helpers.serving():
        engines = []
        while "processes" not in engines:
            wrapped(x).sum().backward()
            engines.append(wrapped.engine_in_use)
        answers = iter([True])
        monkeypatch.setattr(auto.AutoReplicas, "_goes_out", lambda replicas: next(answers, False))
        net.zero_grad()
        wrapped(x).sum().backward()
    assert wrapped.engine_in_use == "threads"
    torch.testing.assert_close(net.weight.grad, x.sum(0).expand(2, 4))


def test_parameters_that_get_a_hook_are_connected_one_by_one(helpers: HelperPool) -> None:
    """The hook is to see each whole gradient, also where gradients are differentiated again."""
    x, found = torch.randn(6, 4).double(), []
    for engine in ("threads", "processes"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
        wrapped = everygpu.DataParallel(net, ["cpu"] * 2, engine=engine)
        with helpers.serving():
            wrapped(x).square().sum().backward()
            net[2].weight.register_hook(lambda grad: grad.clamp(-0.02, 0.02))
            wrapped.zero_grad()
            wrapped(x).square().sum().backward()
        assert wrapped.engine_in_use == engine
        assert engine == "threads" or wrapped._engine._parameters is None
        found.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(found[1], found[0])
