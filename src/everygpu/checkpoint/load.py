"""Read a checkpoint into the objects of a run."""

import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, get_args

import torch

from everygpu.checkpoint.directory import as_path
from everygpu.checkpoint.foreign import is_foreign, read_parts
from everygpu.checkpoint.modules import Fit, Match
from everygpu.checkpoint.read import Contents, Part, read_contents
from everygpu.checkpoint.rng import plan_rng_restore
from everygpu.checkpoint.states import kind_of, plan_restore, require_kind, require_names
from everygpu.errors import CheckpointContentError, CheckpointMismatchError, DeviceError, OptionError


def load(
    path: str | os.PathLike[str],
    *misplaced: NoReturn,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    strict: bool = True,
    match: Match = "name",
    prefix: str = "",
    ignore_mismatched: bool = False,
    rng: bool = False,
    map_location: Any = None,
    verify: bool = True,
    **extras: Any,
) -> dict[str, Any]:
    """Load a checkpoint; everything is checked before anything is changed.

    Foreign checkpoints are read too, without executing anything in them: files of ``torch.save`` that hold
    a state dict or a dict with one under a usual name, safetensors, both in shards with an index, and
    directories of ``torch.distributed.checkpoint``. Names under a prefix of an outer module, as Lightning
    writes them, fit the model inside::

        step = everygpu.load("run/checkpoint", model=model, optimizer=optimizer, rng=True)["step"]

    Args:
        path: The directory that `everygpu.save` wrote; that of a `CheckpointManager`, whose newest checkpoint is
            loaded, or the newest before it that is whole, with a warning that names the damage; or a foreign
            file or directory.
        model: The module to load into: bare, wrapped or compiled, on any device.
        optimizer: The optimizer to load into; its tensors go to its parameters' devices.
        scheduler: The scheduler to load into.
        strict: Whether a module's names must be exactly those saved. Shapes must fit in any case.
        match: ``"name"``; or ``"order"`` for a model whose tensors have the same shapes in the same order
            under other names.
        prefix: Load only those of the model's tensors whose saved names begin with it, without it.
        ignore_mismatched: Leave the model's tensors of other shapes as they are, and name them in the log.
        rng: Whether to restore the random states of Python, NumPy and torch. CUDA devices that are
            not here are left out. Foreign checkpoints have none that could be read.
        map_location: The device for tensors in the result; by default the CPU.
        verify: Whether to compare every byte with the SHA-256 in the manifest.
        **extras: Objects that were saved as extras, restored in place.
    Returns:
        The extras that were not passed: plain values as they were saved, objects as their state
        (a module as its names and tensors).
    Raises:
        CheckpointNotFoundError: there is nothing at the path.
        CheckpointForeignError: it is of no format that is known, or can't be read without executing what
            is in it, or is of a newer format.
        CheckpointDamagedError: a file is missing, cut off or altered.
        CheckpointMismatchError: names, shapes, parameter groups or an optimizer's or scheduler's class differ, or a
            part was not saved.
        CheckpointContentError: a target can't be loaded into.
        DeviceError: map_location is no device.
        OptionError: match is neither of the two; the path is none, or empty; or nothing is asked for, and there are
            no extras to return.
    Source:
        ``torch.load(weights_only=True)`` and ``Module.load_state_dict``, which changes tensors before it has checked
        all of them.
    """
    require_names(misplaced, "load", "load(path, model=model)")
    targets = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    targets = {name: target for name, target in targets.items() if target is not None}
    _check_targets(targets, extras)
    _check_match(match)
    fit = Fit(strict=strict, match=match, prefix=prefix, ignore_mismatched=ignore_mismatched)
    device = _parse_device(map_location)
    where = as_path(path, "load")
    if is_foreign(where):
        contents = _read_foreign(where, targets, extras, device, prefix)
    else:
        contents = read_contents(where, targets, device, verify)
    plans = _plan_all(contents, targets, extras, fit)
    if rng:
        plans.append(_plan_rng(contents, path))
    rest = {name: _plain(part) for name, part in contents.extras.items() if name not in extras}
    if not plans and not rest:
        raise OptionError(
            f"load: something to load into must be passed, as {path} has no extras to return, got nothing. "
            f"Write load(path, model=model)."
        )
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


def _check_match(match: object) -> None:
    if match not in get_args(Match):
        raise OptionError(f"load: match must be 'name' or 'order', got {match!r}. Choose one of the two.")


def _parse_device(map_location: Any) -> torch.device:
    try:
        return torch.empty(0, device="cpu" if map_location is None else map_location).device
    except (RuntimeError, TypeError, AssertionError) as cause:  # AssertionError: torch without CUDA
        raise DeviceError(
            f"load: map_location must be a device of this machine, got {map_location!r}. "
            f"Use for instance 'cpu' or 'cuda:0'."
        ) from cause


def _plan_all(
    contents: Contents, targets: dict[str, Any], extras: dict[str, Any], fit: Fit
) -> list[Callable[[], object]]:
    others = Fit(strict=fit.strict)
    plans = [_plan(contents.extras, name, target, others) for name, target in extras.items()]
    # The model comes last: what is checked least is restored first.
    return plans + [_plan(contents.parts, name, targets[name], fit) for name in reversed(targets)]


def _plan_rng(contents: Contents, path: str | os.PathLike[str]) -> Callable[[], object]:
    if contents.rng is None:
        raise CheckpointMismatchError(
            f"load: random states are only in checkpoints of everygpu.save, got {path}. Leave out rng=True."
        )
    return plan_rng_restore(contents.rng)


def _read_foreign(
    path: Path, targets: dict[str, Any], extras: dict[str, Any], device: torch.device, prefix: str
) -> Contents:
    parts, rest = read_parts(path, targets, extras, device, prefix)
    return Contents(
        parts={name: Part(kind=kind, state=state) for name, (kind, state) in parts.items()},
        extras={name: Part(kind=kind, state=state) for name, (kind, state) in rest.items()},
        rng=None,
    )


def _plan(parts: dict[str, Part], name: str, target: object, fit: Fit) -> Callable[[], object]:
    if name not in parts:
        near = get_close_matches(name, parts, n=1)
        hint = f" Did you mean {near[0]}?" if near else " Leave it out, or save it too."
        raise CheckpointMismatchError(
            f"load: the checkpoint must have what is asked for, got none named {name}. Nothing was loaded.{hint}"
        )
    part = parts[name]
    return plan_restore(target, name, part.kind, part.state, fit, part.class_name)


def _plain(part: Part) -> Any:
    return part.state["values"] if part.kind == "module" else part.state
