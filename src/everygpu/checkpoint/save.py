"""Write a checkpoint, of one process or of all ranks.

A model that is sharded over ranks makes a directory like any other: each tensor is gathered to the rank that writes it.
"""

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
from everygpu.checkpoint.background import Background, StateSnapshot
from everygpu.checkpoint.convert import SUFFIXES
from everygpu.checkpoint.directory import as_path, must_be_writable, replacing, resolve_target
from everygpu.checkpoint.format import MODEL, TRAINING, Files, files_of, write_document, write_tensors
from everygpu.checkpoint.states import LOAD_OPTIONS, check_parts, encode_parts, has_shards
from everygpu.checkpoint.values import encode
from everygpu.devices.seed import take_rng_states
from everygpu.errors import CheckpointContentError, CheckpointError, EveryGPUError, OptionError, RankError
from everygpu.parallel.fully_sharded.shards import full_tensor, is_shard
from everygpu.ranks.group import current_group, init_group
from everygpu.ranks.membership import is_main

MEET_S = 600.0
"""How long ranks wait for one that doesn't come to save, as NCCL's collectives would."""


def save(
    path: str | os.PathLike[str],
    *others: Any,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    **extras: Any,
) -> Path:
    """Save a training run to a directory; at any moment, either the old checkpoint or the new one is there.

    The directory holds ``model.safetensors``, ``training.safetensors`` (all other tensors), ``checkpoint.json``
    (structure, plain values, random states) and ``SHA256SUMS``. Other files in it are left alone, such as the
    ``config.json`` by which Transformers reads ``model.safetensors``::

        everygpu.save("run/checkpoint", model=model, optimizer=optimizer, step=1200)

    Under torchrun rank 0 writes its state, and the others wait until it is written. If only rank 0 calls it, as under
    ``if everygpu.is_main()``, nothing waits. Gather whatever differs between ranks first. All ranks write a model that
    is sharded by ``DataParallel(shard=...)`` or ``fully_shard``.

    Args:
        path: The directory, new or an earlier checkpoint. ``~`` is the home, and symbolic links are followed.
        *others: Nothing: pass everything by name.
        model: A module, bare or wrapped. Names are stored without the prefixes of wrappers, and tied tensors once.
        optimizer: Any object with state_dict and load_state_dict. Its state is stored by the names that its parameters
            have in the modules saved with it.
        scheduler: Any object with state_dict and load_state_dict.
        **extras: Under any other name: values that JSON can hold, tensors and NumPy arrays, in lists, tuples and dicts
            at any depth; an object with state_dict and load_state_dict (GradScaler, `Feeder`); or a torch.Generator.
    Returns:
        The path. If it ends like a file's, such as ``.pt``, a warning says that it is a directory.
    Raises:
        CheckpointContentError: a value has no place in a checkpoint, or an extra has the name of an option of `load`;
            nothing was written.
        CheckpointForeignError: the path has files of others, or is a mount point, the working directory or one around
            it; it is left alone.
        OptionError: the path is none, or empty; or there is nothing to save.
        CheckpointBusyError: another saver is writing to the path; its save continues.
        CheckpointError: writing failed; the old checkpoint is untouched.
        RankError: rank 0 has ended without saving.
    Source:
        ``torch.save``, which writes a pickle over the old file; safetensors for the tensors.
    """
    if others:
        raise CheckpointContentError("save: What is saved has a name; the path comes first: save(path, model=model).")
    known = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    parts = {name: part for name, part in known.items() if part is not None} | extras
    if not parts:
        raise OptionError("save: There is nothing to save. Write save(path, model=model).")
    where = as_path(path, "save")
    if where.suffix in SUFFIXES and is_main():
        warn(
            f"save: {path} becomes a directory, also as its name ends with {where.suffix}: torch.load can't read it. "
            f"For a single file run `everygpu checkpoint convert DIRECTORY FILE{where.suffix}`.",
            stacklevel=2,
        )

    def work() -> None:
        snapshot = collect_state(parts)
        wait_for_devices(snapshot)
        Background().run(lambda: write_checkpoint(where, snapshot))

    key = next_key(f"save to {where}")
    if is_spread(parts):
        gathered = collect_state(parts, key)
        Background().run(lambda: write_together(gathered, lambda: write_checkpoint(where, gathered)))
    else:
        write_once(key, work)
    return where


def is_spread(parts: Mapping[str, object]) -> bool:
    """Whether a model or an optimizer among the parts is sharded over ranks."""
    return any(map(has_shards, parts.values())) and init_group() is not None


def collect_state(parts: Mapping[str, object], gathered_as: str | None = None) -> StateSnapshot:
    """Collect the states of objects and random generators, without copies; ``gathered_as`` is the key of all ranks."""
    check_parts(parts, "save")
    if reserved := LOAD_OPTIONS & parts.keys():
        raise CheckpointContentError(f"save: {min(reserved)!r} is an option of load. Choose another name.")
    tensors: dict[str, dict[str, Tensor]] = {MODEL: {}, TRAINING: {}}
    encoded = encode_parts(parts, tensors)
    document = {"parts": encoded, "rng": encode(take_rng_states(), "rng", {})}
    tensors = {stem: group for stem, group in tensors.items() if group}
    if gathered_as is not None:
        return gather_to_writer(document, tensors, gathered_as)
    spread = next((name for group in tensors.values() for name, t in group.items() if is_shard(t)), None)
    if spread is not None:
        raise CheckpointContentError(
            f"save: {spread} is sharded over ranks. Pass the model or optimizer that it belongs to: model=model."
        )
    return StateSnapshot(document=document, files=files_of(tensors))


def gather_to_writer(document: Mapping[str, Any], tensors: Files, key: str) -> StateSnapshot:
    """Gather full tensors one at a time, each to the rank that writes it; all ranks call it."""
    group = init_group()
    if group is None:
        raise RankError("save: the process group has ended, and tensors are sharded over its ranks. Save before.")
    group.leave_note(f"{key}: rank {group.rank}", "")
    for rank in range(group.size):  # before the first collective, which would hang if a rank doesn't come
        try:
            group.read_note(f"{key}: rank {rank}", MEET_S)
        except RankError as cause:
            what = f"the model is sharded over ranks, and rank {rank} hasn't come to save its part in {MEET_S:g} s"
            raise RankError(f"save: {what}. Call save on all ranks, not under is_main().") from cause
    # Tensors that every rank has come first, so that they end up in files of rank 0.
    ordered = {stem: dict(sorted(part.items(), key=lambda named: is_shard(named[1]))) for stem, part in tensors.items()}
    files = files_of(ordered, group.size)
    for i, part in enumerate(files.values()):
        is_mine = group.rank == (i % group.size if all(map(is_shard, part.values())) else 0)
        for name, t in part.items():
            whole = full_tensor(t) if is_shard(t) else t.detach()
            part[name] = whole.to("cpu", copy=True) if is_mine else torch.empty_like(whole, device="meta")
    return StateSnapshot(document=document, files=files, group=group, key=key)


def wait_for_devices(snapshot: StateSnapshot) -> None:
    """Wait until GPUs have computed the tensors: another thread reads them on streams other than the caller's."""
    for device in {t.device for tensors in snapshot.files.values() for t in tensors.values() if t.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def write_checkpoint(path: Path, snapshot: StateSnapshot, run: Mapping[str, Any] | None = None) -> Path:
    """Write a snapshot; ``run`` has its step, serial number and metrics if it belongs to a run."""
    document = {**({} if run is None else {"run": dict(run)}), **snapshot.document}
    is_step = run is not None  # of a run, whose manager has a lock
    with must_be_writable(path, "save"), replacing(resolve_target(path, is_step), is_locked=is_step) as directory:
        if (group := snapshot.group) is not None:
            group.leave_note(f"{snapshot.key}: directory", json.dumps(str(directory)))  # which may be no UTF-8
        digests = write_tensors(directory, _own_files(snapshot))
        if group is not None:
            for rank in range(1, group.size):
                found = json.loads(group.read_note(f"{snapshot.key}: files of rank {rank}"))
                if "problem" in found:
                    raise CheckpointError(f"save: rank {rank} couldn't write its files: {found['problem']}")
                digests |= found
        write_document(directory, snapshot.files, digests, document)
    return path


def write_together(snapshot: StateSnapshot, write: Callable[[], object]) -> None:
    """Write a checkpoint from all ranks during training, without collectives: rank 0 calls ``write``; all raise."""
    group, note = snapshot.group, f"{snapshot.key}: directory"  # which is not there where rank 0 has failed to make it
    if group is not None and group.rank != 0 and (made := group.find_first_note(note, snapshot.key)) is not None:
        directory, note = Path(json.loads(made)), f"{snapshot.key}: files of rank {group.rank}"
        try:
            if not directory.is_dir():
                raise CheckpointError(f"save: {directory} must be on a file system that all ranks share, not rank 0's.")
            group.leave_note(note, json.dumps(write_tensors(directory, _own_files(snapshot))))
        except BaseException as error:
            group.leave_note(note, json.dumps({"problem": f"{type(error).__name__}: {error}"}))
            if group.find_note(snapshot.key) is None:  # else rank 0 has failed, and removed the directory
                raise
    write_once(snapshot.key, write)


def _own_files(snapshot: StateSnapshot) -> Files:
    return {file: part for file, part in snapshot.files.items() if not any(t.is_meta for t in part.values())}


# Under ranks: rank 0 writes, and the others wait until it has, by a key and a count of each piece of work. They read a
# note that rank 0 leaves, instead of meeting it in a collective: a save that only rank 0 calls, as in ``if rank == 0``,
# waits for nothing. Without a group that has been joined, there is no way to wait.


@cache
def _counts() -> Counter[str]:
    return Counter()


def next_key(name: str) -> str:
    """Name the next piece of work of a name, as "save to runs/last"; the same on all ranks."""
    name = name.encode(errors="backslashreplace").decode()  # a path need not be UTF-8
    _counts()[name] += 1
    return f"{name}, number {_counts()[name]}"


def write_once(key: str, work: Callable[[], object]) -> None:
    """Do the work on rank 0, and wait for it on the others."""
    if not is_main():
        wait_for_main(key)
        return
    _leave(f"begin to {key}", None)
    try:
        work()
    except BaseException as error:
        _leave(key, {"kind": type(error).__name__, "message": str(error)})
        raise
    _leave(key, None)


def wait_for_main(key: str) -> None:
    """Wait until rank 0 has done the work, and raise what it has raised."""
    group = current_group()
    if group is None:
        return
    group.read_note(f"begin to {key}", MEET_S)
    found = json.loads(group.read_note(key))
    if found is None:
        return
    kind = getattr(errors, found["kind"], None)
    if isinstance(kind, type) and issubclass(kind, EveryGPUError):
        raise kind(found["message"])
    raise CheckpointError(f"save: rank 0 must be able to write, got {found['kind']} there: {found['message']}")


def _leave(key: str, outcome: object) -> None:
    group = current_group()
    if group is not None:
        group.leave_note(key, json.dumps(outcome))
