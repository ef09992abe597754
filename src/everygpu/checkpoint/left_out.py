"""Saves that are left out while steps are only tried."""

import functools
import io
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

    The first that is left out logs a line. Saves that are under way in the background go on, and so does
    ``torch.save`` to memory, by which programs copy. What was imported by ``from torch import save`` before, saves.

    Args:
        caller: Whose line it is.
        when: Tells at each save whether it is left out.
    Returns:
        The names of the functions whose saves were left out, one for each save.
    """
    left_out: list[str] = []

    def replace(owner: Any, name: str) -> Callable[[], None]:
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def save(*args: Any, **options: Any) -> Any:
            if not when() or any(isinstance(arg, io.BytesIO) for arg in (*args, *options.values())):
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
        replaced.callback(replace(torch, "save"))
        replaced.callback(replace(torch.serialization, "save"))
        replaced.callback(replace(safetensors.torch, "save_file"))
        yield left_out
