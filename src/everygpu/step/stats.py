"""What a training step measured."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


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
        print(f"update {stats.num_steps}: loss {stats.loss:.3f}, norm {stats.grad_norm:.2f}")
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
