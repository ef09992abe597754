"""What changes between steps is seen by captured steps as by others."""

import copy
import logging
import math
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import everygpu
from everygpu.errors import CallError
from tests.step.scenarios import Devices, Step, X, Y, adamw, check, make_step, train_on
from tests.step.test_capture import Net, num_graphs, once


class TwoHeads(Net):
    """Trains one of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(16, 5)

    def forward(self, x: Tensor, head: str = "last") -> Tensor:
        h = self.norm(self.first(x)).tanh()
        return self.last(h) + self.other(h) if head == "both" else getattr(self, head)(h)


ONE_OF_TWO = ("other", "last") * 4 + ("other",) * 4
HEADS = ("both", "both", "both", "other", "both", "other", "both", "other", "both", "other", "other")


@pytest.mark.parametrize(
    ("options", "heads"),
    [({"accumulate": 2}, HEADS), ({"clip_norm": 1.0}, ONE_OF_TWO), ({}, HEADS), ({}, ONE_OF_TWO)],
    ids=["accumulated, one or both", "clipped, one of two", "one or both", "one of two"],
)
def test_what_takes_no_part_stays_as_it_is(capturing: Devices, options: dict[str, Any], heads: tuple[str]) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        losses += [step(X, Y, head=head) for head in heads]

    check(capturing, scenario, make=TwoHeads, **options)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}], ids=str)
def test_after_one_step_without_a_head_replays_go_on(capturing: Devices, options: dict[str, Any]) -> None:
    """Its step count is another one from then on: it is no longer updated as one with the others."""

    def scenario(step: Step, losses: list[Tensor]) -> None:
        losses.append(step(X, Y, head="other"))
        train_on(step, losses, 6, head="both")
        assert step._capture is None or step.stats().engine == "capture"

    check(capturing, scenario, make=TwoHeads, first=((X, Y), {"head": "both"}), **options)


def test_kinds_of_batches_that_train_other_parameters_are_captured(capturing: Devices) -> None:
    step = make_step(capturing(2), TwoHeads)
    for head in ("other", "last") * 6:
        step(X, Y, head=head)
    assert num_graphs(step) == 2


@pytest.mark.parametrize(("count", "clip_norm"), [(1, math.inf), (2, None)])
def test_a_norm_that_no_replay_computes_is_not_an_older_one(
    capturing: Devices, clip_norm: float | None, count: int
) -> None:
    norms = []
    for capture in (False, "auto"):
        torch.manual_seed(0)
        step = make_step(capturing(count), clip_norm=clip_norm, capture=capture)
        for _ in range(8):
            step(X, Y)
        norms.append(step.stats().grad_norm)
    assert step.stats().engine == "capture"
    assert norms[1] == pytest.approx(norms[0], rel=1e-4, nan_ok=True)
    assert math.isnan(norms[0]) == (clip_norm is None)


class Early(Net):
    """Has a first layer that takes part only at times, and gets its gradient last."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(6, 6)

    def forward(self, x: Tensor, early: bool = False) -> Tensor:
        return super().forward(self.early(x) if early else x)


def test_an_update_waits_for_a_gradient_that_the_step_before_did_not_have(capturing: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        losses += [step(X, Y, early=i % 2 == 0) for i in range(16)]
        assert step._capture is None or num_graphs(step) == 3

    check(capturing, scenario, make=Early)


@once
def test_a_method_that_is_overridden_later_is_no_part_of_the_capture(capturing: Devices) -> None:
    used = capturing(2)
    net = Net().to(used[0])
    model = everygpu.DataParallel(net, used)
    step = Step(model, F.cross_entropy, adamw(net))
    for _ in range(6):
        step(X, Y)
    assert num_graphs(step) == 1
    model.gather = model.gather
    with pytest.raises(CallError, match="gather of the DataParallel"):
        step(X, Y)


@once
@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_is_frozen_and_written_after_each_step_is_named(
    capturing: Devices, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    monkeypatch.setattr("everygpu.parallel.cuda_graphs.capture.MAX_ATTEMPTS", 2)
    net = Net().to(capturing(2)[0])
    step = Step(everygpu.DataParallel(net, capturing(2)), F.cross_entropy, adamw(net))
    caplog.set_level(logging.INFO, logger="everygpu")
    for _ in range(24 if is_replaced else 5):
        step(X, Y)
        if is_replaced:
            net.frozen.data = net.frozen.data * 0.9
        else:
            net.frozen.data.copy_(net.frozen.data * 0.9)
            torch.autograd.graph.increment_version(net.frozen)
    assert "frozen parameter frozen is written between steps" in caplog.text


class Focal:
    """A loss that is no module."""

    gamma = 1.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) * self.gamma


class Doubling(Net):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale if hasattr(self, "scale") else 2.0
        return self.last(self.norm(self.first(x)).tanh() * scale)


def write_uncounted(step: Step) -> None:
    step.model.module.frozen.data.mul_(0.5)
    step.refresh()


CHANGES: dict[str, tuple[dict[str, Any], list[Callable[[Any], Any]]]] = {
    "what is frozen": ({}, [lambda step: step.model.module.frozen.mul_(0.5), write_uncounted]),
    "the module": ({}, [lambda step: setattr(step.model, "module", nn.Sequential(step.model.module, nn.Tanh()))]),
    "the rule for buffers": ({}, [lambda step: setattr(step.model, "buffers_rule", "mean")]),
    "a loss object": ({"loss": Focal}, [lambda step: setattr(step.loss, "gamma", 3.0)]),
    "the loss": (
        {"loss": nn.CrossEntropyLoss},
        [
            lambda step: setattr(step, "loss", nn.CrossEntropyLoss(label_smoothing=0.1)),
            lambda step: setattr(step.loss, "label_smoothing", 0.5),
        ],
    ),
    "class and buffers": (
        {},
        [
            lambda step: setattr(step.model.module, "__class__", Doubling),
            lambda step: step.model.module.register_buffer("scale", step.model.module.frozen * 2),
            lambda step: setattr(step.model.module, "scale", step.model.module.scale * 2),
            lambda step: step.model.module.scale.mul_(0.5),
            lambda step: setattr(step.model.module.scale, "data", step.model.module.scale * 0.5),
        ],
    ),
}


@once
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_counts(capturing: Devices, name: str) -> None:
    options, changes = CHANGES[name]

    def scenario(step: Step, losses: list[Tensor]) -> None:
        for change in changes:
            with torch.no_grad():
                change(step)
            train_on(step, losses)

    loss = options.get("loss", F.cross_entropy)
    check(capturing, scenario, **{**options, "makes_loss": "loss" in options, "loss": loss})


@once
def test_modes_of_a_module_that_the_loss_uses(capturing: Devices) -> None:
    judge = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    judge.requires_grad_(False)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(judge(output), target)

    def scenario(step: Step, losses: list[Tensor]) -> None:
        judge.eval()
        train_on(step, losses)
        judge.load_state_dict({k: v * 0.5 for k, v in judge.state_dict().items()})
        train_on(step, losses)
        judge.train()
        judge.load_state_dict(start)

    start = copy.deepcopy(judge.state_dict())
    device = capturing(2)[0]
    judge.to(device)
    check(capturing, scenario, loss=loss)


@once
def test_hooks_on_all_modules(capturing: Devices) -> None:
    calls: list[int] = []

    def scenario(step: Step, losses: list[Tensor]) -> None:
        calls.clear()
        handle = nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
        train_on(step, losses, 8)
        handle.remove()
        assert len(calls) >= 8 * 2 * len(list(step.model.module.modules()))

    check(capturing, scenario)


class Counting(TorchFunctionMode):
    """Counts functions of torch."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is F.cross_entropy
        return func(*args, **(kwargs or {}))


@once
def test_modes_are_asked_at_every_step(capturing: Devices) -> None:
    mode = Counting()

    def scenario(step: Step, losses: list[Tensor]) -> None:
        before = mode.count
        with mode:
            train_on(step, losses, 8)
        assert mode.count == before + 8
        train_on(step, losses, 2)
        assert step._capture is None or num_graphs(step) == 1

    check(capturing, scenario)


@once
def test_saved_tensors_hooks_are_called(capturing: Devices) -> None:
    packed: list[int] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(1)
        return t

    def scenario(step: Step, losses: list[Tensor]) -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            for _ in range(8):
                packed.clear()
                train_on(step, losses, 1)
                assert packed

    check(capturing, scenario)


def set_default_dtype() -> Callable[[], None]:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def set_precision(operation: str) -> Callable[[], None]:
    setting = getattr(torch.backends.cudnn, operation)
    before, setting.fp32_precision = setting.fp32_precision, "ieee"
    return lambda: setattr(setting, "fp32_precision", before)


class Making(Net):
    """Makes a tensor of the default dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.full((), 1 / 3, device=x.device).double().float()


@once
@pytest.mark.parametrize("setting", ["dtype", "conv", "rnn"])
def test_torch_s_settings_count(capturing: Devices, setting: str) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        before = step._capture and step._capture._guard_key
        put_back = set_default_dtype() if setting == "dtype" else set_precision(setting)
        try:
            train_on(step, losses, 2)
        finally:
            put_back()
        assert before is None or step._capture._guard_key != before

    check(capturing, scenario, make=Making)


@once
def test_captures_that_served_may_be_followed_by_others(capturing: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everygpu.parallel.cuda_graphs.capture.LONG", 4)
    monkeypatch.setattr("everygpu.parallel.cuda_graphs.capture.MAX_ATTEMPTS", 2)
    step = make_step(capturing(2))
    for num_steps, num_expected in ((9, 1), (8, 1), (8, 1), (5, 1), (5, 1), (5, 0)):
        step.model.train(not step.model.training)
        for _ in range(num_steps):
            step(X, Y)
        assert num_graphs(step) == num_expected


@once
def test_autocast_around_some_steps(capturing: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        with torch.autocast(X.device.type if step._home.type == "cpu" else "cuda", torch.bfloat16):
            train_on(step, losses, 6)
        train_on(step, losses, 6)

    check(capturing, scenario)


@once
@pytest.mark.parametrize("count", [1, 2])
def test_autocast_that_is_left_between_steps_or_not(capturing: Devices, count: int) -> None:
    used = capturing(count)
    found: dict[Any, list[Tensor]] = {False: [], "auto": []}
    for capture in found:
        for num_steps in (1, 18, 9):  # in each context: the casts of one step are no other's
            step = make_step(used, capture=capture)
            losses: list[Tensor] = []
            while len(losses) < 18:
                with torch.autocast(used[0].type, torch.bfloat16):
                    train_on(step, losses, num_steps)
            assert not capture or num_graphs(step) == 1
            found[capture].append(torch.stack(losses))
    for first, *others in found.values():
        for losses_of in others:
            torch.testing.assert_close(losses_of, first, rtol=1e-4, atol=1e-5)
    # One device steps by torch's fused optimizer or by our kernel: their last bits differ, and casts to bfloat16 tell.
    torch.testing.assert_close(found["auto"][0], found[False][0], rtol=4e-3, atol=4e-3)


class Normalised(Net):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.first)


@once
def test_layers_with_hooks_for_state_dicts(capturing: Devices) -> None:
    check(capturing, train_on, make=Normalised)


class Choosing(Net):
    """Leaves something out at random, by a generator of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.draw = {
            "python": random.Random(0),
            "numpy": numpy.random.default_rng(0),
            "numpy-legacy": numpy.random.RandomState(0),
            "torch": torch.Generator().manual_seed(0),
        }[kind]

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.draw, torch.Generator):
            return super().forward(x) * torch.rand((), generator=self.draw).to(x.device)
        toss = self.draw.random() if hasattr(self.draw, "random") else self.draw.random_sample()
        return super().forward(x) * (1.0 if toss < 0.5 else 2.0)


@once
@pytest.mark.parametrize("kind", ["python", "numpy", "numpy-legacy", "torch"])
def test_random_generators_of_modules(capturing: Devices, kind: str) -> None:
    check(capturing, train_on, make=lambda: Choosing(kind), count=1, num=0)


def test_a_capture_makes_no_states(capturing: Devices) -> None:
    """What takes part for the first time while it is captured has none yet: each replay would make one anew."""
    step = make_step(capturing(1), TwoHeads)
    for _ in range(6):
        step(X, Y, head="last")
    assert not step._strategy._shards.fuses or step._strategy._shards.may_capture(step._strategy._touched)
    assert not step._strategy._shards.may_capture(range(len(step._strategy.flat_params.params)))
