"""Split a foreign checkpoint into parts to restore, each of its target's kind, which the file does not record."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from everygpu.checkpoint.foreign.prefixes import fit_names, rename, strip_prefix
from everygpu.checkpoint.foreign.read import read_foreign
from everygpu.checkpoint.foreign.sections import find_state
from everygpu.checkpoint.modules import select_versions
from everygpu.checkpoint.states import Kind, kind_of
from everygpu.checkpoint.tensors import memory_of
from everygpu.keys import bare_key
from everygpu.tree import map_leaves

logger = logging.getLogger("everygpu")

Part: TypeAlias = tuple[Kind, Any]
"""As `states.plan_restore` takes them."""


def read_parts(
    path: Path, targets: Mapping[str, Any], extras: Mapping[str, Any], device: torch.device, prefix: str = ""
) -> tuple[dict[str, Part], dict[str, Part]]:
    """Read what another program wrote as if `everygpu.save` had written it.

    Args:
        path: As `read_foreign` takes it.
        targets: Those of model, optimizer and scheduler that are wanted.
        extras: Objects to restore that the file has under their names.
        device: Where tensors go that are for neither of them.
        prefix: Of the model's names that are wanted, where the caller has chosen; else it is looked for.
    Returns:
        The wanted parts that are there; everything else in the file.
    Raises:
        CheckpointMismatchError: a model is wanted, and the file has none or several to choose from.
    """
    found = read_foreign(path)
    for note in found.notes:
        logger.warning("%s: %s.", path, note)
    parts: dict[str, Part] = {}
    if "model" in targets:
        parts["model"] = _module_part(found.require_model(path), found.versions, targets["model"], prefix)
    for name, state in (("optimizer", found.optimizer), ("scheduler", found.scheduler)):
        if name in targets and state is not None:
            parts[name] = ("state_dict", detach(state, torch.device("cpu")))
    return parts, {name: _part(value, extras.get(name), device) for name, value in found.extras.items()}


def detach(value: Any, device: torch.device) -> Any:
    """Copy every tensor in a value, so that it outlives the file."""
    return map_leaves(lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf, value)


def _part(value: Any, target: object, device: torch.device) -> Part:
    state = find_state(value) if isinstance(target, nn.Module) else None
    if isinstance(target, nn.Module) and state is not None:
        return _module_part(state, {}, target)
    is_a_state = isinstance(value, Mapping | Tensor) and not isinstance(target, nn.Module)
    return kind_of(target) if is_a_state else "plain", detach(value, device)


def _module_part(state: Mapping[str, Any], versions: Mapping[str, Any], target: nn.Module, chosen: str = "") -> Part:
    # Tensors are copied into the module's own; the module keeps extra state itself.
    cpu = torch.device("cpu")
    state = {name: value if isinstance(value, Tensor) else detach(value, cpu) for name, value in state.items()}
    if chosen:
        part = {name.removeprefix(chosen): value for name, value in state.items() if name.startswith(chosen)}
        values = state | {chosen + name: value for name, value in _with_tied(part, target).items()}
        return "module", {"values": values, "versions": dict(versions)}
    prefix = fit_names(state, target.state_dict().keys())
    values = rename(state, lambda name: strip_prefix(name, prefix)) if prefix else state
    values = _with_tied(values, target)
    inner = select_versions({bare_key(path): version for path, version in versions.items()}, prefix)
    return "module", {"values": values, "versions": inner}


def _with_tied(values: dict[str, Any], target: nn.Module) -> dict[str, Any]:
    """Add names that are missing where the target has their tensor under a name that is there.

    Of tied tensors, safetensors files of Transformers and Accelerate keep one.
    """
    names = {bare_key(name): name for name in values}
    own = {name: tensor for name, tensor in target.state_dict().items() if isinstance(tensor, Tensor)}
    there = {memory_of(tensor): names[bare_key(name)] for name, tensor in own.items() if bare_key(name) in names}
    missing = {name: there.get(memory_of(tensor)) for name, tensor in own.items() if bare_key(name) not in names}
    return values | {name: values[tied] for name, tied in missing.items() if tied is not None}
