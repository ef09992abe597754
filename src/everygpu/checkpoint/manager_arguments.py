"""What the arguments of a CheckpointManager may be."""

import math
from collections.abc import Mapping
from typing import Any, get_args

from torch import Tensor

from everygpu.checkpoint.brief import brief
from everygpu.checkpoint.run_directory import Mode
from everygpu.errors import OptionError


def finite_numbers(metrics: Any) -> dict[str, float]:
    """Return the metrics that are finite.

    Raises:
        OptionError: they are no dict, or one is no number.
    """
    if not isinstance(metrics, Mapping):
        raise OptionError(
            f"save: metrics must be a dict of numbers by name, got {brief(metrics)}. "
            f"Pass for instance metrics={{'accuracy': 0.9}}."
        )
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


def require_step(step: Any, function: str) -> int:
    if isinstance(step, int) and type(step) is int and step >= 0:
        return step
    todo = "Count batches or epochs."
    if callable(getattr(step, "state_dict", None)):
        todo = "Pass the object under another name, for instance train_step=step."
    raise OptionError(f"{function}: step must be a whole number from 0 on, got {brief(step)}. {todo}")


def take_step(step: Any, what: dict[str, Any]) -> int:
    """Return the step of a save, which may also be passed by name, and take it out of what is saved.

    Raises:
        OptionError: it is no whole number, or an object is to be saved under that name as well.
    """
    if step is None:
        return require_step(what.pop("step", None), "save")
    if "step" in what:
        raise OptionError(
            f"save: step must be the step's number, as load returns it under that name, got "
            f"{type(what['step']).__qualname__} as well. Pass that under another name, for instance train_step=step."
        )
    return require_step(step, "save")


def require_modes(keep_best: Any) -> dict[str, Mode]:
    if not isinstance(keep_best, Mapping | None):
        raise OptionError(
            f"CheckpointManager: keep_best must be a dict of metrics, each with 'min' or 'max', got "
            f"{brief(keep_best)}. Pass for instance keep_best={{'accuracy': 'max'}}."
        )
    return {name: require_mode(name, mode) for name, mode in (keep_best or {}).items()}


def require_mode(metric: str, mode: Any) -> Mode:
    if mode not in get_args(Mode):
        raise OptionError(
            f"CheckpointManager: for each metric it must be known whether 'min' or 'max' is best, got {mode!r} for "
            f"{metric}. Pass mode='max', or keep_best={{{metric!r}: 'max'}} to the manager."
        )
    result: Mode = mode
    return result
