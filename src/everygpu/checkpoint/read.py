"""Read a checkpoint from the disk, checked, before a load changes anything."""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, get_args
from warnings import warn

import torch
from torch import Tensor

from everygpu.checkpoint import manifest as files
from everygpu.checkpoint.directory import find_directory
from everygpu.checkpoint.encode import decode
from everygpu.checkpoint.keys import EXTRA_STATE
from everygpu.checkpoint.modules import is_version
from everygpu.checkpoint.run_directory import Saved, is_run_directory, list_saved, step_of
from everygpu.checkpoint.states import Kind
from everygpu.checkpoint.tensors import read_tensors
from everygpu.errors import CheckpointDamagedError, CheckpointForeignError, EveryGPUError

logger = logging.getLogger("everygpu")
_MAX_READS = 5

ReadTensors: TypeAlias = Callable[[str], dict[str, Tensor]]
"""From a file's name to the tensors in it; none where the checkpoint has no such file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One saved object or value."""

    kind: Kind
    state: Any
    class_name: str | None = None
    """Of an optimizer or a scheduler, where the checkpoint has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Everything a load needs from the disk."""

    parts: dict[str, Part]
    """Those of model, optimizer and scheduler that were saved and are wanted."""
    extras: dict[str, Part]
    rng: Any
    place: files.Place | None = None
    """Among the checkpoints of its run."""


def read_contents(path: Path, wanted: Collection[str], device: torch.device, verify: bool) -> Contents:
    """Read a checkpoint, or the newest one of a run's directory that is whole.

    Args:
        path: A checkpoint's directory, or one that a CheckpointManager saves to.
        wanted: Which of model, optimizer and scheduler to read.
        device: Where the extras' tensors go.
        verify: Whether to compare all bytes with their digests.
    Raises:
        CheckpointError: as `everygpu.load` describes.
    """
    if not is_run_directory(path):
        return _as_named(path, _read_steadily(path, wanted, device, verify))
    problems: list[str] = []
    all_saved = list_saved(path)
    for position, saved in enumerate(all_saved, 1):
        try:
            contents = _as_named(saved.path, _read_steadily(saved.path, wanted, device, verify))
        except (CheckpointDamagedError, CheckpointForeignError) as error:
            problems.append(str(error))
            continue
        problems += [_describe_damage(other.path) for other in all_saved[position:] if _may_be_newer(other, saved)]
        if problems:
            listed = "".join(f"\n  {problem}" for problem in problems)
            warn(f"load: {saved.path} is taken, as what was saved after it is damaged:{listed}", stacklevel=3)
        return contents
    listed = "".join(f"\n  {problem}" for problem in problems)
    raise CheckpointDamagedError(f"load: one checkpoint in {path} must be whole, got none. Nothing was loaded.{listed}")


def _as_named(path: Path, contents: Contents) -> Contents:
    """Warn of a checkpoint in the place of another step's: its files have been moved there."""
    step, place = step_of(path), contents.place
    if step is not None and place is not None and place.step != step:
        warn(
            f"load: {path} is taken, which holds the checkpoint of step {place.step}: its files were moved.",
            stacklevel=4,
        )
    return contents


def _may_be_newer(other: Saved, taken: Saved) -> bool:
    """Tell whether a checkpoint that can't tell when it was saved was changed after another one."""
    try:
        return other.place is None and other.path.stat().st_mtime_ns > taken.path.stat().st_mtime_ns
    except OSError:  # replaced or removed meanwhile
        return False


def _describe_damage(directory: Path) -> str:
    try:
        files.read_manifest(directory)
    except EveryGPUError as error:
        return str(error)
    return f"{directory} can be read by now."


def _read_steadily(path: Path, wanted: Collection[str], device: torch.device, verify: bool) -> Contents:
    """Read the checkpoint at the path; again, if a save replaced it meanwhile."""
    for _ in range(_MAX_READS):
        directory = find_directory(path)
        before = _stamp(directory)
        try:
            contents = _read_directory(directory, wanted, device, verify)
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


def _read_directory(directory: Path, wanted: Collection[str], device: torch.device, verify: bool) -> Contents:
    manifest = files.read_manifest(directory)
    if verify:
        files.check_files(directory, manifest)
    else:
        logger.info("load: %s is read without comparing it with its SHA-256, as verify=False asks.", directory)

    with decoding(directory, manifest) as (state, read):
        saved = {name: state[name] for name in wanted if name in state}
        rest = _copy_each(read(files.STATE_TENSORS), device)
        parts = {name: _decode_part(part, _own_tensors(name, read, rest)) for name, part in saved.items()}
        extras = {name: _decode_part(part, rest) for name, part in state["extras"].items()}
        return Contents(parts=parts, extras=extras, rng=decode(state["rng"], {}), place=manifest.place)


@contextmanager
def decoding(directory: Path, manifest: files.Manifest) -> Iterator[tuple[Any, ReadTensors]]:
    """Give the content of state.json, and what reads a file of tensors, to a block that trusts neither.

    Raises:
        CheckpointDamagedError: the block has found another structure than it should.
    """

    def read(name: str) -> dict[str, Tensor]:
        return read_tensors(directory / name) if name in manifest.files else {}

    state = files.read_json(directory / files.STATE_FILE)
    try:
        yield state, read
    except EveryGPUError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as cause:
        problem = f"has an unknown structure ({type(cause).__name__}: {cause})"
        raise files.damaged(directory / files.STATE_FILE, problem) from cause


def _own_tensors(part: str, read: ReadTensors, rest: dict[str, Tensor]) -> dict[str, Tensor]:
    if part == "model":
        # A module copies into tensors of its own, but keeps its extra state as it is given.
        return {name: t.clone() if EXTRA_STATE in name else t for name, t in read(files.MODEL_TENSORS).items()}
    if part == "optimizer":
        # Copies: an optimizer keeps what it is given, and the file may be removed.
        return _copy_each(read(files.OPTIMIZER_TENSORS), torch.device("cpu"))
    return rest


def _copy_each(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy tensors; one with several names once, as a file can give one tensor names without end."""
    copies = {id(tensor): tensor for tensor in tensors.values()}
    copies = {key: tensor.to(device, copy=True) for key, tensor in copies.items()}
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}


def _decode_part(part: Any, tensors: dict[str, Tensor]) -> Part:
    kind, state = part["kind"], decode(part["state"], tensors)
    if kind not in get_args(Kind):
        raise ValueError(f"unknown kind {kind!r}")
    if kind == "module":
        _check_module(state["values"], state["versions"])
    class_name = part.get("class")
    if not isinstance(class_name, str | None):
        raise TypeError(f"a class must be a name, got {class_name!r}")
    return Part(kind=kind, state=state, class_name=class_name)


def _check_module(values: Any, versions: Any) -> None:
    for names in (values, versions):
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names):
            raise TypeError("a module's values and versions must be dicts with names")
    if not all(is_version(entry) for entry in versions.values()):
        raise TypeError("a version must be a dict with a whole number")
