"""``engine="graphs"``: a second backward is of the forward that was launched, whatever has happened in between."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everygpu
from everygpu.errors import CaptureError
from tests.parallel.cuda_graphs.forwards import NUM_STEPS, Devices, make_batches, num_recordings


class Short(nn.Module):
    """Its backward needs no parameter: an update between two backwards is allowed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(6, 5), 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh() * self.scale
        return h if self.training else h.exp()


class Writing(Short):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class Moving(Short):
    """Moves its weights, as recurrent layers do on GPUs."""

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data = self.layer.weight.data.clone()
        return super().forward(x)


class Synchronized(Short):
    """Has its replicas wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = everygpu.SyncBatchNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


Change = Callable[[everygpu.DataParallel, torch.optim.Optimizer], Any]


def nothing(model: everygpu.DataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Leave everything as it is."""


def update(model: everygpu.DataParallel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def evaluate(model: everygpu.DataParallel, optimizer: torch.optim.Optimizer) -> None:
    model.eval()


def run_eagerly(model: everygpu.DataParallel, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model(torch.ones(4, 6, device=model.src_device_obj))
    optimizer.step()


def freeze(model: everygpu.DataParallel, optimizer: torch.optim.Optimizer) -> None:
    model.module.layer.bias.requires_grad_(False)


def run(model: everygpu.DataParallel, x: Tensor, change: Change, found: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.train().requires_grad_(True)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    change(model, optimizer)
    was_training = model.module.training
    loss.backward()
    assert model.module.training == was_training
    found += [t.detach().cpu().clone() for p in model.parameters() for t in (p, p.grad)]
    optimizer.step()


def train_until_recorded(
    module: nn.Module, used: list[torch.device], engine: str, found: list[Tensor]
) -> everygpu.DataParallel:
    model = everygpu.DataParallel(module.to(used[0]), used, engine=engine)
    for x, _ in make_batches(NUM_STEPS):
        run(model, x.to(used[0]), nothing, found)
    assert num_recordings(model) == (engine == "graphs")
    return model


@pytest.mark.parametrize(
    ("make", "change"), [(Short, update), (Short, evaluate), (Short, freeze), (Writing, nothing), (Moving, run_eagerly)]
)
def test_what_happens_between_two_backwards(recording: Devices, make: type[Short], change: Change) -> None:
    used = recording(2)
    results = []
    for engine in ("threads", "graphs"):
        found: list[Tensor] = []
        model = train_until_recorded(make(), used, engine, found)
        for x, _ in make_batches(3):
            run(model, x.to(used[0]), change, found)
        results.append(found)
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_an_update_on_a_single_device_is_refused(recording: Devices) -> None:
    used = recording(1)
    model, (x, _) = train_until_recorded(Short(), used, "graphs", []), make_batches(NUM_STEPS)[-1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(model, x.to(used[0]), update, [])


@pytest.mark.parametrize("count", [1, 2])
def test_a_layer_at_which_replicas_wait_for_each_other(recording: Devices, count: int) -> None:
    used = recording(count)
    results = []
    for engine in ("threads", "graphs"):
        found: list[Tensor] = []
        model = train_until_recorded(Synchronized(), used, engine, found)
        results.append([*found, *(t.cpu() for t in model.buffers())])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_module_that_is_another_before_a_second_backward(recording: Devices) -> None:
    used = recording(2)
    model = everygpu.DataParallel(Short().to(used[0]), used, engine="graphs")
    for x, _ in make_batches(NUM_STEPS):
        run(model, x.to(used[0]), nothing, [])

    def rescale(model: everygpu.DataParallel, optimizer: torch.optim.Optimizer) -> None:
        model.module.scale = 2.0

    with pytest.raises(CaptureError, match="engine='threads'"):
        run(model, x.to(used[0]), rescale, [])
    out = model(x.to(used[0]))
    torch.testing.assert_close(out.detach() + 0, model.module(x.to(used[0])).detach())


def test_batched_gradients(recording: Devices) -> None:
    used = recording(2)
    model, (x, _) = train_until_recorded(Short(), used, "graphs", []), make_batches(NUM_STEPS)[-1]
    x, seeds = x.to(used[0]), torch.randn(3, len(x), 5, device=used[0])
    params = list(model.parameters())
    found = torch.autograd.grad(model(x), params, seeds, is_grads_batched=True)
    assert model.engine_in_use == "graphs"
    expected = torch.autograd.grad(model.module(x), params, seeds, is_grads_batched=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_outputs_are_differentiated_again_as_they_are(recording: Devices) -> None:
    """A ``ShardedBatch``'s own backward runs without torch's functions, by which a forward that is run again defers."""
    used = recording(2)
    model, (x, _) = train_until_recorded(Short(), used, "graphs", []), make_batches(NUM_STEPS)[-1]
    x, seeds, params = x.to(used[0]), torch.randn(len(x), 5, device=used[0]), list(model.parameters())
    for create_graph in (True, False):
        found, expected = (
            torch.autograd.grad(f(x), params, seeds, create_graph=create_graph) for f in (model, model.module)
        )
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_methods_and_overrides_beside_recordings(recording: Devices) -> None:
    used = recording(2)
    model, (x, _) = train_until_recorded(Short(), used, "graphs", []), make_batches(NUM_STEPS)[-1]
    x = x.to(used[0])
    found = model.call_method("forward", x)
    torch.testing.assert_close(everygpu.gather(found), model.module(x), rtol=1e-4, atol=1e-5)
    model(x).sum().backward()
    assert model.engine_in_use == "graphs"
    calls: list[Any] = []
    model.gather = lambda *args: calls.append(args) or type(model).gather(model, *args)
    torch.testing.assert_close(everygpu.gather(model(x)), model.module(x), rtol=1e-4, atol=1e-5)
    assert len(calls) == 1
    assert model.engine_in_use == "threads"
    del model.gather


class Pair(nn.Module):
    """Two heads; the graphs of both have saved their weights, as a layer comes before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.actor, self.critic = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x).tanh()
        return self.actor(h).tanh(), self.critic(h).tanh()


def step_in_turn(model: everygpu.DataParallel, x: Tensor, found: list[Tensor]) -> Any:
    """Update one head before the other one's backward, which doesn't need it."""
    optimizers = [torch.optim.SGD(head.parameters(), lr=0.5) for head in (model.module.actor, model.module.critic)]
    model.zero_grad()
    outputs = model(x)
    for output, optimizer in zip(outputs, optimizers):
        output.square().mean().backward(retain_graph=True)
        optimizer.step()
    found += [t.detach().cpu().clone() for p in model.parameters() for t in (p, p.grad)]
    return outputs


def test_an_update_that_other_outputs_do_not_need(recording: Devices) -> None:
    used = recording(2)
    results = []
    for engine in ("threads", "graphs"):
        model = everygpu.DataParallel(Pair().to(used[0]), used, engine=engine)
        found: list[Tensor] = []
        for x, _ in make_batches(NUM_STEPS):
            model(x)[0].square().mean().backward()
        assert num_recordings(model) == (engine == "graphs")
        for x, _ in make_batches(2):
            actions, values = step_in_turn(model, x, found)
            for output in (actions, values):  # each head has been written since
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    output.sum().backward()
        results.append(found)
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
