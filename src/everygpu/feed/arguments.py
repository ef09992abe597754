"""Check the types of the feeding functions' arguments, before any thread or process starts."""

from collections.abc import Iterable
from numbers import Real
from operator import index
from typing import Any, SupportsIndex

import torch
from torch import nn
from torch.utils.data import DataLoader

from everygpu.errors import OptionError
from everygpu.step.train_step import TrainStep


def is_number(value: Any) -> bool:
    """Tell whether a value can be compared with numbers, and is meant as one."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_loader(loader: Any) -> None:
    """Refuse what can't be iterated, without beginning to: that may start worker processes.

    Raises:
        OptionError: saying what was passed and what to pass.
    """
    kind = type(loader)
    if getattr(kind, "__iter__", None) is None and getattr(kind, "__getitem__", None) is None:
        raise OptionError(
            f"Feeder: loader must be an iterable of batches, got {describe(loader)}. Pass for instance a DataLoader."
        )


def check_target(target: Any, caller: str) -> None:
    """Refuse what is neither a model nor could be devices; those are looked at by ``parse_devices``.

    Raises:
        OptionError: saying what was passed and what to pass.
    """
    is_known = target is None or isinstance(target, (nn.Module, TrainStep, str, torch.device, SupportsIndex))
    if not is_known and (isinstance(target, DataLoader) or not isinstance(target, Iterable)):
        raise OptionError(
            f"{caller}: model_or_devices must be a model, a TrainStep or devices, got {describe(target)}. "
            f"Leave it out for every device."
        )


def check_callback(on_trial: Any, caller: str) -> None:
    """Refuse what can't be called.

    Raises:
        OptionError: saying what was passed and what to pass.
    """
    if on_trial is not None and not callable(on_trial):
        raise OptionError(
            f"{caller}: on_trial must be callable as on_trial(trial), got {describe(on_trial)}. Leave it out for none."
        )


def as_whole(value: Any, name: str) -> int:
    """Return a whole number as Python's own.

    Raises:
        OptionError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise OptionError(f"find_batch_size: {name} must be a whole number, got {value!r}. Pass an int.")
    return index(value)


def describe(value: Any) -> str:
    """Name what was passed by its type; its own text may be pages long."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__}"
