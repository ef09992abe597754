"""States, gradients and groups of captured steps."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import everygpu
from tests.step.scenarios import NUM_BEFORE, Devices, Step, X, Y, adamw, check, make_step, train_on
from tests.step.test_capture import Net, num_graphs


@pytest.mark.parametrize("options", [{}, {"precision": "fp16"}], ids=str)
def test_states_that_are_saved_and_loaded(capturing: Devices, tmp_path: Path, options: dict[str, Any]) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        parts = {"model": step.model, "optimizer": step.optimizer, "step": step}
        place = tmp_path / f"captured-{step._capture is not None}"
        everygpu.save(place, **parts)
        train_on(step, losses, 6)
        everygpu.load(place, **parts)
        train_on(step, losses, 6)
        assert losses[-1].item() == pytest.approx(losses[-7].item(), rel=1e-4)

    check(capturing, scenario, **options)


class Refusing(Net):
    """Fails for some batches."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if len(x) == 2:
            raise ValueError("of two rows")
        return h


def test_exceptions_in_between(capturing: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        for _ in range(5):
            with pytest.raises(ValueError, match="two rows"):
                step(X[:4], Y[:4])
            train_on(step, losses, 2)

    check(capturing, scenario, make=Refusing)
    check(capturing, scenario, make=Refusing, accumulate=2)


def test_groups_that_are_edited(capturing: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        net, optimizer = step.model.module, step.optimizer
        group = optimizer.param_groups[0]
        for key, value in (("lr", 0.1), ("weight_decay", 0.0), ("betas", (0.5, 0.9)), ("eps", 0.1), ("maximize", True)):
            group[key] = value
            train_on(step, losses, 2)
        group["maximize"] = False
        optimizer.add_param_group({"params": [net.frozen.requires_grad_()], "lr": 0.05})
        train_on(step, losses, 7)
        net.first.weight.requires_grad_(False)
        train_on(step, losses, 7)
        net.first.weight.requires_grad_(True)
        optimizer.zero_grad()
        train_on(step, losses, 7)
        optimizer.state.clear()
        optimizer.load_state_dict(optimizer.state_dict())
        train_on(step, losses, 2)

    check(capturing, scenario)


@pytest.mark.parametrize("is_new", [False, True], ids=["unfrozen", "added"])
def test_layers_that_are_unfrozen_are_captured_again(capturing: Devices, is_new: bool) -> None:
    used = capturing(2)
    net = Net().to(used[0])
    net.first.requires_grad_(False)
    net.unused.requires_grad_(False)
    late = [] if is_new else [net.first.weight]
    optimizer = torch.optim.SGD([*net.norm.parameters(), *net.last.parameters(), *late], lr=0.1)
    step = Step(everygpu.DataParallel(net, used), F.cross_entropy, optimizer)
    losses: list[Tensor] = []
    train_on(step, losses)
    net.first.requires_grad_(True)
    if is_new:
        optimizer.add_param_group({"params": net.first.parameters()})
    train_on(step, losses)
    assert num_graphs(step) == 1


def test_flushes_and_another_number_of_batches(capturing: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        for num in (1, 2, 3, 4):
            train_on(step, losses, num)
            step.flush()
        step.accumulate = 1
        train_on(step, losses, 6)
        step.clip_norm = 0.01
        train_on(step, losses, 6)

    check(capturing, scenario, accumulate=3)


def test_two_steps_on_one_model(capturing: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        other = Step(step.model, nn.MSELoss(), step.optimizer, capture="auto" if step._capture else False)
        target = torch.zeros(len(X), 5)
        for num in (1, 6, 2):
            train_on(step, losses, num)
            losses += [other(X, target) for _ in range(num)]

    check(capturing, scenario)


def test_gradients_and_models_of_the_user(capturing: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        net = step.model.module
        F.cross_entropy(net(X.to(step._home)), Y.to(step._home)).backward()
        train_on(step, losses, 2)
        twin = copy.deepcopy(net)
        F.cross_entropy(step.model(X), Y.to(step._home)).backward()
        train_on(step, losses, 2)
        net.load_state_dict(twin.state_dict())
        losses.append(step.evaluate(X, Y).loss)
        train_on(step, losses, 2)

    check(capturing, scenario)


class Joining(Net):
    """Its parameters' gradients lie in one tensor, where they aren't aligned as kernels need it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.full((n,), 0.5) for n in (3, 2, 11))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh() * torch.cat([*self.parts]))


class Recurring(Net):
    """Its first parameters get their gradients bit by bit, each in a backward within the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(3):
            h = checkpoint(lambda t: self.inner(t).tanh(), h, use_reentrant=True)
        return self.last(self.norm(h))


@pytest.mark.parametrize("make", [Joining, Recurring])
def test_gradients_that_are_not_aligned_or_come_bit_by_bit(capturing: Devices, make: Any) -> None:
    check(capturing, train_on, make=make)


def test_graphs_of_before_notice_the_update(capturing: Devices) -> None:
    step = make_step(capturing(2))
    for _ in range(NUM_BEFORE):
        step(X, Y)
    output = step.model.module(X.to(step._home))
    step(X, Y)
    assert num_graphs(step) == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_sharded_optimizer_and_its_scheduler(capturing: Devices) -> None:
    used = capturing(2)
    found = []
    for capture in (False, "auto"):
        net = Net().to(used[0])
        optimizer = everygpu.ShardedOptimizer(adamw(net), used)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
        step = Step(everygpu.DataParallel(net, used), F.cross_entropy, optimizer, capture=capture)
        losses = []
        for _ in range(12):
            losses.append(step(X, Y))
            schedule.step()
        assert not capture or num_graphs(step) == 1
        optimizer.step()  # without gradients it does nothing, but brings the state here
        found.append(torch.stack([*losses, *(step(X, Y) for _ in range(6))]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
