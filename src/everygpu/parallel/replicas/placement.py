"""Checks of the module to replicate: its kind, its wrappers, its device."""

import itertools
import logging
from typing import Any

import torch
from torch import nn
from torch.nn import DataParallel as TorchDataParallel
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from everygpu.devices.p2p import trusted_peers
from everygpu.errors import ModuleError, PlacementError

# By name: the modules that define them take long to import.
_DISTRIBUTED = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})

logger = logging.getLogger("everygpu")


def without_wrappers(module: Any, caller: str) -> Any:
    """Unwrap a module that is wrapped already, as in a notebook cell that is run again."""
    while isinstance(module, TorchDataParallel) or getattr(type(module), "wraps_a_module", False):
        kind = f"{type(module).__module__.partition('.')[0]}'s {type(module).__qualname__}"
        logger.warning("%s: taking the module out of %s; options that were given there don't count.", caller, kind)
        module = module.module
    return module


def check_module(module: Any, caller: str) -> None:
    """Refuse a module that can't be replicated with a ModuleError."""
    if isinstance(module, torch.optim.Optimizer):
        raise ModuleError(
            f"{caller}: needs a torch.nn.Module, got the optimizer {type(module).__name__}. Wrap the model, and "
            f"build the optimizer from model.parameters() as usual."
        )
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise ModuleError(
            f"{caller}: needs a module, got the class {module.__name__}. Call it: {module.__name__}(...)."
        )
    if not isinstance(module, nn.Module):
        raise ModuleError(
            f"{caller}: needs a torch.nn.Module, got {type(module).__name__}. "
            f"Put a function into the forward of an nn.Module."
        )
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise ModuleError(
                f"{caller}: a TorchScript module can't be replicated, got one at {name or 'the top'!r}. "
                f"Wrap the eager module it was made from."
            )
        kinds = {k.__qualname__ for k in type(child).__mro__ if k.__module__.startswith("torch.")} & _DISTRIBUTED
        if kinds:
            raise ModuleError(
                f"{caller}: a module that works with other processes can't be replicated, got {kinds.pop()} at "
                f"{name or 'the top'!r}. Pass the module without it; it takes a training loop of its own."
            )


def place_module(module: nn.Module, device: torch.device, caller: str, *, strict: bool = False) -> None:
    """Move all parameters and buffers to one device together, if they are elsewhere."""
    found: dict[torch.device, str] = {}
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if isinstance(tensor, UninitializedTensorMixin):
            raise ModuleError(
                f"{caller}: parameters need a shape, got the lazy {name!r}. Run one batch through the module first."
            )
        found.setdefault(tensor.device, name)
    if len(found) > 1:
        (first, a), (second, b) = list(found.items())[:2]
        raise PlacementError(
            f"{caller}: the module must be on one device, got {a!r} on {first} and {b!r} on {second}. "
            f"Move it with module.to({str(device)!r})."
        )
    elsewhere = next((d for d in found if d != device), None)
    if elsewhere is None:
        return
    if strict:
        raise PlacementError(
            f"module must have its parameters and buffers on device {device} (device_ids[0]) but found one of them "
            f"on device: {elsewhere}"
        )
    logger.info("%s: moving the module from %s to %s", caller, elsewhere, device)
    if not trusted_peers((elsewhere, device)):
        module.to("cpu")
    module.to(device)
