"""Read a checkpoint into the objects of a run."""

import os
from typing import Any, NoReturn, get_args

import torch

from everygpu.checkpoint.contents import read_any
from everygpu.checkpoint.directory import as_path
from everygpu.checkpoint.modules import Fit, Match
from everygpu.checkpoint.parts import Part
from everygpu.checkpoint.rng import plan_rng_restore
from everygpu.checkpoint.states import Plan, check_parts, detach, kind_of, require_names
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
        optimizer: The optimizer to load into; its tensors go to its parameters' devices. Pass the model along: the
            state is found by the names of the parameters.
        scheduler: The scheduler to load into.
        strict: Whether a module's names must be exactly those saved. Shapes must fit in any case.
        match: ``"name"``; or ``"order"`` for a model whose tensors have the same shapes in the same order
            under other names.
        prefix: Load only those of the model's tensors whose saved names begin with it, without it.
        ignore_mismatched: Leave the model's tensors of other shapes as they are, and name them in the log.
        rng: Whether to restore the random states of Python, NumPy and torch. CUDA devices that are
            not here are left out. Foreign checkpoints have none that could be read.
        map_location: The device for tensors in the result; by default the CPU.
        verify: Whether to compare every byte with ``SHA256SUMS``.
        **extras: Objects that were saved as extras, restored in place.
    Returns:
        The extras that were not passed: plain values as they were saved, objects as their state
        (a module as its names and tensors); and the ``step`` of a manager's checkpoint.
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
    known = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    targets = {name: target for name, target in known.items() if target is not None} | extras
    check_targets(targets)
    if match not in get_args(Match):
        raise OptionError(f"load: match is 'name' or 'order', got {match!r}.")
    fit = Fit(strict=strict, match=match, prefix=prefix, ignore_mismatched=ignore_mismatched)
    device = _parse_device(map_location)
    contents = read_any(as_path(path, "load"), restored=targets.keys(), device=device, verify=verify)
    if "model" in targets:
        contents.require_model(path)
    plan = Plan(contents, targets, fit)
    if rng and contents.rng is None:
        raise CheckpointMismatchError(
            f"load: {path} has no random states; only checkpoints of everygpu.save do. Leave out rng=True."
        )
    restores = [*plan.restores, *([plan_rng_restore(contents.rng)] if rng else [])]
    rest = {name: _plain(part, device) for name, part in contents.extras.items() if name not in targets}
    if not restores and not rest and contents.step is None:
        raise OptionError(
            f"load: There is nothing to load into, and {path} has no extras to return. Write load(path, model=model)."
        )
    for restore in restores:
        restore()
    return rest if contents.step is None else {**rest, "step": contents.step}


def check_targets(targets: dict[str, Any]) -> None:
    """Refuse what can't be restored in place."""
    check_parts(targets, "load")
    for name, target in targets.items():
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
            f"load: map_location={map_location!r} is no device of this machine. Use for instance 'cpu' or 'cuda:0'."
        ) from cause


def _plain(part: Part, device: torch.device) -> Any:
    state = part.state["values"] if part.kind == "module" else part.state
    return state if part.kind not in (None, "module") else detach(state, device)
