"""Read a checkpoint, checked, and put it into the objects of a run."""

import logging
import operator
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from warnings import warn

from torch import Tensor

from everygpu.checkpoint.directory import as_path, is_run_directory, list_saved
from everygpu.checkpoint.foreign import read_foreign
from everygpu.checkpoint.format import (
    DOCUMENT,
    FORMAT,
    MODEL,
    PENDING,
    TRAINING,
    damaged,
    find_altered,
    is_claimed,
    locate,
    read_document,
    read_tensors,
    require_there,
)
from everygpu.checkpoint.parts import KNOWN, Contents, Kind, Part
from everygpu.checkpoint.states import LOAD_OPTIONS, Fit, check_targets, detach, plan_parts, restore_all
from everygpu.checkpoint.values import cut, decode
from everygpu.devices.seed import plan_rng_restore
from everygpu.errors import (
    CheckpointBusyError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointForeignError,
    CheckpointMismatchError,
    OptionError,
)

logger = logging.getLogger("everygpu")
_MAX_READS = 5


def load(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    strict: bool = True,
    prefix: str = "",
    ignore_mismatched: bool = False,
    rng: bool = False,
    verify: bool = True,
    **extras: Any,
) -> dict[str, Any]:
    """Load a checkpoint; everything is checked before anything is changed.

    It also reads checkpoints of other programs, and never executes anything in them: files of ``torch.save`` with a
    state dict, or with a dict that has one under a usual name; safetensors; shards of both, with an index; and
    directories of ``torch.distributed.checkpoint``. Names may have the prefix of an outer module, as Lightning writes
    them::

        step = everygpu.load("run/checkpoint", model=model, optimizer=optimizer, rng=True)["step"]

    Args:
        path: The directory that `everygpu.save` wrote; that of a `CheckpointManager`, to load its newest intact
            checkpoint; or another program's file or directory.
        model: The module to load into: bare, wrapped or compiled, on any device.
        optimizer: The optimizer to load into; its tensors go to its parameters' devices. Also pass the model, because
            the state is found by the names of the parameters.
        scheduler: The scheduler to load into.
        strict: Whether a module's names must be exactly those saved. Shapes must fit in any case.
        prefix: Load only tensors whose saved names begin with this, which is removed.
        ignore_mismatched: Leave tensors of the model with other shapes as they are, and log their names.
        rng: Whether to restore the random states of Python, NumPy, torch and the CUDA devices of this machine.
        verify: Whether to compare every byte with ``SHA256SUMS``.
        **extras: Objects that were saved as extras, restored in place.
    Returns:
        The extras that were not passed, on the CPU: plain values as they were saved, objects as their state
        (a module as its names and tensors); and the ``step`` of a manager's checkpoint.
    Raises:
        CheckpointNotFoundError: there is nothing at the path.
        CheckpointForeignError: its format is unknown or newer than this version, or reading it would execute code.
        CheckpointDamagedError: a file is missing, cut off or altered.
        CheckpointBusyError: savers replaced the checkpoint again and again while it was read.
        CheckpointMismatchError: names, shapes, parameter groups or classes differ, or a part was not saved.
        CheckpointContentError: a target can't be loaded into.
        OptionError: the path is none, or empty; or nothing is asked for, and there are no extras to return.
    Source:
        ``torch.load(weights_only=True)``; ``Module.load_state_dict``, which changes tensors before it has checked all.
    """
    known = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    targets = {name: target for name, target in known.items() if target is not None} | extras
    check_targets(targets, "load", LOAD_OPTIONS)
    fit = Fit(strict=strict, prefix=prefix, ignore_mismatched=ignore_mismatched)
    contents = read_any(as_path(path, "load"), verify=verify)
    if "model" in targets:
        contents.require_model(path)
    restores = plan_parts(contents, targets, fit)
    if rng and contents.rng is None:
        raise CheckpointMismatchError(
            f"load: {path} has no random states: another program wrote it. Leave out rng=True."
        )
    if rng:  # a name that nothing else can have
        try:
            restores["rng"] = plan_rng_restore(contents.rng)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as cause:
            what = f"The saved random states are damaged ({type(cause).__name__}: {cut(cause)})"
            raise CheckpointDamagedError(f"load: {what}. Nothing was loaded; leave out rng=True.") from cause
    rest = {name: part for name, part in contents.extras.items() if name not in targets}
    values = detach({n: p.state["values"] if p.kind == "module" else p.state for n, p in rest.items()})
    if not restores and not values and contents.step is None:
        raise OptionError(f"load: There is nothing to load into, nor to return from {path}. Pass model=model.")
    restore_all(targets, restores)
    return dict(values) if contents.step is None else {**values, "step": contents.step}


def read_any(path: Path, *, verify: bool = True, section: str | None = None) -> Contents:
    """Read a checkpoint of any format, a run's newest whole one, or of a file the state dict named ``section``."""
    require_there(path)
    if is_run_directory(path):
        contents = _read_run(path, verify)
    elif is_claimed(path):
        contents = _read_steadily(path, verify)
    else:
        contents = read_foreign(path, section)
        for note in contents.notes:
            logger.warning("%s: %s.", path, note)
        return contents
    if section is None:
        return contents
    parts = {**contents.parts, **contents.extras}
    modules = {name: part for name, part in parts.items() if part.kind == "module"}
    if section not in modules:
        raise CheckpointMismatchError(
            f"load: {section!r} is no module in the checkpoint. There are: {', '.join(map(repr, modules)) or 'none'}."
        )
    return replace(contents, parts={"model": modules[section]}, extras={}, section=section)


def _read_run(path: Path, verify: bool) -> Contents:
    """Read a run's newest checkpoint that is whole."""
    problems: list[str] = []
    all_saved = list_saved(path)
    for position, saved in enumerate(all_saved, 1):
        try:
            contents = _read_steadily(saved.path, verify)
        except (CheckpointDamagedError, CheckpointForeignError) as error:
            problems.append(f"\n  {error}")
            continue
        problems += [f"\n  {other.problem}" for other in all_saved[position:] if not other.is_readable]
        if problems:
            warn(f"load: {saved.path} is taken. Others are damaged:{''.join(problems)}", stacklevel=3)
        return contents
    raise CheckpointDamagedError(f"load: No checkpoint in {path} is whole. Nothing was loaded.{''.join(problems)}")


def _read_steadily(path: Path, verify: bool) -> Contents:
    """Read the checkpoint at the path; again, if a save replaced it meanwhile."""
    for _ in range(_MAX_READS):
        before = _stamp(path)
        try:
            contents = read_native(path, verify)
        except CheckpointError:
            if _stamp(path) == before:
                raise
        else:
            if _stamp(path) == before:
                return contents
    raise CheckpointBusyError(f"load: {path} was replaced {_MAX_READS} times while it was read. Wait for the savers.")


def _stamp(directory: Path) -> list[object]:
    """Return what changes when a save becomes the checkpoint, and when it puts a file in place."""
    stamp: list[object] = []
    with suppress(OSError):
        stamp += sorted(os.listdir(directory / PENDING))
    with suppress(OSError):
        stat = locate(directory, DOCUMENT).stat()
        stamp += [stat.st_ino, stat.st_mtime_ns]
    return stamp


def read_native(directory: Path, verify: bool = False) -> Contents:
    """Read every part of a checkpoint of everygpu."""
    document = read_document(directory)
    if not verify:
        logger.info("load: %s is read without comparing it with its SHA-256.", directory)
    elif altered := find_altered(directory, document, lambda num_bytes: None):
        raise altered[0]
    model, training = (read_tensors(directory, document, stem) for stem in (MODEL, TRAINING))
    try:
        parts = {
            name: decode_part(part, model if name == "model" else training) for name, part in document["parts"].items()
        }
        run = document.get("run")
        return Contents(
            format=FORMAT,
            parts={name: part for name, part in parts.items() if name in KNOWN},
            extras={name: part for name, part in parts.items() if name not in KNOWN},
            libraries={str(name): str(number) for name, number in document.get("libraries", {}).items()},
            rng=decode(document["rng"], {}),
            step=None if run is None else operator.index(run["step"]),
        )
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as cause:
        what = f"has an unknown structure ({type(cause).__name__}: {cause})"
        raise damaged(directory / DOCUMENT, what) from cause


def decode_part(part: Any, tensors: dict[str, Tensor]) -> Part:
    """Make a part from its JSON; a LookupError, TypeError or ValueError if the JSON describes none."""
    kind, state = part["kind"], decode(part["state"], tensors)
    if kind not in get_args(Kind):
        raise ValueError(f"unknown kind {kind!r}")
    if kind == "module":
        for names in (state["values"], state["versions"]):
            if not isinstance(names, dict) or not all(isinstance(name, str) for name in names):
                raise TypeError("a module's values and versions must be dicts with names")
        if not all(isinstance(entry, dict) for entry in state["versions"].values()):
            raise TypeError("what is known of a version must be a dict")
    class_name, parameters = part.get("class"), part.get("parameters")
    names = [name for group in parameters or () for name in (group if isinstance(group, list) else [{}])]
    if not all(isinstance(name, str | None) for name in (class_name, *names)):
        raise TypeError(f"class and parameters must be names, got {class_name!r} and {parameters!r}")
    return Part(kind=kind, state=state, class_name=class_name, parameters=parameters)
