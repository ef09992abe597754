"""Run programs on one device and by an engine, and compare what can be seen: a new engine is a line in ``SETUPS``."""

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

import everygpu
from everygpu.parallel.cuda_graphs.batch_kinds import NUM_WARM_UPS
from everygpu.parallel.engines import table
from tests import tape
from tests.parallel.cuda_graphs.forwards import num_graphs
from tests.parallel.programs.network import IN_MODEL, Carrying, Critic, Generator, Net
from tests.parallel.programs.program import NUM_STEPS, PENALTIES, Program, draw_program, one_call, steady
from tests.parallel.programs.training import (
    AFTER_BACKWARD,
    AFTER_STEP,
    BEFORE,
    EVENTS,
    LOOPS,
    Training,
    Wrap,
    make_batch,
)

TOLERANCES = {torch.float64: 1e-9, torch.float32: 3e-2}
"""Of the largest value: in float64 only additions are in another order, autocast rounds each gradient to 8 bits."""

Observed = dict[str, Any]


def run_program(program: Program, wrap: Wrap, device: torch.device, num_steps: int = NUM_STEPS) -> Observed:
    """Run a program.

    Args:
        program: What to run.
        wrap: Gives the model that the program trains, of its module.
        device: Where its batches are, and its module.
        num_steps: How many updates it makes.
    Returns:
        Everything observable, by name.
    """
    torch.manual_seed(program.seed)
    with _second_derivatives() if program.loop in PENALTIES else contextlib.nullcontext():
        return RUNS[program.kind](program, wrap, device, num_steps)


@contextlib.contextmanager
def _second_derivatives() -> Iterator[None]:
    """Leave out kernels without any: fused attention, and cuDNN's recurrent layers."""
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
        yield


def _run_classifier(program: Program, wrap: Wrap, device: torch.device, num_steps: int) -> Observed:
    def make() -> nn.Module:
        return Net(program.stem, program.blocks, program.answer, program.loss, counts=program.counts)

    def wrap_stem(module: Any) -> nn.Module:
        module.stem = wrap(module.stem)
        return module

    t = Training(program, wrap_stem if program.wraps_stem else wrap, make, device)
    for step in range(num_steps):
        _happen(BEFORE, t, step)
        t.zero_grad()
        for part in range(program.num_parts):
            batch = t.own_rows(make_batch(program, device, step, part))
            t.watch(t.take_step(batch) if program.by_step else LOOPS[program.loop](t, batch))
        _finish(t, step)
    return _observe(t, model=t.model, teacher=t.teacher)


def _run_carried_state(program: Program, wrap: Wrap, device: torch.device, num_steps: int) -> Observed:
    t = Training(program, wrap, lambda: Carrying(program.cell, program.blocks), device)
    state = None
    for step in range(num_steps):
        _happen(BEFORE, t, step)
        t.zero_grad()
        for part in range(program.num_parts):
            batch = make_batch(program, device, step, part)
            with t.cast():
                out, state = t.model(batch["x"], state)
                loss = F.mse_loss(out, batch["y"])
            t.scaled(loss).backward()
            state = tree_map(Tensor.detach, state)
            t.watch(loss)
        _finish(t, step)
    return _observe(t, model=t.model) | {"state": tree_map(torch.clone, state)}


def _run_adversarial_pair(program: Program, wrap: Wrap, device: torch.device, num_steps: int) -> Observed:
    t = Training(program, wrap, lambda: Generator(program.blocks), device)
    critic = wrap(Critic(program.blocks).to(device, program.dtype))
    critics = torch.optim.SGD(critic.parameters(), lr=0.05)
    for step in range(num_steps):
        _happen(BEFORE, t, step)
        batch = make_batch(program, device, step, 0)
        with t.cast():
            made = t.model(batch["noise"])
            right, wrong = critic(batch["real"]), critic(made.detach())
            loss = F.softplus(-right).mean() + F.softplus(wrong).mean()
        critics.zero_grad()
        loss.backward()
        critics.step()
        t.watch(loss)
        t.zero_grad()
        with t.cast():
            loss = F.softplus(-critic(made)).mean()
        loss.backward()
        t.watch(loss)
        _finish(t, step)
    return _observe(t, model=t.model, critic=critic)


RUNS: dict[str, Callable[[Program, Wrap, torch.device, int], Observed]] = {
    "classifier": _run_classifier,
    "carried state": _run_carried_state,
    "adversarial pair": _run_adversarial_pair,
}


def _happen(moment: str, t: Training, step: int) -> None:
    for name, (when, event) in EVENTS.items():
        if when == moment and name in t.program.events:
            event(t, step)


def _finish(t: Training, step: int) -> None:
    _happen(AFTER_BACKWARD, t, step)
    t.update()
    _happen(AFTER_STEP, t, step)


def _observe(t: Training, **models: nn.Module | None) -> Observed:
    capture = t.step._capture if t.program.by_step else None
    if capture is not None and t.step._strategy.captured_forward is not None:
        capture = t.step._strategy.captured_forward.capture
    observed: Observed = {"seen": t.seen, "captures": 0 if capture is None else len(capture._graphs)}
    for name, model in models.items():
        if model is not None:
            module = model.module if isinstance(model, everygpu.DataParallel) else model
            observed |= {f"{name}'s {key}": value for key, value in _parts(module).items()}
    return observed


def _parts(module: nn.Module) -> Observed:
    plain = (bool, int, float, str, list)
    attributes = {
        f"{_inner(path)}.{name}": value
        for path, child in module.named_modules()
        if not isinstance(child, everygpu.DataParallel)
        for name, value in vars(child).items()
        if isinstance(value, plain) and "flat_weight" not in name
    }
    return {
        "parameters": {_inner(name): p.detach().clone() for name, p in module.named_parameters()},
        "gradients": {_inner(name): p.grad for name, p in module.named_parameters()},
        "buffers": {_inner(name): b.clone() for name, b in module.named_buffers()},
        "attributes": attributes,
    }


def _inner(path: str) -> str:
    return path.replace("stem.module", "stem")


def differences(ours: Any, theirs: Any, dtype: torch.dtype, path: str = "") -> list[str]:
    """List where two observations differ, in the order in which they were made."""
    if isinstance(theirs, Tensor) and isinstance(ours, Tensor):
        return _compare(ours.detach(), theirs.detach(), TOLERANCES[dtype], path)
    if isinstance(theirs, dict) and isinstance(ours, dict) and ours.keys() == theirs.keys():
        return [line for key in theirs for line in differences(ours[key], theirs[key], dtype, f"{path}/{key}")]
    if isinstance(theirs, (list, tuple)) and type(ours) is type(theirs) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs))
        return [line for i, (a, b) in pairs for line in differences(a, b, dtype, f"{path}[{i}]")]
    return [] if ours == theirs else [f"{path}: {ours!r} instead of {theirs!r}"]


def _compare(ours: Tensor, theirs: Tensor, tolerance: float, path: str) -> list[str]:
    finite = theirs[theirs.isfinite()].abs()
    atol = tolerance * max(1.0, float(finite.max()) if finite.numel() else 0.0)
    try:
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=tolerance, atol=atol)
    except AssertionError as error:
        return [f"{path}: {' '.join(str(error).split())}"]
    return []


NUM_PROGRAMS = 200


@dataclass(frozen=True, kw_only=True)
class Setup:
    """An engine, and the devices to run it on."""

    engine: str
    """Or "step", for ``TrainStep``."""
    device: str = "cpu"
    num_steps: int = NUM_STEPS
    num_programs: int = NUM_PROGRAMS
    reads_loss: bool = False
    captures: bool = False
    """Whether the engine makes CUDA graphs, of steady programs; they are acted out for CPU replicas."""
    marks: tuple[pytest.MarkDecorator, ...] = ()

    def draw(self, seed: int) -> Program:
        program = one_call(seed) if self.engine == "step" else draw_program(seed)
        if self.reads_loss:
            loss = "mse" if program.loss in IN_MODEL else program.loss
            program = replace(program, reads_loss=True, loss=loss)
        program = steady(program) if self.captures else program
        return replace(program, counts_writes=False) if self.engine == "auto" else program

    def devices(self, num_replicas: int) -> list[torch.device]:
        if self.device == "cpu":
            return [torch.device("cpu")] * num_replicas
        return [torch.device("cuda", i % torch.cuda.device_count()) for i in range(num_replicas)]

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as monkeypatch, warnings.catch_warnings():
            # cuDNN's, of weights that a program has moved apart: on one device, too.
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
            if self.device == "cuda":
                monkeypatch.setenv("EVERYGPU_SHARE_GPU", "1")
            if self.captures and self.device == "cpu":
                tape.install(monkeypatch, fused=False)
            if self.engine == "auto":  # to be looked for on the CPU, too
                monkeypatch.setattr(table, "can_gain", lambda context: True)
                warnings.simplefilter("ignore", DeprecationWarning)  # importing torch's compiler warns of torch.jit
            yield


ON_GPUS = (pytest.mark.gpu, pytest.mark.timeout(300))

SETUPS = {
    "threads": Setup(engine="threads"),
    # Fewer: acting captures out takes three times as long as running programs.
    "capture": Setup(engine="capture", num_steps=NUM_WARM_UPS + 4, num_programs=NUM_PROGRAMS // 5, captures=True),
    # On the command line alone: each capture is proven, which takes half a second.
    "auto": Setup(engine="auto", num_steps=NUM_WARM_UPS + 4, num_programs=0, captures=True),
    "step": Setup(engine="step", num_programs=NUM_PROGRAMS // 2),
    "step-captured": Setup(engine="step", num_steps=NUM_WARM_UPS + 4, num_programs=NUM_PROGRAMS // 5, captures=True),
    "step-loss-on-host": Setup(
        engine="step",
        num_steps=3 * NUM_WARM_UPS + 6,
        num_programs=NUM_PROGRAMS // 5,
        reads_loss=True,
        captures=True,
    ),
    "threads-gpu": Setup(engine="threads", device="cuda", marks=ON_GPUS),
    "capture-gpu": Setup(engine="capture", device="cuda", num_steps=NUM_WARM_UPS + 4, captures=True, marks=ON_GPUS),
    "step-gpu": Setup(
        engine="step",
        device="cuda",
        num_steps=NUM_WARM_UPS + 4,
        num_programs=NUM_PROGRAMS // 5,
        captures=True,
        marks=ON_GPUS,
    ),
}
"""By the name that a test and the command line have for it."""


def check(setup: Setup, program: Program) -> tuple[list[str], int]:
    """Run a program on one device and by an engine; return what differs, or how it failed, and how much was captured.

    Within ``setup.prepared()``.
    """
    devices, models = setup.devices(program.num_replicas), []
    split = program.split if isinstance(program.split, str) else program.split[: len(devices)]
    options: dict[str, Any] = program.options | {"split": split}

    def wrap(module: torch.nn.Module) -> torch.nn.Module:
        engine = "auto" if program.by_step else setup.engine
        models.append(everygpu.DataParallel(module, devices, engine=engine, **options))
        return models[-1]

    try:
        theirs = run_program(replace(program, by_step=False), lambda module: module, devices[0], setup.num_steps)
        ours = run_program(program, wrap, devices[0], setup.num_steps)
    except Exception as error:
        said = [*traceback.format_exception_only(error), *traceback.format_tb(error.__traceback__)]
        return "".join(said).splitlines(), 0
    captured = ours.pop("captures") + theirs.pop("captures") + sum(map(num_graphs, models))
    if program.by_step:  # which has gradients in memory of its own
        ours["model's gradients"] = theirs["model's gradients"]
    return differences(ours, theirs, program.dtype), captured


def check_seeds(name: str, seeds: range) -> tuple[list[str], int]:
    """Check the programs of some seeds; return reports on those that failed, and the number of captures."""
    setup, reports, captured = SETUPS[name], [], 0
    with setup.prepared():
        for program in map(setup.draw, seeds):
            lines, num = check(setup, program)
            captured += num
            if lines:
                again = f"python -m tests.parallel.programs {program.seed} --setup {name}"
                reports.append("\n".join([program.describe(), again, *lines[:8], *lines[8:][-8:]]))
    return reports, captured
