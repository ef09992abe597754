"""Write a checkpoint."""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from everygpu import errors
from everygpu.checkpoint.background import Background, Taken
from everygpu.checkpoint.by_ranks import Dealt, deal, is_spread, write_taken, write_together
from everygpu.checkpoint.directory import as_path, must_be_writable, new_directory, resolve_target
from everygpu.checkpoint.format import MODEL, TRAINING
from everygpu.checkpoint.rng import take_rng_states
from everygpu.checkpoint.states import check_parts, encode_parts
from everygpu.checkpoint.values import encode
from everygpu.errors import CheckpointContentError, CheckpointError, EveryGPUError, OptionError
from everygpu.ranks.group import joined
from everygpu.ranks.membership import is_main

LOAD_OPTIONS = frozenset({"strict", "prefix", "ignore_mismatched", "rng", "verify"})
"""Names that `everygpu.load` takes for itself."""

BEGIN_S = 600.0
"""How long other ranks wait for rank 0 to begin to write, as NCCL's collectives wait for a rank that is late."""

_FILE_SUFFIXES = frozenset({".pt", ".pth", ".ckpt", ".bin", ".safetensors"})
"""Ends of names by which other programs expect a file."""


def save(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    **extras: Any,
) -> Path:
    """Save a training run to a directory, so that either the old checkpoint or the new one is there.

    The directory holds ``model.safetensors``, ``training.safetensors`` (all other tensors), ``checkpoint.json``
    (structure, plain values, random states) and ``SHA256SUMS``. It is written beside the path as ``.NAME.tmp``,
    synced, and takes the place of the old one in one step. Other files in the old directory stay, such as the
    ``config.json`` by which Transformers reads ``model.safetensors``::

        everygpu.save("run/checkpoint", model=model, optimizer=optimizer, step=1200)

    Under torchrun rank 0 writes what it has, and the others wait until it is written. Where only rank 0 calls it, as
    under ``if everygpu.is_main()``, nothing waits. What differs by rank has to be gathered first.
    A model that is shared out, by ``DataParallel(shard=...)`` or ``fully_shard``, is written by all ranks, each some
    files with whole tensors.

    Args:
        path: The directory, new or an earlier checkpoint; ``~`` is the home, symbolic links to it are followed.
        model: A module, bare or wrapped. Names are stored without the prefixes of wrappers, tied
            tensors once.
        optimizer: Any object with state_dict and load_state_dict. Its state is kept by the names that its parameters
            have in the modules that are saved along.
        scheduler: Likewise.
        **extras: Under any other name: values JSON can hold, tensors, NumPy arrays, in list, tuple and
            dict at any depth; or an object with state_dict and load_state_dict (a GradScaler, a
            `Feeder`), or a torch.Generator.
    Returns:
        The path. A warning says that it is a directory where it ends as a file does: ``.pt``, ``.pth``, ``.ckpt``,
        ``.bin``, ``.safetensors``.
    Raises:
        CheckpointContentError: a value has no place in a checkpoint, or an extra has the name of an option of `load`;
            nothing was written.
        CheckpointForeignError: something else than a checkpoint is at the path, or it is the working directory; it is
            left alone.
        OptionError: the path is none, or empty; or there is nothing to save.
        CheckpointBusyError: another saver is writing to the path; its save goes on.
        CheckpointError: writing failed; the old checkpoint is untouched.
        RankError: rank 0 has ended without saving.
    Source:
        ``torch.save``, which writes a pickle over the old file; safetensors for the tensors.
    """
    known = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    parts = {name: part for name, part in known.items() if part is not None} | extras
    if not parts:
        raise OptionError("save: There is nothing to save. Write save(path, model=model).")
    where = as_path(path, "save")
    if where.suffix in _FILE_SUFFIXES and is_main():
        warn(
            f"save: {path} becomes a directory, also as its name ends with {where.suffix}: torch.load can't read it. "
            f"For a single file run `everygpu checkpoint convert DIRECTORY FILE{where.suffix}`.",
            stacklevel=2,
        )

    def work() -> None:
        taken = take(parts)
        wait_for_devices(taken)
        Background().run(lambda: write_checkpoint(where, taken))

    ranks = one_writer()
    key = ranks.next_key(f"save to {where}")
    if is_spread(parts):
        dealt = deal(take(parts), key)
        Background().run(lambda: write_together(ranks, dealt, lambda: write_checkpoint(where, dealt)))
    else:
        ranks.write(key, work)
    return where


def take(parts: Mapping[str, object]) -> Taken:
    """Take the states of objects and of the random generators, without copying tensors."""
    check_parts(parts, "save")
    if reserved := LOAD_OPTIONS & parts.keys():
        raise CheckpointContentError(
            f"save: {min(reserved)!r} is an option of load. Choose another name for what is saved."
        )
    tensors: dict[str, dict[str, Tensor]] = {MODEL: {}, TRAINING: {}}
    encoded = encode_parts(parts, tensors)
    document = {"parts": encoded, "rng": encode(take_rng_states(), "rng", {})}
    return Taken(document=document, tensors={stem: group for stem, group in tensors.items() if group})


def wait_for_devices(taken: Taken) -> None:
    """Wait until GPUs have computed the tensors: another thread reads them on other streams than the caller's."""
    for device in {t.device for tensors in taken.tensors.values() for t in tensors.values() if t.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def write_checkpoint(path: Path, taken: Taken | Dealt, run: Mapping[str, Any] | None = None) -> Path:
    """Write what was taken from a run; ``run`` says where it stands there: step, serial, metrics."""
    document = {**({} if run is None else {"run": dict(run)}), **taken.document}
    is_locked = run is not None  # by the run's manager
    with must_be_writable(path, "save"), new_directory(resolve_target(path), is_locked=is_locked) as directory:
        write_taken(directory, taken, document)
    return path


class OneWriter:
    """Under ranks: rank 0 writes, and the others wait until it has, by a key and a count of each piece of work.

    They read a note that rank 0 leaves, instead of meeting it in a collective: a save that only rank 0 calls, as in
    ``if rank == 0``, waits for nothing. Without a group that has been joined, there is no way to wait.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def next_key(self, name: str) -> str:
        """Name the next piece of work of a name, as "save to runs/last"; the same on all ranks."""
        self._counts[name] += 1
        return f"{name}, number {self._counts[name]}"

    def write(self, key: str, work: Callable[[], object]) -> None:
        """Do the work on rank 0, and wait for it on the others."""
        if not is_main():
            self.wait(key)
            return
        _leave(f"begin to {key}", None)
        try:
            work()
        except BaseException as error:
            _leave(key, {"kind": type(error).__name__, "message": str(error)})
            raise
        _leave(key, None)

    def wait(self, key: str) -> None:
        """Wait until rank 0 has done the work, and raise what it has raised."""
        group = joined()
        if group is None:
            return
        group.read_note(f"begin to {key}", BEGIN_S)
        found = json.loads(group.read_note(key))
        if found is None:
            return
        kind = getattr(errors, found["kind"], None)
        if isinstance(kind, type) and issubclass(kind, EveryGPUError):
            raise kind(found["message"])
        raise CheckpointError(f"save: rank 0 must be able to write, got {found['kind']} there: {found['message']}")


@cache
def one_writer() -> OneWriter:
    """Return that of this process."""
    return OneWriter()


def _leave(key: str, outcome: object) -> None:
    group = joined()
    if group is not None:
        group.leave_note(key, json.dumps(outcome))
