"""One call trains as a plain loop on one device does."""

import copy
import functools
import logging
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import everygpu
from everygpu.errors import EveryGPUError, LossError, OptimizerError, OptionError, PlacementError

Devices = Callable[[int], list[torch.device]]
Batch = tuple[Tensor, Tensor]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
}


class Net(nn.Module):
    """Classifies; with a buffer that changes, a frozen weight and one that takes no part."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 16)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(16, 5)
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.dropout(self.norm(self.first(x))).tanh() * self.frozen)


def batches(num: int, sizes: tuple[int, ...] = (12, 7, 3, 1), *, ignore: bool = True) -> Iterator[Batch]:
    """Batches of uneven sizes; some targets are to be ignored."""
    generator = torch.Generator().manual_seed(1)
    for i in range(num):
        rows = sizes[i % len(sizes)]
        y = torch.randint(0, 5, (rows,), generator=generator)
        if ignore and rows > 2:
            y[: rows // 3] = -100
        yield torch.randn(rows, 6, generator=generator), y


def train_plainly(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[Batch],
    loss_of: Callable[..., Tensor] = F.cross_entropy,
    *,
    clip_norm: float | None = None,
    accumulate: int = 1,
) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for i, (x, y) in enumerate(data):
        if i % accumulate == 0:
            optimizer.zero_grad()
        loss = loss_of(net(x), y)
        (loss / accumulate).backward()
        losses.append(loss.item())
        if i % accumulate == accumulate - 1:
            if clip_norm is not None:
                norms.append(nn.utils.clip_grad_norm_(net.parameters(), clip_norm).item())
            optimizer.step()
    return losses, norms


def assert_close(ours: nn.Module, plain: nn.Module, rtol: float = 1e-5) -> None:
    expected = plain.state_dict()
    for name, value in ours.state_dict().items():
        if name != "calls":
            scale = expected[name].abs().max().item()
            torch.testing.assert_close(value.cpu(), expected[name].cpu(), rtol=rtol, atol=rtol * scale, msg=name)


def assert_replicas_bit_equal(step: everygpu.TrainStep) -> None:
    flat_params = step._strategy._flat_params
    for first, *others in flat_params.values:
        assert all(other.cpu().view(torch.uint8).equal(first.cpu().view(torch.uint8)) for other in others)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_equals_a_plain_loop_on_one_device(
    devices: Devices, name: str, count: int, clip_norm: float | None
) -> None:  # fmt: skip
    used = devices(count)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(50)]
    optimizer = OPTIMIZERS[name](ours.parameters())
    step = everygpu.TrainStep(
        everygpu.DataParallel(ours, used), nn.CrossEntropyLoss(), optimizer, clip_norm=clip_norm
    )  # fmt: skip
    norms = []
    losses = []
    for x, y in data:
        losses.append(step(x, y).item())
        norms.append(step.stats().grad_norm)
    reference = OPTIMIZERS[name](plain.parameters())
    expected, expected_norms = train_plainly(plain, reference, data, clip_norm=clip_norm)
    assert losses == pytest.approx(expected, rel=1e-5, abs=1e-6)
    if clip_norm is not None:
        assert norms == pytest.approx(expected_norms, rel=1e-5)
    assert_close(ours, plain)
    if count > 1:
        assert_replicas_bit_equal(step)
    ours_state, plain_state = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert ours_state.keys() == plain_state.keys(), "a parameter without a gradient has no state"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_accumulation_equals_a_plain_loop(devices: Devices, count: int) -> None:
    used = devices(count)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(24)]
    step = everygpu.TrainStep(
        everygpu.DataParallel(ours, used),
        nn.CrossEntropyLoss(),
        OPTIMIZERS["AdamW"](ours.parameters()),
        accumulate=3,
        clip_norm=1.0,
    )
    losses = [step(x, y).item() for x, y in data]
    expected, _ = train_plainly(plain, OPTIMIZERS["AdamW"](plain.parameters()), data, clip_norm=1.0, accumulate=3)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close(ours, plain)
    assert step.stats().num_steps == 8


def test_flush_updates_with_the_mean_of_what_was_seen(devices: Devices) -> None:
    used = devices(2)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(2)]
    make = OPTIMIZERS["SGD"]
    step = everygpu.TrainStep(
        everygpu.DataParallel(ours, used), F.cross_entropy, make(ours.parameters()), accumulate=5
    )  # fmt: skip
    for x, y in data:
        step(x, y)
    step.flush()
    step.flush()
    train_plainly(plain, make(plain.parameters()), data, accumulate=2)
    assert_close(ours, plain)
    assert step.stats().num_steps == 1


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=-100),
        lambda out, y: F.cross_entropy(out, y) + 0.1 * out.square().mean() + 0.01 * out.abs().sum(),
        lambda out, y: F.nll_loss(out.log_softmax(-1), y),
        lambda out, y: (out[y >= 0].logsumexp(1) - out[y >= 0, y[y >= 0]]).mean(),
    ],
)
def test_any_loss_is_exact_for_uneven_shards(loss: Callable[..., Tensor]) -> None:
    plain, ours = Net(), Net()
    data = list(batches(8, (12, 7, 4)))
    step = everygpu.TrainStep(
        everygpu.DataParallel(ours, ["cpu"] * 3), loss, torch.optim.SGD(ours.parameters(), lr=0.01)
    )  # fmt: skip
    losses = [step(x, y).item() for x, y in data]
    expected, _ = train_plainly(plain, torch.optim.SGD(plain.parameters(), lr=0.01), data, loss)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close(ours, plain)


# What it is called with.


class ModelOutput(OrderedDict):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class Knowing(nn.Module):
    """Returns its loss, in one of the usual ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.net = Net()
        self.way = way

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = self.net(x)
        loss = F.mse_loss(out, F.one_hot(y, 5).float())
        return {"number": loss, "vector": loss[None], "matrix": loss[None, None],
                "vector in dict": {"loss": loss[None]},
                "dict": {"loss": loss, "out": out}, "tuple": (loss, out),
                "output": ModelOutput(loss=loss, logits=out)}[self.way]  # fmt: skip


@pytest.mark.parametrize("way", ["number", "vector", "matrix", "vector in dict", "dict", "tuple", "output"])
@pytest.mark.parametrize("call", ["positional", "tuple", "dict", "UserDict", "keywords"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_model_that_returns_its_loss(devices: Devices, way: str, call: str, count: int) -> None:
    used = devices(count)
    plain, ours = Knowing(way).to(used[0]), Knowing(way).to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(6, ignore=False)]
    step = everygpu.TrainStep(
        everygpu.DataParallel(ours, used), None, torch.optim.SGD(ours.parameters(), lr=0.1)
    )  # fmt: skip
    calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "positional": lambda x, y: step(x, y),
        "tuple": lambda x, y: step((x, y)),
        "dict": lambda x, y: step({"x": x, "y": y}),
        "UserDict": lambda x, y: step(UserDict(x=x, y=y)),
        "keywords": lambda x, y: step(x, y=y),
    }
    losses = [calls[call](x, y).item() for x, y in data]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected, _ = train_plainly(
        plain.net, optimizer, data, lambda out, y: F.mse_loss(out, F.one_hot(y, 5).float())
    )  # fmt: skip
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close(ours, plain)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [2, 3, 5])
def test_a_model_that_returns_one_number_of_shape_1(devices: Devices, count: int, num_rows: int) -> None:
    used = devices(count)
    ours = Knowing("vector").to(used[0])
    plain = copy.deepcopy(ours)
    step = everygpu.TrainStep(everygpu.DataParallel(ours, used), None, torch.optim.SGD(ours.parameters(), lr=0.1))
    x, y = next(batches(1, ignore=False))
    x, y = x[:num_rows].to(used[0]), y[:num_rows].to(used[0])
    expected = plain.eval()(x, y).item()
    assert step.evaluate(x, y).loss.item() == pytest.approx(expected, rel=1e-5)
    (expected,), _ = train_plainly(
        plain.train().net, torch.optim.SGD(plain.parameters(), lr=0.1), [(x, y)],
        lambda out, y: F.mse_loss(out, F.one_hot(y, 5).float()),
    )  # fmt: skip
    assert step(x, y).item() == pytest.approx(expected, rel=1e-5)
    assert_close(ours, plain)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    "take", [lambda loss: loss, lambda loss: loss.mean(1).flatten(), lambda loss: loss.mean(1)[:2]]
)
def test_a_model_that_returns_more_than_one_number(devices: Devices, count: int, take: Any) -> None:
    class Unreduced(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return take(F.mse_loss(super().forward(x), F.one_hot(y, 5).float(), reduction="none"))

    used = devices(count)
    net = Unreduced().to(used[0])
    step = everygpu.TrainStep(everygpu.DataParallel(net, used), None, torch.optim.SGD(net.parameters()))
    with pytest.raises(LossError, match="one number, got shape"):
        step(*next(batches(1, ignore=False)))


def test_a_loss_that_is_not_reduced_is_no_number_of_one_row_each(devices: Devices) -> None:
    used = devices(2)
    net = Net().to(used[0])
    step = everygpu.TrainStep(
        everygpu.DataParallel(net, used), lambda out, y: F.cross_entropy(out, y, reduction="none"),
        torch.optim.SGD(net.parameters()),
    )  # fmt: skip
    x, y = next(batches(1, ignore=False))
    with pytest.raises(LossError, match=r"one number, got shape \(2,\)"):
        step(x[:2], y[:2])


def test_nested_batches_and_sharded_targets(devices: Devices) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, pair: dict[str, Tensor], *, scale: float) -> dict[str, Tensor]:
            return {"a": self.net(pair["a"]) * scale, "b": self.net(pair["b"])}

    used = devices(2)
    ours, plain = Two().to(used[0]), Two().to(used[0])

    def loss(out: dict[str, Tensor], y: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(out["a"], y["a"]) + F.cross_entropy(out["b"], y["b"])

    step = everygpu.TrainStep(everygpu.DataParallel(ours, used), loss, torch.optim.SGD(ours.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in batches(4):
        pair = {"a": x.to(used[0]), "b": x.to(used[0]) + 1}
        # The loss puts targets from the CPU where the output is.
        got = step((pair,), {"a": y, "b": y}, scale=2.0)
        optimizer.zero_grad()
        on = y.to(used[0])
        expected = loss(plain(pair, scale=2.0), {"a": on, "b": on})
        expected.backward()
        optimizer.step()
        assert got.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_close(ours, plain)


def test_a_bare_module_runs_on_every_device() -> None:
    net = Net()
    step = everygpu.TrainStep(net, F.cross_entropy, torch.optim.SGD(net.parameters(), lr=0.1))
    x, y = next(batches(1))
    assert step(x.to(step.model.device_ids[0]), y).ndim == 0
    assert step.model.module is net


# State that is written between steps.


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
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(6)]
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
        (F.cross_entropy(plain(x), y) / 3).backward()
        if i % 3 == 0:
            EDITS[edit](plain)
        if i % 3 == 2:
            optimizer.step()
    assert_close(ours, plain)


def test_a_group_added_while_gradients_accumulate_brings_its_own(devices: Devices) -> None:
    used = devices(2)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(2)]
    optimizers = [torch.optim.AdamW(net.first.parameters(), lr=0.01) for net in (ours, plain)]
    step = everygpu.TrainStep(everygpu.DataParallel(ours, used), F.cross_entropy, optimizers[0], accumulate=2)
    for i, (x, y) in enumerate(data):
        step(x, y)
        (F.cross_entropy(plain(x), y) / 2).backward()
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


def test_saved_and_resumed_elsewhere(devices: Devices, tmp_path: Any) -> None:
    used = devices(3)
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(10)]
    whole, first = Net().to(used[0]), Net().to(used[0])
    make = OPTIMIZERS["AdamW"]
    unbroken = everygpu.TrainStep(everygpu.DataParallel(whole, used), F.cross_entropy, make(whole.parameters()))
    expected = [unbroken(*batch).item() for batch in data]

    optimizer = make(first.parameters())
    step = everygpu.TrainStep(everygpu.DataParallel(first, used), F.cross_entropy, optimizer)
    losses = [step(*batch).item() for batch in data[:5]]
    everygpu.save(tmp_path / "c", model=step.model, optimizer=optimizer, step=step)

    again = Net().to(used[0])
    optimizer = make(again.parameters())
    step = everygpu.TrainStep(everygpu.DataParallel(again, used[:2]), F.cross_entropy, optimizer)
    everygpu.load(tmp_path / "c", model=step.model, optimizer=optimizer, step=step)
    losses += [step(*batch).item() for batch in data[5:]]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert step.stats().num_steps == 10


def test_a_new_step_takes_the_optimizer_over(devices: Devices) -> None:
    used = devices(2)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(6)]
    optimizer, reference = OPTIMIZERS["AdamW"](ours.parameters()), OPTIMIZERS["AdamW"](plain.parameters())
    for part in (data[:3], data[3:]):
        step = everygpu.TrainStep(everygpu.DataParallel(ours, used), F.cross_entropy, optimizer)
        for batch in part:
            step(*batch)
    train_plainly(plain, reference, data)
    assert_close(ours, plain)


def test_two_steps_with_one_optimizer(devices: Devices) -> None:
    used = devices(2)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(8)]
    optimizer, reference = OPTIMIZERS["AdamW"](ours.parameters()), OPTIMIZERS["AdamW"](plain.parameters())
    losses = [F.cross_entropy, lambda out, y: out.square().mean()]
    model = everygpu.DataParallel(ours, used)
    steps = [everygpu.TrainStep(model, loss, optimizer) for loss in losses]
    for i, batch in enumerate(data):
        steps[i % 2](*batch)
        train_plainly(plain, reference, [batch], losses[i % 2])
    assert_close(ours, plain)


def test_after_an_ordinary_loop_with_the_stock_optimizer(devices: Devices) -> None:
    used = devices(2)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(9)]
    optimizer = OPTIMIZERS["AdamW"](ours.parameters())
    step = everygpu.TrainStep(everygpu.DataParallel(ours, used), F.cross_entropy, optimizer)
    for i, batch in enumerate(data):
        if i % 3 == 1:
            train_plainly(ours, optimizer, [batch])
        else:
            step(*batch)
    train_plainly(plain, OPTIMIZERS["AdamW"](plain.parameters()), data)
    assert_close(ours, plain)


def test_mixed_with_an_ordinary_loop(devices: Devices) -> None:
    used = devices(2)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(9)]
    sharded = everygpu.ShardedOptimizer(OPTIMIZERS["AdamW"](ours.parameters()), used)
    model = everygpu.DataParallel(ours, used)
    step = everygpu.TrainStep(model, F.cross_entropy, sharded)
    for i, batch in enumerate(data):
        if i % 3 == 1:
            train_plainly(model, sharded, [batch])
        else:
            step(*batch)
    train_plainly(plain, OPTIMIZERS["AdamW"](plain.parameters()), data)
    assert_close(ours, plain)


# Precision.


def test_bf16_is_as_good_as_plain_bf16(devices: Devices) -> None:
    used = devices(3)
    plain, exact, ours = (Net().to(used[0]) for _ in range(3))
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(20)]
    seen: set[torch.dtype] = set()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        seen.add(out.dtype)
        return F.cross_entropy(out, y)

    step = everygpu.TrainStep(
        everygpu.DataParallel(ours, used), loss, OPTIMIZERS["SGD"](ours.parameters()), precision="bf16"
    )
    losses = [step(*batch).item() for batch in data]
    assert seen == {torch.bfloat16}
    assert all(p.dtype is torch.float32 for p in ours.parameters())
    with torch.autocast(used[0].type, torch.bfloat16):
        rough, _ = train_plainly(plain, OPTIMIZERS["SGD"](plain.parameters()), data)
    fine, _ = train_plainly(exact, OPTIMIZERS["SGD"](exact.parameters()), data)
    spread = max(abs(a - b) for a, b in zip(rough, fine))
    assert 0 < max(abs(a - b) for a, b in zip(losses, fine)) <= 3 * spread


class InBfloat16(nn.Module):
    """All of it in bfloat16, but for a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net().bfloat16()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.to(self.net.frozen.dtype)).float() * self.scale


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_parameters_in_bf16_are_as_good_as_plain_bf16(
    devices: Devices, name: str, count: int, clip_norm: float | None
) -> None:
    used = devices(count)
    plain, exact, ours = (InBfloat16().to(used[0]) for _ in range(3))
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(40, (12,))]
    optimizer = OPTIMIZERS[name](ours.parameters())
    step = everygpu.TrainStep(
        everygpu.DataParallel(ours, used), nn.CrossEntropyLoss(), optimizer, clip_norm=clip_norm
    )  # fmt: skip
    losses = [step(*batch).item() for batch in data]
    reference = OPTIMIZERS[name](plain.parameters())
    rough, _ = train_plainly(plain, reference, data, clip_norm=clip_norm)
    fine, _ = train_plainly(exact.float(), OPTIMIZERS[name](exact.parameters()), data, clip_norm=clip_norm)
    spread = max(abs(a - b) for a, b in zip(rough, fine))
    assert 0 < max(abs(a - b) for a, b in zip(losses, fine)) <= 2 * spread
    if count > 1:
        assert_replicas_bit_equal(step)
    kept, expected = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert {i: {k: v.dtype for k, v in s.items()} for i, s in kept.items()} == {
        i: {k: v.dtype for k, v in s.items()} for i, s in expected.items()
    }
    reference.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", ["AdamW-fused", "AdamW", "RMSprop"])
@pytest.mark.parametrize("count", [1, 2])
def test_fp16_skips_updates_that_are_not_finite(devices: Devices, name: str, count: int) -> None:
    used = devices(count)
    makers: dict[str, Any] = {
        "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
        "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    }
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(12)]
    data[3] = (torch.full_like(data[3][0], float("inf")), data[3][1])
    optimizer = makers[name](ours.parameters())
    step = everygpu.TrainStep(everygpu.DataParallel(ours, used), F.cross_entropy, optimizer, precision="fp16")
    losses = [step(*batch).item() for batch in data]

    reference = makers[name](plain.parameters())
    scaler = torch.amp.GradScaler(used[0].type)
    expected = []
    for x, y in data:
        reference.zero_grad()
        with torch.autocast(used[0].type, torch.float16):
            loss = F.cross_entropy(plain(x), y)
        scaler.scale(loss).backward()
        scaler.step(reference)
        scaler.update()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=2e-2, abs=2e-3, nan_ok=True)
    assert_close(ours, plain, rtol=2e-2)
    assert step.stats().num_skipped >= 1
    assert step.state_dict()["scale"]["scale"] == scaler.get_scale()


@pytest.mark.parametrize("count", [1, 2])
def test_fp16_whatever_the_default_dtype(count: int) -> None:
    net = Net()
    x, y = next(batches(1))
    torch.set_default_dtype(torch.float64)
    try:
        model = everygpu.DataParallel(net, ["cpu"] * count)
        step = everygpu.TrainStep(
            model, F.cross_entropy, torch.optim.SGD(net.parameters()), precision="fp16", clip_norm=1.0
        )
        assert step(x, y).isfinite()
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_scale_is_saved_and_loaded() -> None:
    net = Net()
    make = lambda: everygpu.TrainStep(  # noqa: E731
        everygpu.DataParallel(net, ["cpu"] * 2),
        F.cross_entropy,
        torch.optim.SGD(net.parameters(), lr=0.01),
        precision="fp16",
    )
    first, second = make(), make()
    x, y = next(batches(1))
    first(torch.full_like(x, float("nan")), y)
    state = copy.deepcopy(first.state_dict())
    assert state["scale"]["scale"] == 2.0**15
    assert state["num_skipped"] == 1
    second.load_state_dict(state)
    assert second.state_dict() == state
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(state["scale"])
    assert scaler.get_scale() == 2.0**15


# Randomness, checkpointing, evaluation, figures.


def test_dropout_is_reproducible_and_differs_between_replicas(devices: Devices) -> None:
    used = devices(2)

    def run() -> tuple[list[float], list[Tensor]]:
        everygpu.seed_all(3)
        net = Net(dropout=0.5).to(used[0])
        masks: list[Tensor] = []
        step = everygpu.TrainStep(
            everygpu.DataParallel(net, used),
            lambda out, y: masks.append(everygpu.gather(out).detach()) or F.cross_entropy(out, y),
            torch.optim.SGD(net.parameters(), lr=0.1),
        )
        row = torch.ones(8, 6, device=used[0])
        return [step(row, torch.arange(8, device=used[0]) % 5).item() for _ in range(4)], masks

    everygpu.seed_all(3)
    first, masks = run()
    second, again = run()
    assert first == second
    assert all(a.equal(b) for a, b in zip(masks, again))
    assert not masks[0][0].equal(masks[0][4])


def test_activation_checkpointing(devices: Devices) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    used = devices(3)
    plain, ours = Net().to(used[0]), Checkpointed().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(10)]
    step = everygpu.TrainStep(everygpu.DataParallel(ours, used), F.cross_entropy, OPTIMIZERS["SGD"](ours.parameters()))
    losses = [step(*batch).item() for batch in data]
    expected, _ = train_plainly(plain, OPTIMIZERS["SGD"](plain.parameters()), data)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close(ours, plain)


def test_recurrent_and_tied_weights(devices: Devices) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(5, 8)
            self.lstm = nn.LSTM(8, 8, batch_first=True)
            self.head = nn.Linear(8, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(self.embed(x))[0][:, -1])

    used = devices(2)
    plain, ours = Tied().to(used[0]), Tied().to(used[0])
    data = [(torch.randint(0, 5, (6, 4), device=used[0]), torch.arange(6, device=used[0]) % 5) for _ in range(10)]
    step = everygpu.TrainStep(
        everygpu.DataParallel(ours, used), F.cross_entropy, OPTIMIZERS["AdamW"](ours.parameters())
    )
    losses = [step(*batch).item() for batch in data]
    expected, _ = train_plainly(plain, OPTIMIZERS["AdamW"](plain.parameters()), data)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert ours.head.weight is ours.embed.weight
    assert_close(ours, plain, rtol=1e-4)


def test_evaluate_leaves_everything_as_it_was(devices: Devices) -> None:
    used = devices(2)
    net = Net(dropout=0.5).to(used[0])
    net.norm.eval()
    step = everygpu.TrainStep(everygpu.DataParallel(net, used), F.cross_entropy, torch.optim.SGD(net.parameters()))
    x, y = (t.to(used[0]) for t in next(batches(1)))
    step(x, y)
    before = {k: v.clone() for k, v in net.state_dict().items() if k != "calls"}
    loss, output = step.evaluate(x, y)
    assert not loss.requires_grad
    assert isinstance(output, everygpu.ShardedBatch)
    assert net.dropout.training
    assert not net.norm.training
    net.eval()
    torch.testing.assert_close(loss, F.cross_entropy(net(x), y))
    torch.testing.assert_close(everygpu.gather(output), net(x).detach())
    assert all(before[k].equal(v) for k, v in net.state_dict().items() if k != "calls")


def test_figures(devices: Devices) -> None:
    used = devices(2)
    net = Net().to(used[0])
    step = everygpu.TrainStep(
        everygpu.DataParallel(net, used), F.cross_entropy, torch.optim.SGD(net.parameters()), clip_norm=1.0
    )
    x, y = next(batches(1))
    loss = step(x.to(used[0]), y)
    figures = step.stats()
    assert figures.loss == loss.item()
    assert figures.grad_norm > 0
    assert (figures.num_steps, figures.num_skipped) == (1, 0)
    assert list(figures.phase_s) == ["forward", "backward", "reduce", "update"]
    assert all(0 < seconds < 60 for seconds in figures.phase_s.values())


def test_gradients_are_not_left_for_the_user_to_mistake(devices: Devices) -> None:
    used = devices(2)
    net = Net().to(used[0])
    step = everygpu.TrainStep(everygpu.DataParallel(net, used), F.cross_entropy, torch.optim.SGD(net.parameters()))
    x, y = next(batches(1))
    step(x.to(used[0]), y)
    assert all(p.grad is None for p in net.parameters())


def test_an_old_graph_notices_the_update(devices: Devices) -> None:
    used = devices(2)
    net = Net().to(used[0])
    step = everygpu.TrainStep(everygpu.DataParallel(net, used), F.cross_entropy, torch.optim.SGD(net.parameters()))
    x, y = next(batches(1))
    old = net(x.to(used[0]).requires_grad_()).sum()
    step(x.to(used[0]), y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


# Failures.


def test_a_failure_loses_nothing(devices: Devices) -> None:
    used = devices(3)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(6)]
    optimizer = OPTIMIZERS["AdamW"](ours.parameters())
    step = everygpu.TrainStep(everygpu.DataParallel(ours, used), F.cross_entropy, optimizer)
    reference = OPTIMIZERS["AdamW"](plain.parameters())
    for i, batch in enumerate(data):
        step(*batch)
        train_plainly(plain, reference, [batch])
        if i % 2:
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                step(torch.randn(9, 4, device=used[0]), torch.zeros(9, dtype=torch.int64, device=used[0]))
    assert_close(ours, plain)


def test_a_failing_backward_loses_nothing(devices: Devices) -> None:
    class Breaking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ArithmeticError("broken")

    used = devices(2)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(4)]
    broken = [False]

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(Breaking.apply(out) + out if broken[0] else out, y)

    step = everygpu.TrainStep(everygpu.DataParallel(ours, used), loss, OPTIMIZERS["AdamW"](ours.parameters()))
    reference = OPTIMIZERS["AdamW"](plain.parameters())
    for batch in data:
        broken[0] = True
        with pytest.raises(ArithmeticError, match="broken"):
            step(*batch)
        broken[0] = False
        step(*batch)
    train_plainly(plain, reference, data)
    assert_close(ours, plain)


def test_optimizers_that_cannot_be_spread_step_on_the_first_device(
    devices: Devices, caplog: pytest.LogCaptureFixture
) -> None:
    class Mine(torch.optim.Adam):
        pass

    used = devices(2)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(8)]
    with caplog.at_level(logging.INFO, "everygpu"):
        model = everygpu.DataParallel(ours, used, engine="threads")
        step = everygpu.TrainStep(
            model, F.cross_entropy, Mine(ours.parameters()), clip_norm=1.0, accumulate=2, capture=False
        )
    assert caplog.messages == [f"TrainStep: Mine can't be spread; it steps on {used[0]}."]
    for batch in data:
        step(*batch)
    train_plainly(plain, Mine(plain.parameters()), data, clip_norm=1.0, accumulate=2)
    assert_close(ours, plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp64"}, "precision must be one of"),
        ({"accumulate": 0}, "accumulate must be a whole number of 1 or more, got 0"),
        ({"accumulate": 1.5}, "accumulate"),
        ({"clip_norm": 0}, "clip_norm must be a number above 0"),
        ({"loss": 3}, "loss must be callable"),
        ({"compile": True}, "engine='compile'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    net = Net()
    everything = {"loss": F.cross_entropy, **options}
    with pytest.raises(OptionError, match=f"TrainStep: .*{message}"):
        everygpu.TrainStep(
            everygpu.DataParallel(net, ["cpu"]), optimizer=torch.optim.SGD(net.parameters()), **everything
        )


def test_bad_optimizers() -> None:
    net = Net()
    with pytest.raises(OptimizerError, match="without a closure, got LBFGS"):
        everygpu.TrainStep(net, F.cross_entropy, torch.optim.LBFGS(net.parameters()))
    with pytest.raises(OptimizerError, match="needs a torch optimizer"):
        everygpu.TrainStep(net, F.cross_entropy, net.parameters())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out, y: F.cross_entropy(out, y, reduction="none"), r"one number, got shape \(12,\).*reduction='mean'"),
        (lambda out, y: 1.0, "must be a tensor, got float"),
        (None, r"under \['loss'\] or as .loss, got list"),
    ],
)
def test_losses_that_are_no_number(loss: Any, message: str) -> None:
    class Listing(Net):
        def forward(self, x: Tensor, *_: Tensor) -> Any:
            out = super().forward(x)
            return [out] if loss is None else out

    net = Listing()
    step = everygpu.TrainStep(everygpu.DataParallel(net, ["cpu"] * 2), loss, torch.optim.SGD(net.parameters()))
    with pytest.raises(LossError, match=f"TrainStep: .*{message}"):
        step(*next(batches(1)))


def test_gradients_of_parameters_within_a_loss(devices: Devices) -> None:
    """The loss would get those of the first replica."""
    used = devices(2)

    def make(net: Net, way: str) -> Callable[..., Tensor]:
        def loss(out: Tensor, y: Tensor) -> Tensor:
            value = F.cross_entropy(out, y)
            if way == "backward":
                value.backward(retain_graph=True)
                return value
            of = net.last.weight if way == "parameter" else out
            (grad,) = torch.autograd.grad(value, of, create_graph=True)
            return value + grad.square().sum()

        return loss

    x, y = (t.to(used[0]) for t in next(batches(1)))
    for way in ("output", "parameter", "backward"):
        plain, ours = Net().to(used[0]), Net().to(used[0])
        step = everygpu.TrainStep(
            everygpu.DataParallel(ours, used), make(ours, way), torch.optim.SGD(ours.parameters(), lr=0.1)
        )
        if way == "parameter":
            with pytest.raises(LossError, match="can't ask for gradients with respect to the model's parameters"):
                step(x, y)
            continue
        step(x, y)
        train_plainly(plain, torch.optim.SGD(plain.parameters(), lr=0.1), [(x, y)], make(plain, way))
        assert_close(ours, plain)


def test_a_step_is_not_copied() -> None:
    net = Net()
    step = everygpu.TrainStep(net, F.cross_entropy, torch.optim.SGD(net.parameters()))
    with pytest.raises(EveryGPUError, match="Copy the model and the optimizer"):
        copy.deepcopy(step)


def test_parameters_elsewhere_are_refused() -> None:
    net = Net()
    stray = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.SGD([*net.parameters(), stray], lr=0.1)
    with pytest.raises(PlacementError, match=r"must be on cpu, got parameter \d+ of shape \(2,\) on meta"):
        everygpu.TrainStep(everygpu.DataParallel(net, ["cpu"] * 2), F.cross_entropy, optimizer)


def test_a_loss_with_parameters_of_its_own(devices: Devices) -> None:
    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(out * self.scale, y)

    used = devices(2)
    plain, ours = (nn.ModuleList([Net(), Weighed()]).to(used[0]) for _ in range(2))
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(8)]
    step = everygpu.TrainStep(
        everygpu.DataParallel(ours[0], used), ours[1], OPTIMIZERS["AdamW"](ours.parameters())
    )  # fmt: skip
    for batch in data:
        step(*batch)
    train_plainly(plain[0], OPTIMIZERS["AdamW"](plain.parameters()), data, plain[1])
    assert_close(ours, plain)


def test_a_models_own_loss_is_not_weighed_where_rows_are_unknown() -> None:
    net = Net()
    optimizer = OPTIMIZERS["SGD"](net.parameters())
    joined = everygpu.DataParallel(net, ["cpu"] * 2, gather="joined")
    with pytest.raises(OptionError, match="loss=None needs a DataParallel with gather='sharded'.*got gather='joined'"):
        everygpu.TrainStep(joined, None, optimizer)
    everygpu.TrainStep(joined, F.cross_entropy, optimizer)
    alone = Net()
    everygpu.TrainStep(
        everygpu.DataParallel(alone, ["cpu"], gather="joined"), None, OPTIMIZERS["SGD"](alone.parameters())
    )
