"""Which programs run by which engine on which devices: a new engine is a line in ``SETUPS``."""

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import everygpu
from everygpu.parallel.cuda_graphs.batch_kinds import NUM_WARM_UPS
from everygpu.parallel.engines import table
from tests import tape
from tests.parallel.cuda_graphs.forwards import num_recordings
from tests.parallel.programs.program import NUM_STEPS, Program, draw_program, steady
from tests.parallel.programs.run import differences, run_program

NUM_PROGRAMS = 200


@dataclass(frozen=True, kw_only=True)
class Setup:
    """An engine, and the devices to run it on."""

    engine: str
    device: str = "cpu"
    num_steps: int = NUM_STEPS
    num_programs: int = NUM_PROGRAMS
    records: bool = False
    """Whether the engine makes CUDA graphs, of steady programs; they are acted out for CPU replicas."""
    marks: tuple[pytest.MarkDecorator, ...] = ()

    def draw(self, seed: int) -> Program:
        """Return the program of a seed, as it is for this engine."""
        program = steady(draw_program(seed)) if self.records else draw_program(seed)
        return replace(program, counts_writes=False) if self.engine == "auto" else program

    def devices(self, num_replicas: int) -> list[torch.device]:
        """Return one device per replica."""
        if self.device == "cpu":
            return [torch.device("cpu")] * num_replicas
        return [torch.device("cuda", i % torch.cuda.device_count()) for i in range(num_replicas)]

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Run programs within."""
        with pytest.MonkeyPatch.context() as monkeypatch, warnings.catch_warnings():
            # cuDNN's, of weights that a program has moved apart: on one device, too.
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
            if self.device == "cuda":
                monkeypatch.setenv("EVERYGPU_SHARE_GPU", "1")
            if self.records and self.device == "cpu":
                tape.install(monkeypatch, fused=False)
            if self.engine == "auto":  # to be looked for on the CPU, too
                monkeypatch.setattr(table, "can_gain", lambda context: True)
                warnings.simplefilter("ignore", DeprecationWarning)  # importing torch's compiler warns of torch.jit
            yield


ON_GPUS = (pytest.mark.gpu, pytest.mark.timeout(300))

SETUPS = {
    "threads": Setup(engine="threads"),
    # Fewer: acting recordings out takes three times as long as running programs.
    "graphs": Setup(engine="graphs", num_steps=NUM_WARM_UPS + 4, num_programs=NUM_PROGRAMS // 5, records=True),
    # On the command line alone: each recording is proven, which takes half a second.
    "auto": Setup(engine="auto", num_steps=NUM_WARM_UPS + 4, num_programs=0, records=True),
    "threads-gpu": Setup(engine="threads", device="cuda", marks=ON_GPUS),
    "graphs-gpu": Setup(engine="graphs", device="cuda", num_steps=NUM_WARM_UPS + 4, records=True, marks=ON_GPUS),
}
"""By the name that a test and the command line have for it."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one program."""

    lines: list[str]
    """What differs from one device, or how it failed."""
    num_recordings: int


def check(setup: Setup, program: Program) -> Outcome:
    """Run a program on one device and by an engine; within ``setup.prepared()``."""
    devices, models = setup.devices(program.num_replicas), []
    split = program.split if isinstance(program.split, str) else program.split[: len(devices)]
    options: dict[str, Any] = program.options | {"split": split}

    def wrap(module: torch.nn.Module) -> torch.nn.Module:
        models.append(everygpu.DataParallel(module, devices, engine=setup.engine, **options))
        return models[-1]

    try:
        theirs = run_program(program, lambda module: module, devices[0], setup.num_steps)
        ours = run_program(program, wrap, devices[0], setup.num_steps)
    except Exception as error:
        return Outcome(lines=describe(error), num_recordings=0)
    return Outcome(lines=differences(ours, theirs, program.dtype), num_recordings=sum(map(num_recordings, models)))


def describe(error: BaseException) -> list[str]:
    """Say what was raised, and then where."""
    where = traceback.format_tb(error.__traceback__)
    return "".join([*traceback.format_exception_only(error), *where]).splitlines()


def report(name: str, program: Program, lines: list[str]) -> str:
    """Say what failed, and how to run it alone."""
    shown = "\n".join(f"    {line}" for line in lines[:8] + lines[8:][-8:])
    return (
        f"{program.describe()}\n  engine     {name}: {len(lines)} lines of what is wrong\n{shown}\n"
        f"  again      python -m tests.parallel.programs {program.seed} --setup {name}\n"
    )


def check_seeds(name: str, seeds: range) -> tuple[list[str], int]:
    """Check the programs of some seeds; return reports on those that failed, and the number of recordings."""
    setup, reports, recorded = SETUPS[name], [], 0
    with setup.prepared():
        for program in map(setup.draw, seeds):
            outcome = check(setup, program)
            recorded += outcome.num_recordings
            if outcome.lines:
                reports.append(report(name, program, outcome.lines))
    return reports, recorded
