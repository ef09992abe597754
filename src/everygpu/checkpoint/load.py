"""Read a checkpoint into the objects of a run."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from everygpu.checkpoint import manifest as files
from everygpu.checkpoint.directory import find_directory
from everygpu.checkpoint.encode import decode
from everygpu.checkpoint.foreign import is_foreign, read_parts
from everygpu.checkpoint.rng import plan_rng_restore
from everygpu.checkpoint.states import Kind, kind_of, plan_restore, require_kind
from everygpu.checkpoint.tensors import read_tensors
from everygpu.errors import (
    CheckpointContentError,
    CheckpointDamagedError,
    CheckpointMismatchError,
    DeviceError,
    EveryGPUError,
)

_MAX_READS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One saved object or value."""

    kind: Kind
    state: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Everything a load needs from the disk."""

    parts: dict[str, Part]
    """Those of model, optimizer and scheduler that were saved and are wanted."""
    extras: dict[str, Part]
    rng: Any


def load(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    strict: bool = True,
    rng: bool = False,
    map_location: Any = None,
    **extras: Any,
) -> dict[str, Any]:
    """Load a checkpoint; everything is checked before anything is changed.

    Foreign checkpoints are read too, without executing anything in them: files of ``torch.save`` that hold
    a state dict or a dict with one under a usual name, safetensors, both in shards with an index, and
    directories of ``torch.distributed.checkpoint``. Names under a prefix of an outer module, as Lightning
    writes them, fit the model inside.

    Args:
        path: The directory that `everygpu.save` wrote, or a foreign file or directory.
        model: The module to load into: bare, wrapped or compiled, on any device.
        optimizer: The optimizer to load into; its tensors go to its parameters' devices.
        scheduler: The scheduler to load into.
        strict: Whether the model's names must be exactly those saved. Shapes must fit in any case.
        rng: Whether to restore the random states of Python, NumPy and torch. CUDA devices that are
            not here are left out. Foreign checkpoints have none that could be read.
        map_location: The device for tensors in the result; by default the CPU.
        **extras: Objects that were saved as extras, restored in place.
    Returns:
        The extras that were not passed: plain values as they were saved, objects as their state
        (a module as its names and tensors).
    Raises:
        CheckpointNotFoundError: there is nothing at the path.
        CheckpointForeignError: it is of no format that is known, or can't be read without executing what
            is in it, or is of a newer format.
        CheckpointDamagedError: a file is missing, cut off or altered.
        CheckpointMismatchError: names, shapes or parameter groups differ, or a part was not saved.
        CheckpointContentError: a target can't be loaded into.
        DeviceError: map_location is no device.
    """
    targets = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    targets = {name: target for name, target in targets.items() if target is not None}
    _check_targets(targets, extras)
    device = _parse_device(map_location)
    if is_foreign(Path(path)):
        contents = _read_foreign(Path(path), targets, extras, device)
    else:
        contents = _read(Path(path), targets, device)
    # The model comes last: what is checked least is restored first.
    plans = [_plan(contents.extras, name, target, strict) for name, target in extras.items()]
    plans += [_plan(contents.parts, name, targets[name], strict) for name in reversed(targets)]
    if rng and contents.rng is None:
        raise CheckpointMismatchError(
            f"load: random states are only in checkpoints of everygpu.save, got {path}. Leave out rng=True."
        )
    if rng:
        plans.append(plan_rng_restore(contents.rng))
    rest = {name: _plain(part) for name, part in contents.extras.items() if name not in extras}
    for restore in plans:
        restore()
    return rest


def _check_targets(targets: dict[str, Any], extras: dict[str, Any]) -> None:
    for name, target in targets.items():
        if name == "model":
            require_kind(target, name, "a torch.nn.Module", "load", "module")
        else:
            require_kind(target, name, "an object with state_dict and load_state_dict", "load", "state_dict")
    for name, target in extras.items():
        if kind_of(target) == "plain":
            raise CheckpointContentError(
                f"load: {name} must be an object to restore in place, got {type(target).__qualname__}. "
                f"Leave it out and read it from load's result."
            )


def _parse_device(map_location: Any) -> torch.device:
    try:
        return torch.empty(0, device="cpu" if map_location is None else map_location).device
    except (RuntimeError, TypeError, AssertionError) as cause:  # AssertionError: torch without CUDA
        raise DeviceError(
            f"load: map_location must be a device of this machine, got {map_location!r}. "
            f"Use for instance 'cpu' or 'cuda:0'."
        ) from cause


def _read(path: Path, wanted: dict[str, Any], device: torch.device) -> Contents:
    """Read the checkpoint at the path; again, if a save replaced it meanwhile."""
    for _ in range(_MAX_READS):
        directory = find_directory(path)
        before = _stamp(directory)
        try:
            contents = _read_directory(directory, wanted, device)
        except EveryGPUError:
            if _stamp(directory) == before:
                raise
        else:
            if _stamp(directory) == before:
                return contents
    raise CheckpointDamagedError(
        f"load: the checkpoint must stay in place while it is read, got {path} replaced {_MAX_READS} times. "
        f"Load it while nothing is saving there."
    )


def _stamp(directory: Path) -> tuple[int, int] | None:
    try:
        stat = (directory / files.MANIFEST_FILE).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _read_directory(directory: Path, wanted: dict[str, Any], device: torch.device) -> Contents:
    manifest = files.read_manifest(directory)

    def read(name: str) -> dict[str, Tensor]:
        return read_tensors(directory / name) if name in manifest.files else {}

    state = files.read_json(directory / files.STATE_FILE)
    try:
        saved = {name: state[name] for name in wanted if name in state}
        rest = {name: tensor.to(device, copy=True) for name, tensor in read(files.STATE_TENSORS).items()}
        parts = {name: _decode_part(part, _own_tensors(name, read, rest)) for name, part in saved.items()}
        extras = {name: _decode_part(part, rest) for name, part in state["extras"].items()}
        return Contents(parts=parts, extras=extras, rng=decode(state["rng"], {}))
    except EveryGPUError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as cause:
        raise files.damaged(directory / files.STATE_FILE, f"has an unknown structure ({cause!r})") from cause


def _read_foreign(path: Path, targets: dict[str, Any], extras: dict[str, Any], device: torch.device) -> Contents:
    parts, rest = read_parts(path, targets, extras, device)
    return Contents(
        parts={name: Part(kind=kind, state=state) for name, (kind, state) in parts.items()},
        extras={name: Part(kind=kind, state=state) for name, (kind, state) in rest.items()},
        rng=None,
    )


def _own_tensors(part: str, read: Callable[[str], dict[str, Tensor]], rest: dict[str, Tensor]) -> dict[str, Tensor]:
    if part == "model":
        return read(files.MODEL_TENSORS)
    if part == "optimizer":
        # Copies: an optimizer keeps what it is given, and the file may be removed.
        return {name: tensor.clone() for name, tensor in read(files.OPTIMIZER_TENSORS).items()}
    return rest


def _decode_part(part: Any, tensors: dict[str, Tensor]) -> Part:
    kind, state = part["kind"], decode(part["state"], tensors)
    if kind not in get_args(Kind):
        raise ValueError(f"unknown kind {kind!r}")
    if kind == "module" and not all(isinstance(state[key], dict) for key in ("values", "versions")):
        raise TypeError("a module's values and versions must be dicts")
    return Part(kind=kind, state=state)


def _plan(parts: dict[str, Part], name: str, target: object, strict: bool) -> Callable[[], object]:
    if name not in parts:
        near = get_close_matches(name, parts, n=1)
        hint = f" Did you mean {near[0]}?" if near else " Leave it out, or save it too."
        raise CheckpointMismatchError(
            f"load: the checkpoint must have what is asked for, got none named {name}. Nothing was loaded.{hint}"
        )
    return plan_restore(target, name, parts[name].kind, parts[name].state, strict)


def _plain(part: Part) -> Any:
    return part.state["values"] if part.kind == "module" else part.state
