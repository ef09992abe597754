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
from tests.step.test_train_step import (
    OPTIMIZERS,
    Devices,
    Net,
    assert_close,
    assert_replicas_bit_equal,
    batches,
    train_plainly,
)

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
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(8)]
    step = everygpu.TrainStep(
        everygpu.DataParallel(ours, used), F.cross_entropy, OPTIMIZERS["AdamW"](ours.parameters())
    )
    optimizer = OPTIMIZERS["AdamW"](plain.parameters())
    for x, y in data:
        got = step(x, y).item()
        (expected,), _ = train_plainly(plain, optimizer, [(x, y)])
        assert got == pytest.approx(expected, rel=1e-5)
        with torch.no_grad():
            EDITS[edit](ours)
            EDITS[edit](plain)
    assert_close(ours, plain)


def test_weights_swapped_for_averages_come_back(devices: Devices) -> None:
    used = devices(2)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(6)]
    step = everygpu.TrainStep(
        everygpu.DataParallel(ours, used), F.cross_entropy, OPTIMIZERS["AdamW"](ours.parameters())
    )
    optimizer = OPTIMIZERS["AdamW"](plain.parameters())
    averages = [{name: p.data.clone() for name, p in net.named_parameters()} for net in (ours, plain)]
    for x, y in data:
        step(x, y)
        train_plainly(plain, optimizer, [(x, y)])
        kept = []
        for net, average in zip((ours, plain), averages):
            kept.append({name: p.data for name, p in net.named_parameters()})
            for name, p in net.named_parameters():
                average[name] = (0.9 * average[name] + 0.1 * p.data).clone()
                p.data = average[name]
        torch.testing.assert_close(step.evaluate(x, y).loss, F.cross_entropy(plain(x), y).detach())
        for net, backup in zip((ours, plain), kept):
            for name, p in net.named_parameters():
                p.data = backup[name]
    assert_close(ours, plain)


@pytest.mark.parametrize("edit", ["unfrozen", "hook on a parameter"])
def test_what_has_accumulated_survives_edits(devices: Devices, edit: str) -> None:
    used = devices(2)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(6, ignore=False)]
    step = everygpu.TrainStep(
        everygpu.DataParallel(ours, used), F.cross_entropy, OPTIMIZERS["AdamW"](ours.parameters()), accumulate=3
    )
    optimizer = OPTIMIZERS["AdamW"](plain.parameters())
    for i, (x, y) in enumerate(data):
        step(x, y)
        if i % 3 == 0:
            optimizer.zero_grad()
            EDITS[edit](ours)
            step.evaluate(x, y)
        unit = 3 * len(data[0][1])  # what hooks see is in it
        (F.cross_entropy(plain(x), y) * len(y) / unit).backward()
        if i % 3 == 0:
            EDITS[edit](plain)
        if i % 3 == 2:
            for p in plain.parameters():
                p.grad = None if p.grad is None else p.grad * (unit / sum(len(y) for _, y in data[i - 2 : i + 1]))
            optimizer.step()
    assert_close(ours, plain)


def test_a_group_added_while_gradients_accumulate_brings_its_own(devices: Devices) -> None:
    used = devices(2)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(2, ignore=False)]
    optimizers = [torch.optim.AdamW(net.first.parameters(), lr=0.01) for net in (ours, plain)]
    step = everygpu.TrainStep(everygpu.DataParallel(ours, used), F.cross_entropy, optimizers[0], accumulate=2)
    for i, (x, y) in enumerate(data):
        step(x, y)
        (F.cross_entropy(plain(x), y) * len(y) / sum(len(y) for _, y in data)).backward()
        if i == 0:
            for net, optimizer in zip((ours, plain), optimizers):
                optimizer.add_param_group({"params": net.last.parameters()})
    optimizers[1].step()
    assert_close(ours, plain)


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

    used = devices(3)
    plain, ours = Normalising().to(used[0]), Normalising().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(8)]
    step = everygpu.TrainStep(
        everygpu.DataParallel(ours, used), F.cross_entropy, OPTIMIZERS["AdamW"](ours.parameters())
    )
    losses = [step(*batch).item() for batch in data]
    expected, _ = train_plainly(plain, OPTIMIZERS["AdamW"](plain.parameters()), data)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close(ours, plain)
    assert_replicas_bit_equal(step)


def test_evaluation_in_inference_mode_may_come_first_after_an_edit(devices: Devices) -> None:
    used = devices(2)
    net = Net().to(used[0])
    step = everygpu.TrainStep(everygpu.DataParallel(net, used), F.cross_entropy, torch.optim.SGD(net.parameters()))
    x, y = (t.to(used[0]) for t in next(batches(1)))
    net.frozen.requires_grad_()
    with torch.inference_mode():
        step.evaluate(x, y)
    step(x, y)


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

    used = devices(3)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(8)]
    grads: dict[str, list[Tensor]] = {"ours": [], "plain": []}
    for name, net in (("ours", ours), ("plain", plain)):
        seen = grads[name]
        if kind == "tensor":
            net.first.weight.register_hook(lambda g, seen=seen: seen.append(g.clone()) or g.clamp(-0.01, 0.01))
        else:
            net.first.weight.register_post_accumulate_grad_hook(functools.partial(note, seen))
    step = everygpu.TrainStep(
        everygpu.DataParallel(ours, used),
        F.cross_entropy,
        OPTIMIZERS["AdamW"](ours.parameters()),
        accumulate=accumulate,
    )
    for batch in data:
        step(*batch)
    train_plainly(plain, OPTIMIZERS["AdamW"](plain.parameters()), data, accumulate=accumulate)
    assert len(grads["ours"]) == len(data)
    torch.testing.assert_close(grads["ours"], grads["plain"], rtol=1e-4, atol=1e-6)
    assert_close(ours, plain)


def test_hooks_of_a_parameter_that_takes_no_part_are_not_called(devices: Devices) -> None:
    used = devices(2)
    net = Net().to(used[0])
    step = everygpu.TrainStep(everygpu.DataParallel(net, used), F.cross_entropy, torch.optim.AdamW(net.parameters()))
    called: list[Any] = []
    net.unused.register_hook(called.append)
    net.unused.register_post_accumulate_grad_hook(called.append)
    before = net.unused.detach().clone()
    step(*(t.to(used[0]) for t in next(batches(1))))
    assert not called
    assert net.unused.equal(before)


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
    used = devices(3)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(8)]
    optimizer, reference = OPTIMIZERS["SGD"](ours.parameters()), OPTIMIZERS["SGD"](plain.parameters())
    sharded = everygpu.ShardedOptimizer(optimizer, used)
    hooked = sharded if place == "sharded" else optimizer
    sums: list[list[float]] = [[], []]
    for net, o, seen in ((ours, hooked, sums[0]), (plain, reference, sums[1])):
        OPTIMIZER_HOOKS[hook](net, o)
        o.register_step_post_hook(
            lambda *_, net=net, seen=seen: seen.append(sum(p.detach().double().sum().item() for p in net.parameters()))
        )
    model = everygpu.DataParallel(ours, used)
    if way == "step":
        step = everygpu.TrainStep(model, F.cross_entropy, sharded)
        for batch in data:
            step(*batch)
        assert all(p.grad is None for p in ours.parameters())
    else:
        train_plainly(model, sharded, data)
    train_plainly(plain, reference, data)
    assert_close(ours, plain)
    assert sums[0] == pytest.approx(sums[1], rel=1e-4)


def test_a_failing_hook_leaves_replicas_equal(devices: Devices) -> None:
    used = devices(3)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(4)]

    def fail(*_: Any) -> None:
        raise ArithmeticError("broken")

    optimizer, reference = OPTIMIZERS["SGD"](ours.parameters()), OPTIMIZERS["SGD"](plain.parameters())
    step = everygpu.TrainStep(everygpu.DataParallel(ours, used), F.cross_entropy, optimizer)
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        handles = [getattr(o, register)(fail) for o in (optimizer, reference)]
        with pytest.raises(ArithmeticError, match="broken"):
            step(*data[0])
        with pytest.raises(ArithmeticError, match="broken"):
            train_plainly(plain, reference, data[:1])
        assert_replicas_bit_equal(step)
        for handle in handles:
            handle.remove()
        step(*data[1])
        train_plainly(plain, reference, data[1:2])
        assert_close(ours, plain)


def test_refresh_sends_what_torch_does_not_count(devices: Devices) -> None:
    used = devices(2)
    net = Net().to(used[0])
    step = everygpu.TrainStep(everygpu.DataParallel(net, used), F.cross_entropy, torch.optim.SGD(net.parameters()))
    x, y = next(batches(1))
    step(x.to(used[0]), y)
    net.first.weight.data.zero_()
    net.frozen.data.zero_()
    step.refresh()
    assert_replicas_bit_equal(step)
    torch.testing.assert_close(
        everygpu.gather(step.evaluate(x.to(used[0]), y).output), net.last.bias.detach().expand(12, 5)
    )


def test_schedulers_take_effect_at_the_next_step(devices: Devices) -> None:
    used = devices(2)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(9)]
    optimizer, reference = OPTIMIZERS["SGD"](ours.parameters()), OPTIMIZERS["SGD"](plain.parameters())
    step = everygpu.TrainStep(everygpu.DataParallel(ours, used), F.cross_entropy, optimizer)
    schedulers = [lr_scheduler.OneCycleLR(o, 0.3, total_steps=20) for o in (optimizer, reference)]
    for batch in data:
        step(*batch)
        train_plainly(plain, reference, [batch])
        for scheduler in schedulers:
            scheduler.step()
    assert_close(ours, plain)


def test_groups_added_later(devices: Devices) -> None:
    used = devices(2)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(8)]
    optimizers = [torch.optim.AdamW(net.first.parameters(), lr=0.01) for net in (ours, plain)]
    step = everygpu.TrainStep(everygpu.DataParallel(ours, used), F.cross_entropy, optimizers[0])
    for i, batch in enumerate(data):
        if i == 4:
            for net, optimizer in zip((ours, plain), optimizers):
                optimizer.add_param_group({"params": net.last.parameters(), "lr": 0.1})
        step(*batch)
        train_plainly(plain, optimizers[1], [batch])
    assert_close(ours, plain)
