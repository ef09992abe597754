"""Read a checkpoint from the disk, checked, before a load changes anything."""

import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from warnings import warn

import torch
from torch import Tensor

from everygpu.checkpoint.directory import find_directory
from everygpu.checkpoint.foreign import read_foreign
from everygpu.checkpoint.format import (
    DOCUMENT,
    FORMAT,
    MODEL,
    TRAINING,
    damaged,
    find_altered,
    is_claimed,
    read_document,
    read_tensors,
)
from everygpu.checkpoint.modules import check_module
from everygpu.checkpoint.parts import KNOWN, Contents, Kind, Part
from everygpu.checkpoint.run_directory import is_run_directory, list_saved, step_of
from everygpu.checkpoint.values import decode
from everygpu.errors import CheckpointDamagedError, CheckpointError, CheckpointForeignError, CheckpointMismatchError

logger = logging.getLogger("everygpu")
_MAX_READS = 5
_CPU = torch.device("cpu")


def read_any(
    path: Path,
    *,
    restored: Collection[str] = (),
    device: torch.device = _CPU,
    verify: bool = True,
    section: str | None = None,
    with_values: bool = True,
) -> Contents:
    """Read a checkpoint of any format: ours, a run's newest whole one, or what `read_foreign` takes.

    Args:
        path: Where it is.
        restored: Names of the parts that go into objects, which want their tensors on the CPU.
        device: Where the tensors of all other parts go.
        verify: Whether to compare every byte with its digest.
        section: The name of the state dict to take for the model's, where it is not the usual one.
        with_values: False allows tensors on the meta device.
    """
    if is_run_directory(path):
        contents = _read_run(path, restored, device, verify)
    elif not path.exists() or is_claimed(path):
        contents = _read_steadily(path, restored, device, verify)
    else:
        contents = read_foreign(path, section=section, with_values=with_values)
        for note in contents.notes:
            logger.warning("%s: %s.", path, note)
        return contents
    return contents if section is None else _take_section(contents, section)


def _read_run(path: Path, restored: Collection[str], device: torch.device, verify: bool) -> Contents:
    """Read a run's newest checkpoint that is whole."""
    problems: list[str] = []
    all_saved = list_saved(path)
    for position, saved in enumerate(all_saved, 1):
        try:
            contents = _read_steadily(saved.path, restored, device, verify)
        except (CheckpointDamagedError, CheckpointForeignError) as error:
            problems.append(str(error))
            continue
        problems += [other.problem for other in all_saved[position:] if not other.is_readable]
        if problems:
            listed = "".join(f"\n  {problem}" for problem in problems)
            warn(f"load: {saved.path} is taken. Others are damaged:{listed}", stacklevel=3)
        return contents
    listed = "".join(f"\n  {problem}" for problem in problems)
    raise CheckpointDamagedError(f"load: No checkpoint in {path} is whole. Nothing was loaded.{listed}")


def _read_steadily(path: Path, restored: Collection[str], device: torch.device, verify: bool) -> Contents:
    """Read the checkpoint at the path; again, if a save replaced it meanwhile."""
    for _ in range(_MAX_READS):
        directory = find_directory(path)
        before = _stamp(directory)
        try:
            contents = read_native(directory, restored, device, verify)
        except CheckpointError:
            if _stamp(directory) == before:
                raise
        else:
            if _stamp(directory) == before:
                step = step_of(path)
                if contents.step is not None and step is not None and contents.step != step:
                    warn(
                        f"load: {path} is taken, which holds the checkpoint of step {contents.step}: its files were "
                        f"moved.",
                        stacklevel=4,
                    )
                return contents
    raise CheckpointDamagedError(
        f"load: {path} was replaced {_MAX_READS} times while it was read. Load it while nothing is saving there."
    )


def _stamp(directory: Path) -> tuple[int, int] | None:
    try:
        stat = (directory / DOCUMENT).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def read_native(
    directory: Path, restored: Collection[str] = (), device: torch.device = _CPU, verify: bool = False
) -> Contents:
    """Read every part of a checkpoint of ours."""
    document = read_document(directory)
    if not verify:
        logger.info("load: %s is read without comparing it with its SHA-256.", directory)
    elif altered := find_altered(directory, document):
        raise altered[0]
    model, training = (read_tensors(directory, document, stem) for stem in (MODEL, TRAINING))
    to_objects, elsewhere = _Copies(training, _CPU), _Copies(training, device)
    try:
        parts = {
            name: _decode_part(part, model if name == "model" else to_objects if name in restored else elsewhere)
            for name, part in document["parts"].items()
        }
        run = document.get("run")
        return Contents(
            format=FORMAT,
            parts={name: part for name, part in parts.items() if name in KNOWN},
            extras={name: part for name, part in parts.items() if name not in KNOWN},
            libraries={str(name): str(number) for name, number in document.get("libraries", {}).items()},
            rng=decode(document["rng"], {}),
            step=None if run is None else int(run["step"]),
        )
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as cause:
        what = f"has an unknown structure ({type(cause).__name__}: {cause})"
        raise damaged(directory / DOCUMENT, what) from cause


class _Copies(dict[str, Tensor]):
    """Tensors that outlive the file, each copied when it is first asked for."""

    def __init__(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        super().__init__()
        self._tensors, self._device = tensors, device

    def __missing__(self, name: str) -> Tensor:
        self[name] = self._tensors[name].to(self._device, copy=True)
        return self[name]


def _decode_part(part: Any, tensors: dict[str, Tensor]) -> Part:
    kind, state = part["kind"], decode(part["state"], tensors)
    if kind not in get_args(Kind):
        raise ValueError(f"unknown kind {kind!r}")
    if kind == "module":
        check_module(state)
    class_name, parameters = part.get("class"), part.get("parameters")
    if not isinstance(class_name, str | None) or not isinstance(parameters, list | None):
        raise TypeError(f"class and parameters must be names, got {class_name!r} and {parameters!r}")
    return Part(kind=kind, state=state, class_name=class_name, parameters=parameters)


def _take_section(contents: Contents, section: str) -> Contents:
    """Take a module that was saved under another name for the model."""
    parts = {**contents.parts, **contents.extras}
    modules = {name: part for name, part in parts.items() if part.kind == "module"}
    if section not in modules:
        raise CheckpointMismatchError(
            f"load: {section!r} is no module in the checkpoint. There are: {', '.join(map(repr, modules)) or 'none'}."
        )
    return replace(contents, parts={"model": modules[section]}, extras={}, section=section)
