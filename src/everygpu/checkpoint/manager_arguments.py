"""What the arguments of a CheckpointManager may be."""

import math
from collections.abc import Mapping
from typing import Any, get_args

from torch import Tensor

from everygpu.checkpoint.run_directory import Mode
from everygpu.errors import OptionError


def finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {str(name): _number(name, value) for name, value in metrics.items()}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _number(metric: str, value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)  # float warns of a loss with a graph
    except (TypeError, ValueError, RuntimeError, OverflowError) as cause:
        raise OptionError(
            f"save: a metric must be a number, got {value!r} for {metric}. Pass a float, or leave it out."
        ) from cause


def require_positive(name: str, value: int) -> int:
    if type(value) is not int or value < 1:
        raise OptionError(f"CheckpointManager: {name} must be a whole number from 1 on, got {value!r}. Pass e.g. 3.")
    return value


def require_step(step: int, function: str) -> None:
    if type(step) is not int or step < 0:
        raise OptionError(f"{function}: step must be a whole number from 0 on, got {step!r}. Count batches or epochs.")


def require_mode(metric: str, mode: Any) -> Mode:
    if mode not in get_args(Mode):
        raise OptionError(
            f"CheckpointManager: for each metric it must be known whether 'min' or 'max' is best, got {mode!r} for "
            f"{metric}. Pass mode='max', or keep_best={{{metric!r}: 'max'}} to the manager."
        )
    result: Mode = mode
    return result
