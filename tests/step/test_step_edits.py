"""What is written, hooked and scheduled between steps, and in them, counts."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

import everygpu
from tests.step.test_train_step import Devices, Net, Pair, assert_close, assert_replicas_bit_equal, train_plainly

EDITS: dict[str, Callable[[Net], Any]] = {
    "in place": lambda net: net.first.weight.detach().mul_(0.5),
    "data in place": lambda net: net.first.weight.data.clamp_(-0.1, 0.1),
    "data assigned": lambda net: setattr(net.first.weight, "data", net.first.weight.data * 0.5),
    "loaded": lambda net: net.load_state_dict({k: v * 0.9 for k, v in net.state_dict().items()}),
    "frozen": lambda net: net.frozen.mul_(0.5),
    "frozen, data in place": lambda net: net.frozen.data.mul_(0.5),
    "frozen, data assigned": lambda net: setattr(net.frozen, "data", net.frozen.data * 0.5),
    "buffer": lambda net: net.calls.fill_(7),
    "unfrozen": lambda net: net.frozen.requires_grad_(),
    "frozen later": lambda net: net.last.weight.requires_grad_(False),
    "flag": lambda net: setattr(net.dropout, "p", 1.0),
    "module replaced": lambda net: setattr(net, "norm", nn.Identity()),
    "eval": lambda net: net.eval(),
    "laid out anew": lambda net: setattr(net.first.weight, "data", net.first.weight.data.t().contiguous().t()),
    "hook on a parameter": lambda net: net.first.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01)),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_between_steps_are_seen_by_every_replica(devices: Devices, edit: str) -> None:
    used = devices(3)
    if used[0].type == "cuda" and edit.endswith("data in place"):
        pytest.skip("needs step.refresh() on GPUs; tested below")
    pair = Pair(used)
    for batch in pair.data(8):
        pair.train([batch])
        with torch.no_grad():
            EDITS[edit](pair.ours)
            EDITS[edit](pair.plain)
    assert_close(pair.ours, pair.plain)


def test_weights_swapped_for_averages_come_back(devices: Devices) -> None:
    pair = Pair(devices(2))
    nets = pair.ours, pair.plain
    averages = [{name: p.data.clone() for name, p in net.named_parameters()} for net in nets]
    for x, y in pair.data(6):
        pair.train([(x, y)])
        kept = [{name: p.data for name, p in net.named_parameters()} for net in nets]
        for net, average in zip(nets, averages):
            for name, p in net.named_parameters():
                p.data = average[name] = (0.9 * average[name] + 0.1 * p.data).clone()
        torch.testing.assert_close(pair.step.evaluate(x, y).loss, F.cross_entropy(pair.plain(x), y).detach())
        for net, backup in zip(nets, kept):
            for name, p in net.named_parameters():
                p.data = backup[name]
    pair.check()


@pytest.mark.parametrize("edit", ["unfrozen", "hook on a parameter"])
def test_what_has_accumulated_survives_edits(devices: Devices, edit: str) -> None:
    pair = Pair(devices(2), accumulate=3)
    data = pair.data(6, ignore=False)
    for i, (x, y) in enumerate(data):
        pair.step(x, y)
        if i % 3 == 0:
            pair.reference.zero_grad()
            EDITS[edit](pair.ours)
            pair.step.evaluate(x, y)
        unit = 3 * len(data[0][1])  # what hooks see is in it
        (F.cross_entropy(pair.plain(x), y) * len(y) / unit).backward()
        if i % 3 == 0:
            EDITS[edit](pair.plain)
        if i % 3 == 2:
            for p in pair.plain.parameters():
                p.grad = None if p.grad is None else p.grad * (unit / sum(len(y) for _, y in data[i - 2 : i + 1]))
            pair.reference.step()
    pair.check()


def add_last(pair: Pair, **options: float) -> None:
    for net, optimizer in ((pair.ours, pair.optimizer), (pair.plain, pair.reference)):
        optimizer.add_param_group({"params": net.last.parameters(), **options})


def test_a_group_added_while_gradients_accumulate_brings_its_own(devices: Devices) -> None:
    pair = Pair(devices(2), lambda p: torch.optim.AdamW(list(p)[:2], lr=0.01), accumulate=2)
    data = pair.data(2, ignore=False)
    for i, (x, y) in enumerate(data):
        pair.step(x, y)
        (F.cross_entropy(pair.plain(x), y) * len(y) / sum(len(y) for _, y in data)).backward()
        if i == 0:
            add_last(pair)
    pair.reference.step()
    pair.check()


@pytest.mark.parametrize("write", ["assigned", "in place"])
def test_parameters_written_in_forward(devices: Devices, write: str) -> None:
    class Normalising(Net):
        def forward(self, x: Tensor) -> Tensor:
            normal = F.normalize(self.first.weight.detach())
            if write == "assigned":
                self.first.weight.data = normal
            else:
                self.first.weight.detach().copy_(normal)
            return super().forward(x)

    pair = Pair(devices(3), make=Normalising)
    pair.train(pair.data(8))
    pair.check()


def test_evaluation_in_inference_mode_may_come_first_after_an_edit(devices: Devices) -> None:
    pair = Pair(devices(2), "SGD")
    ((x, y),) = pair.data(1, (12,))
    pair.ours.frozen.requires_grad_()
    with torch.inference_mode():
        pair.step.evaluate(x, y)
    pair.step(x, y)


# Hooks.


@pytest.mark.parametrize("kind", ["tensor", "accumulated", "replaced", "removed"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_of_parameters_see_the_whole_gradient_once(devices: Devices, kind: str, accumulate: int) -> None:
    def note(seen: list[Tensor], p: Tensor) -> None:
        seen.append(p.grad.clone())
        if kind == "accumulated":
            p.grad.clamp_(-0.01, 0.01)
        else:
            p.grad = p.grad * 2 if kind == "replaced" else None

    pair = Pair(devices(3), accumulate=accumulate)
    data, grads = pair.data(8), ([], [])
    for net, seen in zip((pair.ours, pair.plain), grads):
        if kind == "tensor":
            net.first.weight.register_hook(lambda g, seen=seen: seen.append(g.clone()) or g.clamp(-0.01, 0.01))
        else:
            net.first.weight.register_post_accumulate_grad_hook(functools.partial(note, seen))
    pair.train(data)
    assert len(grads[0]) == len(data)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)
    pair.check()


def test_hooks_of_a_parameter_that_takes_no_part_are_not_called(devices: Devices) -> None:
    pair, called = Pair(devices(2)), []
    pair.ours.unused.register_hook(called.append)
    pair.ours.unused.register_post_accumulate_grad_hook(called.append)
    pair.train(pair.data(1))
    assert not called
    assert pair.ours.unused.equal(pair.plain.unused)


OPTIMIZER_HOOKS: dict[str, Callable[[Net, torch.optim.Optimizer], Any]] = {
    "gradients clamped before": lambda net, o: o.register_step_pre_hook(
        lambda *_: [p.grad.clamp_(-1e-3, 1e-3) for p in net.parameters() if p.grad is not None] and None
    ),
    "a gradient replaced before": lambda net, o: o.register_step_pre_hook(
        lambda *_: setattr(net.first.weight, "grad", net.first.weight.grad.sign())
    ),
    "a gradient removed before": lambda net, o: o.register_step_pre_hook(
        lambda *_: setattr(net.first.weight, "grad", None)
    ),
    "parameters decayed before": lambda net, o: o.register_step_pre_hook(
        lambda *_: [p.detach().mul_(0.9) for p in net.parameters()] and None
    ),
    "parameters clamped after": lambda net, o: o.register_step_post_hook(
        lambda *_: [p.detach().clamp_(-0.2, 0.2) for p in net.parameters()] and None
    ),
}


@pytest.mark.parametrize("hook", OPTIMIZER_HOOKS)
@pytest.mark.parametrize("way", ["step", "loop"])
@pytest.mark.parametrize("place", ["stock", "sharded"])
def test_hooks_of_the_optimizer_see_and_write_what_is_true(devices: Devices, hook: str, way: str, place: str) -> None:
    wrapped: list[Any] = []
    used = devices(3)

    def wrap(optimizer: Any) -> Any:
        wrapped.append(everygpu.ShardedOptimizer(optimizer, used))
        return wrapped[0]

    pair, sums = Pair(used, "SGD", wrap=wrap), ([], [])
    hooked = wrapped[0] if place == "sharded" else pair.optimizer
    for net, o, seen in ((pair.ours, hooked, sums[0]), (pair.plain, pair.reference, sums[1])):
        OPTIMIZER_HOOKS[hook](net, o)
        o.register_step_post_hook(
            lambda *_, net=net, seen=seen: seen.append(sum(p.detach().double().sum().item() for p in net.parameters()))
        )
    if way == "step":
        pair.train(pair.data(8))
        assert all(p.grad is None for p in pair.ours.parameters())
    else:
        for net, optimizer in ((pair.model, wrapped[0]), (pair.plain, pair.reference)):
            train_plainly(net, optimizer, pair.data(8))
    assert_close(pair.ours, pair.plain)
    assert sums[0] == pytest.approx(sums[1], rel=1e-4)


def test_a_failing_hook_leaves_replicas_equal(devices: Devices) -> None:
    pair = Pair(devices(3), "SGD")
    data = pair.data(4)

    def fail(*_: Any) -> None:
        raise ArithmeticError("broken")

    for register in ("register_step_pre_hook", "register_step_post_hook"):
        handles = [getattr(o, register)(fail) for o in (pair.optimizer, pair.reference)]
        with pytest.raises(ArithmeticError, match="broken"):
            pair.step(*data[0])
        with pytest.raises(ArithmeticError, match="broken"):
            train_plainly(pair.plain, pair.reference, data[:1])
        assert_replicas_bit_equal(pair.step)
        for handle in handles:
            handle.remove()
        pair.train(data[1:2])
        pair.check()


def test_refresh_sends_what_torch_does_not_count(devices: Devices) -> None:
    pair = Pair(devices(2))
    net, step = pair.ours, pair.step
    ((x, y),) = pair.data(1)
    step(x, y)
    net.first.weight.data.zero_()
    net.frozen.data.zero_()
    step.refresh()
    assert_replicas_bit_equal(step)
    found = everygpu.parallel.gather(step.evaluate(x, y).output)
    torch.testing.assert_close(found, net.last.bias.detach().expand(12, 5))


def test_schedulers_take_effect_at_the_next_step(devices: Devices) -> None:
    pair = Pair(devices(2), "SGD")
    schedulers = [lr_scheduler.OneCycleLR(o, 0.3, total_steps=20) for o in (pair.optimizer, pair.reference)]
    for batch in pair.data(9):
        pair.train([batch])
        for scheduler in schedulers:
            scheduler.step()
    pair.check()


def test_groups_added_later(devices: Devices) -> None:
    pair = Pair(devices(2), lambda p: torch.optim.AdamW(list(p)[:2], lr=0.01))
    for i, batch in enumerate(pair.data(8)):
        if i == 4:
            add_last(pair, lr=0.1)
        pair.train([batch])
    pair.check()
