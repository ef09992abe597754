"""What changes between steps is seen by recorded steps as by others."""

import copy
import functools
import random
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import everygpu
from tests.step.test_capture import Net, batches, num_recordings

Devices = Callable[[int], list[torch.device]]
Step = everygpu.TrainStep
Scenario = Callable[[Step, list[Tensor]], None]
"""Called with a step after it was recorded; appends to the losses."""

X, Y = batches(1, torch.device("cpu"), ignore=False)[0]
NUM_BEFORE = 6


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)


def check(
    recording: Devices,
    scenario: Scenario,
    *,
    make: Any = Net,
    loss: Any = F.cross_entropy,
    count: int = 2,
    first: Any = ((X, Y), {}),
    **options: Any,
) -> None:
    """Go through a scenario with recorded steps and without; losses and all values must be equal."""
    used = recording(count)
    found = []
    for capture in (False, "auto"):
        torch.manual_seed(0)
        net = make().to(used[0])
        criterion = loss() if isinstance(loss, type) else loss
        step = Step(everygpu.DataParallel(net, used), criterion, adamw(net), capture=capture, **options)
        losses = [step(*first[0], **first[1]) for _ in range(NUM_BEFORE)]
        assert not capture or num_recordings(step) == 1
        scenario(step, losses)
        found.append((torch.stack(losses), copy.deepcopy(net.state_dict())))
    (plain, values), (recorded, ours) = found
    torch.testing.assert_close(recorded, plain, rtol=1e-4, atol=1e-5)
    for name, value in values.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def train_on(step: Step, losses: list[Tensor], num: int = 6, **kwargs: Any) -> None:
    losses += [step(X, Y, **kwargs) for _ in range(num)]


class TwoHeads(Net):
    """Trains one of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(16, 5)

    def forward(self, x: Tensor, head: str = "last") -> Tensor:
        h = self.norm(self.first(x)).tanh()
        return self.last(h) + self.other(h) if head == "both" else getattr(self, head)(h)


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"clip_norm": 1.0}, {}], ids=str)
def test_what_takes_no_part_stays_as_it_is(recording: Devices, options: dict[str, Any]) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        for head in ("other", "last") * 6 + ("other",) * 6:
            losses.append(step(X, Y, head=head))

    check(recording, scenario, make=TwoHeads, **options)


def test_what_takes_no_part_any_more(recording: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        for head in ("both", "both", "both", "other", "both", "other", "both", "other", "both", "other", "other"):
            losses.append(step(X, Y, head=head))

    check(recording, scenario, make=TwoHeads)


def test_kinds_of_batches_that_train_other_parameters_are_recorded(recording: Devices) -> None:
    used = recording(2)
    net = TwoHeads().to(used[0])
    step = Step(everygpu.DataParallel(net, used), F.cross_entropy, adamw(net))
    for head in ("other", "last") * 6:
        step(X, Y, head=head)
    assert num_recordings(step) == 2


def test_a_write_to_one_parameter(recording: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        for _ in range(3):
            with torch.no_grad():
                step.model.module.last.weight.mul_(0.5)
            train_on(step, losses, 1)
        assert step._capture is None or num_recordings(step) == 1

    check(recording, scenario)


def test_parameters_that_are_moved(recording: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        net = step.model.module
        backup = net.last.weight.data
        for value in (backup * 0.5, backup):
            net.last.weight.data = value
            train_on(step, losses, 2)

    check(recording, scenario)


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_write_to_what_is_frozen(recording: Devices, is_counted: bool) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        frozen = step.model.module.frozen
        with torch.no_grad():
            (frozen if is_counted else frozen.data).mul_(0.5)
        if not is_counted:
            step.refresh()
        train_on(step, losses)

    check(recording, scenario)


def test_another_module(recording: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        step.model.module = nn.Sequential(step.model.module, nn.Tanh())
        train_on(step, losses)

    check(recording, scenario)


def test_another_rule_for_buffers(recording: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        step.model.buffers_rule = "mean"
        train_on(step, losses)

    check(recording, scenario)


class Focal:
    """A loss that is no module."""

    gamma = 1.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) * self.gamma


def test_a_loss_object_s_attributes(recording: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        step.loss.gamma = 3.0
        train_on(step, losses)

    check(recording, scenario, loss=Focal)


def test_a_new_loss_module_and_its_attributes(recording: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        step.loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        train_on(step, losses)
        step.loss.label_smoothing = 0.5
        train_on(step, losses)

    check(recording, scenario, loss=nn.CrossEntropyLoss)


def smoothed(output: Tensor, target: Tensor, *, smoothing: float) -> Tensor:
    return F.cross_entropy(output, target, label_smoothing=smoothing)


def test_what_a_partial_has(recording: Devices) -> None:
    loss = functools.partial(smoothed, smoothing=0.0)

    def scenario(step: Step, losses: list[Tensor]) -> None:
        loss.keywords["smoothing"] = 0.5
        train_on(step, losses)
        loss.keywords["smoothing"] = 0.0

    check(recording, scenario, loss=loss)


def test_modes_of_a_module_that_the_loss_uses(recording: Devices) -> None:
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
    device = recording(2)[0]
    judge.to(device)
    check(recording, scenario, loss=loss)


class Configured(Net):
    """Looks at an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(scale=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.config.scale


def test_an_object_s_attributes(recording: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        step.model.module.config.scale = 0.3
        train_on(step, losses)

    check(recording, scenario, make=Configured)


def test_hooks_on_all_modules(recording: Devices) -> None:
    calls: list[int] = []

    def scenario(step: Step, losses: list[Tensor]) -> None:
        calls.clear()
        handle = nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
        train_on(step, losses, 8)
        handle.remove()
        assert len(calls) >= 8 * 2 * len(list(step.model.module.modules()))

    check(recording, scenario)


class Counting(TorchFunctionMode):
    """Counts functions of torch."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is F.cross_entropy
        return func(*args, **(kwargs or {}))


def test_modes_are_asked_at_every_step(recording: Devices) -> None:
    mode = Counting()

    def scenario(step: Step, losses: list[Tensor]) -> None:
        before = mode.count
        with mode:
            train_on(step, losses, 8)
        assert mode.count == before + 8
        train_on(step, losses, 2)
        assert step._capture is None or num_recordings(step) == 1

    check(recording, scenario)


def test_saved_tensors_hooks_are_called(recording: Devices) -> None:
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

    check(recording, scenario)


class Making(Net):
    """Makes a tensor of the default dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.full((), 1 / 3, device=x.device).double().float()


def test_the_default_dtype(recording: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        before = step._capture and step._capture._guard_key
        torch.set_default_dtype(torch.float64)
        try:
            train_on(step, losses, 2)
        finally:
            torch.set_default_dtype(torch.float32)
        assert before is None or step._capture._guard_key != before

    check(recording, scenario, make=Making)


@pytest.mark.parametrize("operation", ["conv", "rnn"])
def test_precisions_in_torch_s_newer_way(recording: Devices, operation: str) -> None:
    setting = getattr(torch.backends.cudnn, operation)

    def scenario(step: Step, losses: list[Tensor]) -> None:
        before = setting.fp32_precision
        facts = step._capture and step._capture._guard_key
        setting.fp32_precision = "ieee"
        try:
            train_on(step, losses, 2)
        finally:
            setting.fp32_precision = before
        assert facts is None or step._capture._guard_key != facts

    check(recording, scenario)


class Optional(Net):
    """Tells nothing from an empty container."""

    def forward(self, x: Tensor, more: Any = None) -> Tensor:
        return super().forward(x) * (1.0 if more is None else 0.5 if isinstance(more, list) else 0.25)


def test_empty_containers_count(recording: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        train_on(step, losses, more=[])
        train_on(step, losses, more={})
        train_on(step, losses)

    check(recording, scenario, make=Optional)


class Numbered(Net):
    def forward(self, x: Tensor, number: int = 0) -> Tensor:
        return super().forward(x)


def test_values_that_never_come_back_take_no_memory(recording: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everygpu.parallel.cuda_graphs.recorder.MAX_COUNTED", 20)
    used = recording(2)
    net = Numbered().to(used[0])
    step = Step(everygpu.DataParallel(net, used), F.cross_entropy, adamw(net))
    for number in range(30):
        step(X, Y, number=number)
    assert len(step._capture._counts) == 20
    for _ in range(4):
        step(X, Y, number=0)
    assert num_recordings(step) == 1


def test_recordings_that_served_may_be_followed_by_others(recording: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everygpu.parallel.cuda_graphs.recorder.LONG", 4)
    monkeypatch.setattr("everygpu.parallel.cuda_graphs.recorder.MAX_ATTEMPTS", 2)
    used = recording(2)
    net = Net().to(used[0])
    step = Step(everygpu.DataParallel(net, used), F.cross_entropy, adamw(net))
    for num_steps, num_expected in ((8, 1), (8, 1), (8, 1), (5, 1), (5, 1), (5, 0)):
        net.train(not net.training)
        for _ in range(num_steps):
            step(X, Y)
        assert num_recordings(step) == num_expected


def test_a_recording_does_not_keep_the_batch(recording: Devices) -> None:
    used = recording(2)
    net = Net().to(used[0])
    step = Step(everygpu.DataParallel(net, used), F.cross_entropy, adamw(net))
    refs = []
    for _ in range(6):
        x = X.clone().to(used[0])
        step(x, Y)
        refs.append(weakref.ref(x))
        del x
    assert num_recordings(step) == 1
    assert not any(ref() is not None for ref in refs)


class Many(Net):
    """Takes a dict of tensors, a scale without rows, and the rest by keyword."""

    def forward(self, x: Tensor, more: Any = None, scale: Any = 1.0) -> Tensor:
        h = super().forward(x["a"][0] + x["b"])
        return h * scale if more is None else h * scale + more.sum()


def each(step: Step, losses: list[Tensor], *batches_of: Any) -> None:
    """Go through every batch often enough for it to be recorded."""
    for args, kwargs in batches_of:
        losses += [step(*args, **kwargs) for _ in range(6)]


def test_nested_inputs_and_such_without_rows(recording: Devices) -> None:
    half = X * 0.5
    one = ({"x": {"a": (half,), "b": X}}, Y), {}

    def scenario(step: Step, losses: list[Tensor]) -> None:
        for i in range(6):
            losses.append(
                step(*one[0], scale=torch.tensor(0.1 * i), more=everygpu.Replicated(torch.full((3,), 0.1 * i)))
            )
        for i in range(6):
            losses.append(step(*one[0], scale=0.5 + i % 2))

    check(recording, scenario, make=Many, first=one)


def test_fewer_rows_than_replicas(recording: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        step.model.module.norm.eval()
        each(step, losses, ((X[:1], Y[:1]), {}), ((X[:2], Y[:2]), {}), ((X[:5], Y[:5]), {}), ((X, Y), {}))

    check(recording, scenario)
    check(recording, scenario, count=4)


def test_autocast_around_some_steps(recording: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        with torch.autocast(X.device.type if step._home.type == "cpu" else "cuda", torch.bfloat16):
            train_on(step, losses, 6)
        train_on(step, losses, 6)

    check(recording, scenario)


@pytest.mark.parametrize("count", [1, 2])
def test_autocast_that_is_left_between_steps_or_not(recording: Devices, count: int) -> None:
    used = recording(count)
    found = []
    for capture in (False, "auto"):
        for num_steps in (1, 18, 9):  # in each context: the casts of one step are no other's
            net = Net().to(used[0])
            step = Step(everygpu.DataParallel(net, used), F.cross_entropy, adamw(net), capture=capture)
            losses: list[Tensor] = []
            while len(losses) < 18:
                with torch.autocast(used[0].type, torch.bfloat16):
                    train_on(step, losses, num_steps)
            assert not capture or num_recordings(step) == 1
            found.append(torch.stack(losses))
    for losses_of in found[1:]:
        torch.testing.assert_close(losses_of, found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"precision": "fp16"}], ids=str)
def test_states_that_are_saved_and_loaded(recording: Devices, tmp_path: Path, options: dict[str, Any]) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        parts = {"model": step.model, "optimizer": step.optimizer, "step": step}
        place = tmp_path / f"recorded-{step._capture is not None}"
        everygpu.save(place, **parts)
        train_on(step, losses, 6)
        everygpu.load(place, **parts)
        train_on(step, losses, 6)
        assert losses[-1].item() == pytest.approx(losses[-7].item(), rel=1e-4)

    check(recording, scenario, **options)


class Refusing(Net):
    """Fails for some batches."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if len(x) == 2:
            raise ValueError("of two rows")
        return h


def test_exceptions_in_between(recording: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        for _ in range(5):
            with pytest.raises(ValueError, match="two rows"):
                step(X[:4], Y[:4])
            train_on(step, losses, 2)

    check(recording, scenario, make=Refusing)
    check(recording, scenario, make=Refusing, accumulate=2)


def test_groups_that_are_edited(recording: Devices) -> None:
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

    check(recording, scenario)


@pytest.mark.parametrize("is_new", [False, True], ids=["unfrozen", "added"])
def test_layers_that_are_unfrozen_are_recorded_again(recording: Devices, is_new: bool) -> None:
    used = recording(2)
    net = Net().to(used[0])
    net.first.requires_grad_(False)
    net.unused.requires_grad_(False)
    late = [] if is_new else [net.first.weight]
    optimizer = torch.optim.SGD([*net.norm.parameters(), *net.last.parameters(), *late], lr=0.1)
    step = Step(everygpu.DataParallel(net, used), F.cross_entropy, optimizer, capture="auto")
    for _ in range(NUM_BEFORE):
        step(X, Y)
    net.first.requires_grad_(True)
    if is_new:
        optimizer.add_param_group({"params": net.first.parameters()})
    for _ in range(NUM_BEFORE):
        step(X, Y)
    assert num_recordings(step) == 1


class Normalised(Net):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.first)


def test_layers_with_hooks_for_state_dicts(recording: Devices) -> None:
    check(recording, train_on, make=Normalised)


def test_flushes_and_another_number_of_batches(recording: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        for num in (1, 2, 3, 4):
            train_on(step, losses, num)
            step.flush()
        step.accumulate = 1
        train_on(step, losses, 6)
        step.clip_norm = 0.01
        train_on(step, losses, 6)

    check(recording, scenario, accumulate=3)


def test_two_steps_on_one_model(recording: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        other = Step(step.model, nn.MSELoss(), step.optimizer, capture="auto" if step._capture else False)
        target = torch.zeros(len(X), 5)
        for num in (1, 6, 2):
            train_on(step, losses, num)
            losses += [other(X, target) for _ in range(num)]

    check(recording, scenario)


def test_gradients_and_models_of_the_user(recording: Devices) -> None:
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

    check(recording, scenario)


class Writing(Net):
    """Changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_inputs_that_are_written(recording: Devices, count: int, is_sharded: bool) -> None:
    used = recording(count)
    found = []
    for capture in (False, "auto"):
        net = Writing().to(used[0])
        step = Step(everygpu.DataParallel(net, used), F.cross_entropy, adamw(net), capture=capture)
        for _ in range(6):
            x = X.clone().to(used[0])
            if is_sharded:
                ((x, y),) = everygpu.Feeder([(X.clone(), Y)], used)
            step(x, y if is_sharded else Y.to(used[0]))
        assert not capture or num_recordings(step) == 1
        found.append(x)
    assert found[0].equal(found[1])
    assert not found[0].equal(X.to(used[0]))


class Joining(Net):
    """Its parameters' gradients lie in one tensor, where they aren't aligned as kernels need it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.full((n,), 0.5) for n in (3, 2, 11))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh() * torch.cat([*self.parts]))


def test_gradients_that_are_not_aligned(recording: Devices) -> None:
    check(recording, train_on, make=Joining)


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


def test_gradients_that_come_bit_by_bit(recording: Devices) -> None:
    check(recording, train_on, make=Recurring)


def test_graphs_of_before_notice_the_update(recording: Devices) -> None:
    used = recording(2)
    net = Net().to(used[0])
    step = Step(everygpu.DataParallel(net, used), F.cross_entropy, adamw(net))
    for _ in range(NUM_BEFORE):
        step(X, Y)
    output = net(X.to(used[0]))
    step(X, Y)
    assert num_recordings(step) == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_module_s_class_and_a_buffer_are_replaced(recording: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        net = step.model.module
        for change in (
            lambda: setattr(net, "__class__", Doubling),
            lambda: net.register_buffer("scale", net.frozen * 2),
        ):
            change()
            train_on(step, losses)
        net.scale = net.scale * 2
        train_on(step, losses)
        net.scale.mul_(0.5)
        train_on(step, losses, 1)
        net.scale.data = net.scale * 0.5
        train_on(step, losses)

    check(recording, scenario)


class Doubling(Net):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale if hasattr(self, "scale") else 2.0
        return self.last(self.norm(self.first(x)).tanh() * scale)


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


@pytest.mark.parametrize("kind", ["python", "numpy", "numpy-legacy", "torch"])
def test_random_generators_of_modules(recording: Devices, kind: str) -> None:
    used = recording(1)
    found = []
    for capture in (False, "auto"):
        net = Choosing(kind).to(used[0])
        step = Step(everygpu.DataParallel(net, used), F.cross_entropy, adamw(net), capture=capture)
        found.append(torch.stack([step(X, Y) for _ in range(12)]))
    assert found[1].tolist() == pytest.approx(found[0].tolist(), rel=1e-4)


@pytest.mark.parametrize("split", ["even", [2.0, 1.0], [0.0, 1.0]], ids=str)
def test_rows_along_another_dimension(recording: Devices, split: Any) -> None:
    class Sideways(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.T).T

    used = recording(2)
    found = []
    for capture in (False, "auto"):
        net = Sideways().to(used[0])
        model = everygpu.DataParallel(net, used, dim=1, split=split)
        step = Step(model, lambda output, target: F.cross_entropy(output.T, target[0]), adamw(net), capture=capture)
        found.append(torch.stack([step(X.T[:, :rows], Y[None, :rows]) for rows in (12, 11) for _ in range(6)]))
        assert not capture or num_recordings(step) == 2
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_outputs_that_are_joined(recording: Devices) -> None:
    used = recording(2)
    found = []
    for capture in (False, "auto"):
        net = Net().to(used[0])
        model = everygpu.DataParallel(net, used, gather="joined")
        step = Step(model, F.cross_entropy, adamw(net), capture=capture)
        found.append(torch.stack([step(X, Y) for _ in range(NUM_BEFORE)]))
        assert not capture or num_recordings(step) == 1
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_a_sharded_optimizer_and_its_scheduler(recording: Devices) -> None:
    used = recording(2)
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
        assert not capture or num_recordings(step) == 1
        optimizer.step()  # without gradients it does nothing, but brings the state here
        found.append(torch.stack([*losses, *(step(X, Y) for _ in range(6))]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
