"""Saves that are left out while steps are only tried."""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import safetensors.torch
import torch

from everygpu.checkpoint.manager import CheckpointManager

logger = logging.getLogger("everygpu")


@contextmanager
def saves_left_out(caller: str, when: Callable[[], bool] = lambda: True) -> Iterator[list[str]]:
    """Have saves do nothing: those of everygpu, ``torch.save`` and safetensors' ``save_file``.

    The first that is left out logs a line. Saves that are under way in the background go on. ``torch.save`` still
    writes to what is open already: to memory, by which programs copy, and to a file, which would be left empty. What
    was imported by ``from torch import save`` before, saves.

    Args:
        caller: Whose line it is.
        when: Tells at each save whether it is left out.
    Returns:
        The names of the functions whose saves were left out, one for each save.
    """
    left_out: list[str] = []

    def replace(owner: Any, name: str, is_kept: Callable[..., bool] = lambda *_, **__: False) -> Callable[[], None]:
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def save(*args: Any, **options: Any) -> Any:
            if not when() or is_kept(*args, **options):
                return plain(*args, **options)
            if not left_out:
                logger.warning("%s: saves are left out.", caller)
            left_out.append(name)
            return None

        setattr(owner, name, save)
        return lambda: setattr(owner, name, plain)

    # `save` of a module's own name is imported elsewhere; what it calls is looked up at each call.
    with ExitStack() as replaced:
        replaced.callback(replace(import_module("everygpu.checkpoint.save"), "take_and_write"))
        replaced.callback(replace(CheckpointManager, "save"))
        replaced.callback(replace(torch, "save", _is_open))
        replaced.callback(replace(torch.serialization, "save", _is_open))
        replaced.callback(replace(safetensors.torch, "save_file"))
        yield left_out


def _is_open(_: object = None, f: object = None, *others: object, **options: object) -> bool:
    """Tell whether ``torch.save`` is called with a file, not a path."""
    return hasattr(f, "write")
