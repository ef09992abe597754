"""What other code does between two steps counts on every device, and an interruption leaves nothing behind."""

import contextlib
import copy
import gc
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import everygpu
from everygpu.parallel.replicas.optimizer_steps import OptimizerSteps
from everygpu.parallel.replicas.replica_set import ReplicaSet
from tests import tape
from tests.step.test_train_step import Devices, assert_replicas_bit_equal

SOURCE = str(Path(everygpu.__file__).parent)
KINDS: list[Callable[..., torch.optim.Optimizer]] = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW]
WAYS = [{"fused": True}, {"foreach": True}, {"foreach": False}]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.scale = 1.0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.first(x)).tanh() * self.scale)


@pytest.fixture(params=["eager", "captured"])
def used(
    request: pytest.FixtureRequest, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[torch.device], str]:
    """Devices where nothing looks for writes that torch doesn't count, as none are GPUs; and how steps run."""
    found = devices(2)
    if request.param == "captured":
        tape.prepare(found, monkeypatch, fused=True)
    elif found[0].type == "cpu":
        monkeypatch.setattr(sys.modules[ReplicaSet.__module__], "trusts_versions", lambda devices: True)
        monkeypatch.setattr("everygpu.step.flat_parameters.FlatParameters._differs", lambda flat_params, bucket: False)
    return found, request.param


class Side:
    """A net with an optimizer, which is trained by steps of everygpu's, or by a plain loop that does the same."""

    def __init__(self, draw: random.Random, devices: list[torch.device], engine: str, *, is_ours: bool) -> None:
        self.net = Net().to(devices[0])
        kind, way = draw.choice(KINDS), draw.choice(WAYS)
        self.optimizer = kind([p for p in self.net.parameters() if p.requires_grad], lr=0.02, **way)
        self.others = [draw.choice(KINDS)(self.net.parameters(), lr=0.02, **draw.choice(WAYS)) for _ in range(2)]
        self.accumulate = draw.choice([1, 1, 2, 3])
        self.step: everygpu.TrainStep | None = None
        if is_ours:
            model = everygpu.DataParallel(self.net, devices, engine="threads")
            options = {"accumulate": self.accumulate, "capture": "auto" if engine == "captured" else False}
            self.step = everygpu.TrainStep(model, F.mse_loss, self.optimizer, **options)
        self.drop()

    def drop(self) -> None:
        self.num_batches = self.num_rows = 0
        self.grads: list[Tensor] = []

    def train(self, x: Tensor, y: Tensor) -> Tensor:
        if self.step is not None:
            return self.step(x, y)
        loss = F.mse_loss(self.net(x), y)
        params = [p for p in self.net.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss * len(x), params)
        self.grads = [a + g for a, g in zip(self.grads, grads)] if self.num_batches else list(grads)
        self.num_batches, self.num_rows = self.num_batches + 1, self.num_rows + len(x)
        if self.num_batches == self.accumulate:
            for p, grad in zip(params, self.grads):
                p.grad = grad / self.num_rows
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.drop()
        return loss.detach()

    def evaluate(self, x: Tensor, y: Tensor) -> Tensor:
        if self.step is not None:
            return self.step.evaluate(x, y).loss
        with torch.no_grad():
            return F.mse_loss(self.net(x), y)


def step_stock(side: Side, x: Tensor, y: Tensor, draw: random.Random) -> None:
    """A plain step by the step's own optimizer, as a warm-up."""
    F.mse_loss(side.net(x), y).backward()
    side.optimizer.step()
    side.optimizer.zero_grad()


def step_other(side: Side, x: Tensor, y: Tensor, draw: random.Random) -> None:
    """Another optimizer, of what the step has frozen, too: by itself, with a closure, or by a scaler."""
    optimizer, way = draw.choice(side.others), draw.choice(["step", "closure", "scaler"])
    side.net.frozen.requires_grad_()
    scaler = torch.amp.GradScaler(x.device.type, enabled=way == "scaler")

    def closure() -> float:
        optimizer.zero_grad()
        loss = F.mse_loss(side.net(x), y)
        scaler.scale(loss).backward()
        return loss.item()

    if way == "closure":
        optimizer.step(closure)
    else:
        closure()
        scaler.step(optimizer)
    optimizer.zero_grad()
    side.net.frozen.requires_grad_(False)


def perturb(side: Side, x: Tensor, y: Tensor, draw: random.Random) -> None:
    """SAM: away and back, with a step of another optimizer there."""
    params = [p for p in side.net.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in params]
    with torch.no_grad():
        torch._foreach_add_(params, 0.01)
    step_other(side, x, y, draw)
    with torch.no_grad():
        for p, value in zip(params[::2], before[::2]):
            p.copy_(value)


def load(side: Side, *_: Any) -> None:
    side.net.load_state_dict({name: value * 0.9 for name, value in side.net.state_dict().items()})


def load_assigned(side: Side, *_: Any) -> None:
    state = {name: (value * 0.9).requires_grad_(value.requires_grad) for name, value in side.net.state_dict().items()}
    for name, p in side.net.named_parameters():
        p.data = state[name].detach()


@torch.no_grad()
def write(side: Side, x: Tensor, y: Tensor, draw: random.Random) -> None:
    list(side.net.parameters())[draw.randrange(6)].mul_(0.9)


@torch.inference_mode()
def write_in_inference_mode(side: Side, x: Tensor, y: Tensor, draw: random.Random) -> None:
    list(side.net.parameters())[draw.randrange(6)].mul_(0.9)


def write_uncounted(side: Side, x: Tensor, y: Tensor, draw: random.Random) -> None:
    list(side.net.parameters())[draw.randrange(6)].data.mul_(0.9)
    if side.step is not None:
        side.step.refresh()


def write_and_evaluate(side: Side, x: Tensor, y: Tensor, draw: random.Random) -> None:
    """An evaluation sees all."""
    list(side.net.parameters())[draw.randrange(6)].data.mul_(0.9)
    side.seen = side.evaluate(x, y)


def restart(side: Side, *_: Any) -> None:
    """What has accumulated is dropped with the state that is loaded."""
    if side.step is not None:
        side.step.load_state_dict({"num_steps": 3, "num_skipped": 0})
    side.drop()


def fail(side: Side, x: Tensor, y: Tensor, draw: random.Random) -> None:
    """Ctrl-C in forward: the update's gradients are dropped."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if side.step is not None:
        handle = side.net.last.register_forward_hook(interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            side.step(x, y)
        handle.remove()
    side.drop()


ACTS = [step_stock, step_other, perturb, load, load_assigned, write, write_in_inference_mode, write_uncounted, restart]
ACTS += [write_and_evaluate, fail]


def run_program(seed: int, devices: list[torch.device], engine: str) -> None:
    sides = [Side(random.Random(seed), devices, engine, is_ours=is_ours) for is_ours in (True, False)]
    ours, plain = sides
    draw = random.Random(seed)
    data = torch.Generator().manual_seed(seed)
    done = []
    for i in range(20):
        rows = draw.choice([6, 6, 6, 3]) if engine == "eager" else 6
        x, y = (torch.randn(rows, n, generator=data, dtype=torch.double).to(devices[0]) for n in (5, 3))
        act = draw.choice(ACTS) if engine == "eager" or i > 6 else step_stock
        if draw.random() < (0.5 if engine == "eager" else 0.2):
            done.append(act.__name__)
            chosen = draw.random()
            for side in sides:
                act(side, x, y, random.Random(chosen))
        losses = [side.train(x, y) for side in sides]
        done.append("train")
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9, msg=lambda text: f"seed {seed}, {done}: {text}")
        for (name, a), b in zip(ours.net.named_parameters(), plain.net.parameters()):
            message = f"seed {seed}, {done}: {name} is wrong"
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=message)
    torch.testing.assert_close(*(side.evaluate(x, y) for side in sides), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_programs(used: tuple[list[torch.device], str], seed: int) -> None:
    run_program(seed, *used)


@pytest.mark.slow
def test_many_programs(used: tuple[list[torch.device], str]) -> None:
    for seed in range(100, 200 if used[0][0].type == "cpu" else 150):
        run_program(seed, *used)


class Interruption:
    """Presses Ctrl-C at a line of everygpu's, counted from where it begins."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.num_lines = 0
        self.place = ""

    def __enter__(self) -> "Interruption":
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        self.num_lines += event == "line"
        if self.num_lines == self.at:
            sys.settrace(None)
            self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise KeyboardInterrupt
        return self._trace


def interrupt(draw: random.Random, make: Callable[[], everygpu.TrainStep], x: Tensor, y: Tensor) -> None:
    """Interrupt one of a step's calls; from then on it goes on as one device does with what the module has."""
    num_before, edits, draw_bias = draw.randrange(3), draw.random() < 0.4, draw.random() < 0.5

    def prepared() -> everygpu.TrainStep:
        step = make()
        for _ in range(num_before):
            step(x, y)
        if edits:
            step.model.module.scale = 2.0
            step.model.module.last.bias.requires_grad_(draw_bias)
            step.model.module.frozen.weight.data = step.model.module.frozen.weight.data * 0.5
        with torch.no_grad():
            step.model.module.frozen.bias.mul_(0.5)
            step.model.module.first.bias.mul_(0.5)
        return step

    what = draw.choice([lambda step: step(x, y), lambda step: step(x, y), lambda step: step.evaluate(x, y)])
    step = prepared()
    with Interruption(None) as counted:
        what(step)
    step = prepared()
    with contextlib.suppress(KeyboardInterrupt), Interruption(draw.randrange(1, counted.num_lines)) as interruption:
        what(step)
    net = step.model.module
    if draw.random() < 0.5:
        net.load_state_dict({name: value * 0.9 for name, value in net.state_dict().items()})
    plain = copy.deepcopy(net)
    reference = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        reference.zero_grad()
        expected = F.mse_loss(plain(x), y)
        expected.backward()
        loss = step(x, y)
        reference.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-9, msg=interruption.place)
        for a, b in zip(net.parameters(), plain.parameters()):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=interruption.place)
        assert_replicas_bit_equal(step)


def make_step(devices: list[torch.device], engine: str) -> everygpu.TrainStep:
    net = Net().to(devices[0])
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    model = everygpu.DataParallel(net, devices, engine="threads")
    return everygpu.TrainStep(model, F.mse_loss, optimizer, capture="auto" if engine == "captured" else False)


def check_interruptions(devices: list[torch.device], engine: str, seeds: range) -> None:
    for seed in seeds:
        data = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(6, n, generator=data, dtype=torch.double).to(devices[0]) for n in (5, 3))
        interrupt(random.Random(seed), lambda: make_step(devices, engine), x, y)


def test_interruptions(used: tuple[list[torch.device], str]) -> None:
    check_interruptions(*used, range(20))


@pytest.mark.slow
def test_many_interruptions(used: tuple[list[torch.device], str]) -> None:
    check_interruptions(*used, range(1000, 1400 if used[0][0].type == "cpu" else 1100))


def test_ctrl_c_while_new_parameters_are_handed_out(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    """What hands them out after an interruption is interrupted itself."""
    monkeypatch.setattr("everygpu.step.flat_parameters.FlatParameters._differs", lambda flat_params, bucket: False)
    step = make_step(devices(2), "eager")
    x, y = (torch.ones(6, n, dtype=torch.double, device=devices(2)[0]) for n in (5, 3))
    step(x, y)

    def all_gather(bucket: list[Tensor]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(everygpu.comm, "all_gather", all_gather)
        with pytest.raises(KeyboardInterrupt):
            step(x, y)
    loss = step(x, y)
    assert_replicas_bit_equal(step)
    assert step(x, y) < loss
    assert step._strategy.flat_params.values[0][0].isfinite().all()


def test_an_optimizer_that_has_the_parameters_is_noticed_from_any_thread(devices: Devices) -> None:
    """Owners that come and go meanwhile, as in other threads, or in a garbage collection, are no error."""
    used = devices(2)
    params = [nn.Parameter(torch.ones(2, device=used[0])) for _ in range(3)]
    optimizer = torch.optim.SGD(params[:2], lr=0.1, fused=True)
    first, other = OptimizerSteps(params[1:]), OptimizerSteps(params[2:])
    cycle: list[Any] = [OptimizerSteps(params)]
    cycle.append(cycle)
    del cycle
    optimizer.register_step_pre_hook(lambda *_: gc.collect() and None)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(optimizer.step).result()
    assert (first.have_come, other.have_come) == (True, False)
