"""Write a checkpoint."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from warnings import warn

import torch
from torch import Tensor

from everygpu.checkpoint import manifest as files
from everygpu.checkpoint.background import Background, Check
from everygpu.checkpoint.digests import MAX_WRITERS, HashingPool
from everygpu.checkpoint.directory import as_path, new_directory, resolve_target
from everygpu.checkpoint.encode import Json, encode
from everygpu.checkpoint.hashed_file import HashedFile, new_hashed_file
from everygpu.checkpoint.manifest import FileRecord, Place
from everygpu.checkpoint.one_writer import one_writer
from everygpu.checkpoint.regular_file import MAX_DOCUMENT_BYTES
from everygpu.checkpoint.rng import take_rng_states
from everygpu.checkpoint.states import kind_of, require_kind, require_names, take_state
from everygpu.checkpoint.tensors import write_tensors
from everygpu.checkpoint.trainers import class_name
from everygpu.checkpoint.writable import must_be_writable
from everygpu.errors import CheckpointContentError, OptionError
from everygpu.ranks.membership import is_main

LOAD_OPTIONS = frozenset({"strict", "match", "prefix", "ignore_mismatched", "rng", "map_location", "verify"})
"""Names that `everygpu.load` takes for itself."""

MANAGER_OPTIONS = frozenset({"keep", "every", "keep_best", "asynchronous", "signals"})
"""Names that `CheckpointManager` takes when it is made. As extras they would be stored, and do nothing."""

_FILE_SUFFIXES = frozenset({".pt", ".pth", ".ckpt", ".bin", ".safetensors"})
"""Ends of names by which other programs expect a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The state of a run, taken apart into what goes into each file."""

    state: Json
    """The content of state.json."""
    tensors: dict[str, dict[str, Tensor]]
    """By file and name: the run's own tensors, not copies."""


def save(
    path: str | os.PathLike[str],
    *misplaced: NoReturn,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    **extras: Any,
) -> Path:
    """Save a training run to a directory, so that either the old checkpoint or the new one is there.

    The directory holds ``model.safetensors``, ``optimizer.safetensors``, ``state.json`` (structure,
    scheduler, extras, random states), ``state.safetensors`` where those have tensors, and
    ``manifest.json`` with the SHA-256 of all of them. It is written to ``.NAME.tmp-*`` beside the path,
    synced and renamed. The checkpoint that was there is renamed to ``.NAME.old-*`` for that moment and
    removed at the end; if the process dies in between, `everygpu.load` finds it there::

        everygpu.save("run/checkpoint", model=model, optimizer=optimizer, step=1200)

    Under torchrun rank 0 writes what it has, and the others wait until it is written. Where only rank 0 calls it, as
    under ``if everygpu.is_main()``, nothing waits. What differs by rank has to be gathered first.

    Args:
        path: The directory, new or an earlier checkpoint; ``~`` is the home, symbolic links to it are followed.
        model: A module, bare or wrapped. Names are stored without the prefixes of wrappers, tied
            tensors once.
        optimizer: Any object with state_dict and load_state_dict.
        scheduler: Likewise.
        **extras: Under any other name: values JSON can hold, tensors, NumPy arrays, in list, tuple and
            dict at any depth; or an object with state_dict and load_state_dict (a GradScaler, a
            `Feeder`), or a torch.Generator.
    Returns:
        The path. A warning says that it is a directory where it ends as a file does: ``.pt``, ``.pth``, ``.ckpt``,
        ``.bin``, ``.safetensors``.
    Raises:
        CheckpointContentError: a value has no place in a checkpoint, or an extra has the name of an option of `load` or
            `CheckpointManager`; nothing was written.
        CheckpointForeignError: something else than a checkpoint is at the path, or it is the working directory; it is
            left alone.
        OptionError: the path is none, or empty; or there is nothing to save.
        CheckpointBusyError: another saver is writing to the path; its save goes on.
        CheckpointError: writing failed; the old checkpoint is untouched.
        RankError: rank 0 has ended without saving.
    Source:
        ``torch.save``, which writes a pickle over the old file; safetensors for the tensors.
    """
    require_names(misplaced, "save", "save(path, model=model)")
    if not extras and all(part is None for part in (model, optimizer, scheduler)):
        raise OptionError("save: something to save must be passed, got nothing. Write save(path, model=model).")
    where = as_path(path, "save")
    if where.suffix in _FILE_SUFFIXES and is_main():
        warn(
            f"save: a checkpoint is a directory, also where its name ends with {where.suffix}, got {path}: torch.load "
            f"can't read it. For a single file run `everygpu checkpoint convert DIRECTORY FILE{where.suffix}`.",
            stacklevel=2,
        )
    take_and_write(where, partial(collect_states, model, optimizer, scheduler, extras))
    return where


def take_and_write(where: Path, taking: Callable[[], Taken]) -> None:
    """Collect the states of a run and write them, on rank 0; wait for it on the others."""

    def work() -> None:
        taken = with_generators(taking())
        wait_for_devices(taken)
        Background().run(lambda check: write_checkpoint(where, taken, check=check))

    ranks = one_writer()
    ranks.write(ranks.next_key(f"save to {where}"), work)


def with_generators(taken: Taken) -> Taken:
    """Add the states of the random generators, as they are now."""
    return replace(taken, state={**taken.state, "rng": encode(take_rng_states(), "rng", {})})


def collect_states(
    model: object,
    optimizer: object,
    scheduler: object,
    extras: Mapping[str, object],
    on_tensors: Callable[[Mapping[str, Tensor]], object] = lambda _: None,
) -> Taken:
    """Collect the state of everything but the random generators, without copying tensors.

    Args:
        model, optimizer, scheduler, extras: As `save` takes them.
        on_tensors: Called with the model's tensors and the optimizer's as soon as they are known.
    Raises:
        CheckpointContentError: a value has no place in a checkpoint.
    """
    _check_sources(model, {"optimizer": optimizer, "scheduler": scheduler}, extras)
    tensors: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, Tensor] = {}
    state: dict[str, Json] = {"extras": {}}
    with_files = (("model", model, files.MODEL_TENSORS), ("optimizer", optimizer, files.OPTIMIZER_TENSORS))
    for name, value, file in with_files:
        if value is not None:
            tensors[file] = {}
            state[name] = _encode_part(value, "", tensors[file])
            on_tensors(tensors[file])
    if scheduler is not None:
        state["scheduler"] = _encode_part(scheduler, "scheduler", rest)
    for name, value in extras.items():
        state["extras"][name] = _encode_part(value, f"extras.{name}", rest)
    return Taken(state=state, tensors=tensors | ({files.STATE_TENSORS: rest} if rest else {}))


def wait_for_devices(taken: Taken) -> None:
    """Wait until GPUs have computed the tensors: another thread reads them on other streams than the caller's."""
    for device in {t.device for tensors in taken.tensors.values() for t in tensors.values() if t.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def write_checkpoint(
    path: Path,
    taken: Taken,
    place: Place | None = None,
    *,
    check: Check,
    make_way: Callable[[], object] = lambda: None,
) -> Path:
    """Write what was taken from a run to a checkpoint directory.

    Args:
        path: The directory, new or an earlier checkpoint.
        taken: As `take` returned it.
        place: Where the checkpoint stands among those of its run.
        check: Called before each chunk, and before the checkpoint takes its place: what it raises gives the save up.
        make_way: Called when all is written, before the checkpoint takes its place.
    Returns:
        The path.
    Raises:
        CheckpointError: as `save` describes.
    """
    with must_be_writable(path, "save"), new_directory(resolve_target(path)) as directory:
        _write(directory, taken, place, check)
        check()
        make_way()
    return path


def _check_sources(model: object, trained_by: Mapping[str, object], extras: Mapping[str, object]) -> None:
    taken = LOAD_OPTIONS & extras.keys()
    if taken:
        raise CheckpointContentError(
            f"save: names of extras must not be those of load's options, got {min(taken)!r}. Choose another name."
        )
    options = MANAGER_OPTIONS & extras.keys()
    if options:
        raise CheckpointContentError(
            f"save: names of extras must not be those of CheckpointManager's options, got {min(options)!r}. Write "
            f"CheckpointManager(directory, {min(options)}=…), or choose another name."
        )
    if model is not None:
        require_kind(model, "model", "a torch.nn.Module", "save", "module")
    for name, value in trained_by.items():
        if value is not None:
            require_kind(value, name, "an object with state_dict and load_state_dict", "save", "state_dict")


def _encode_part(value: object, path: str, tensors: dict[str, Tensor]) -> Json:
    kind, state = kind_of(value), take_state(value)
    if kind != "module":
        named = class_name(value)
        known = {} if named is None else {"class": named}
        return {"kind": kind, **known, "state": encode(state, path, tensors)}
    # A module's tensors are stored under the very names it has for them.
    values = encode(state["values"], path, tensors)
    return {"kind": kind, "state": {"values": values, "versions": encode(state["versions"], path, tensors)}}


def _write(directory: Path, taken: Taken, place: Place | None, check: Check) -> None:
    def write(name: str, write_content: Callable[[HashedFile], object]) -> FileRecord:
        with new_hashed_file(directory / name, pool, check) as file:
            write_content(file)
            return file.finish()

    with HashingPool(MAX_WRITERS) as pool:
        records = {
            name: write(name, partial(write_tensors, tensors=content)) for name, content in taken.tensors.items()
        }
        text = json.dumps(taken.state, allow_nan=False) + "\n"
        _check_length(text)
        records[files.STATE_FILE] = write(files.STATE_FILE, lambda file: file.write(text.encode()))
        manifest = files.manifest_to_json(files.make_manifest(records, place))
        write(files.MANIFEST_FILE, lambda file: file.write(manifest.encode()))


def _check_length(text: str) -> None:
    """Refuse to write what `load` would refuse to read."""
    if len(text) > MAX_DOCUMENT_BYTES:
        raise CheckpointContentError(
            f"save: the values that are no tensors must fit into {MAX_DOCUMENT_BYTES} bytes of JSON, got {len(text)}. "
            f"Save long lists of numbers as tensors."
        )
