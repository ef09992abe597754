"""What a training step measured."""

import itertools
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

Mark: TypeAlias = "float | torch.cuda.Event"


class Evaluation(NamedTuple):
    """What ``TrainStep.evaluate`` returns."""

    loss: Tensor
    """Shape (): the mean over all rows."""
    output: Any
    """What the model returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Figures of the last step, as ``TrainStep.stats`` returns them.

    ::

        step = everygpu.TrainStep(model, criterion, optimizer)
        step(x, y)
        stats = step.stats()  # waits for the device
        print(f"update {stats.num_steps}: loss {stats.loss:.3f}, backward {stats.phase_s['backward']:.4f} s")
    """

    loss: float
    """Of the last batch."""
    grad_norm: float
    """Of the whole gradient at the last update, before clipping; nan before the first."""
    num_steps: int
    """Updates so far, those skipped included."""
    num_skipped: int
    """Updates left out because a gradient was not finite, under float16."""
    engine: str = ""
    """What ran the last step: ``"graphs"`` if it was launched as recorded, else ``DataParallel.engine_in_use``."""
    phase_s: dict[str, float] = field(default_factory=dict)
    """Seconds of the last step by phase, on the first device: forward with the loss, backward, reduce (gradients
    added up), update (clipping, optimizer, parameters handed out). Where one kernel does both, update has it all."""


class Stopwatch:
    """Notes when phases end on a device, without waiting for it.

    Args:
        device: Whose time counts: the host's for the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.marks: dict[str, Mark] = {}
        """When each phase ended; those noted in a CUDA graph are noted anew by each launch."""

    def start(self) -> None:
        """Begin a step."""
        self.marks = {"": self._now()}

    def mark(self, phase: str) -> None:
        """Note that a phase ends here."""
        self.marks[phase] = self._now()

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase; waits for the device."""
        names = list(self.marks)
        pairs = itertools.pairwise(names)
        return {phase: self._between(self.marks[before], self.marks[phase]) for before, phase in pairs}

    def _now(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        in_graph = torch.cuda.is_current_stream_capturing()
        event = torch.cuda.Event(enable_timing=True, external=in_graph)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @staticmethod
    def _between(begin: Mark, end: Mark) -> float:
        if isinstance(begin, float) or isinstance(end, float):
            return float(end) - float(begin)  # type: ignore[arg-type]
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
