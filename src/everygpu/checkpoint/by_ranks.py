"""A checkpoint of what is shared out over ranks: each rank writes files of its own, with whole tensors.

The directory is that of any other checkpoint. Tensors are dealt to files, and files to ranks. One after the other, a
tensor is put together on all ranks, and kept in the memory of the host whose rank writes it. From then on ranks leave
each other notes, and need no collective: they may write while training goes on.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from everygpu.checkpoint.background import Taken
from everygpu.checkpoint.format import SHARD_BYTES, files_of, write_document, write_files, write_tensors
from everygpu.errors import CheckpointContentError, CheckpointError, RankError
from everygpu.parallel.fully_sharded.shards import is_shard, part_like, whole_of
from everygpu.ranks.group import Group, join

if TYPE_CHECKING:
    from everygpu.checkpoint.save import OneWriter

Files = Mapping[str, Mapping[str, Tensor]]
MEET_S = 600.0
"""How long ranks wait for one that doesn't save, as NCCL's collectives would."""


def is_spread(parts: Mapping[str, object]) -> bool:
    """Tell whether a model or an optimizer among the parts has tensors of which other ranks have the other rows."""
    return any(map(has_shards, parts.values())) and join() is not None


def has_shards(part: Any) -> bool:
    """Tell a model or an optimizer with tensors of which other ranks have the other rows."""
    if isinstance(part, nn.Module):  # by the class: some parameters may be whole right now
        return any(kind.__name__ == "FSDPModule" for module in part.modules() for kind in type(module).__mro__)
    groups: Any = getattr(part, "param_groups", None)
    return isinstance(groups, list) and any(is_shard(p) for group in groups for p in group["params"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """The state of a run, dealt out to the ranks that write it."""

    document: Mapping[str, Any]
    group: Group
    key: str
    """Of the notes by which ranks know of each other."""
    files: Files
    """All files, with tensors without memory."""
    mine: Files
    """Those that this rank writes, with tensors on the CPU."""

    def write(self, directory: Path, document: Mapping[str, Any]) -> None:
        """Write rank 0's files and, when those of all others are there, what belongs to all."""
        self.group.leave_note(f"{self.key}: directory", str(directory))
        digests = write_tensors(directory, self.mine)
        for rank in range(1, self.group.size):
            found = json.loads(self.group.read_note(f"{self.key}: files of rank {rank}"))
            if "problem" in found:
                raise CheckpointError(f"save: rank {rank} couldn't write its files: {found['problem']}")
            digests |= found
        write_document(directory, self.files, digests, document)

    def write_part(self) -> None:
        """Write this rank's files, when rank 0 has made the directory; not where it fails to."""
        directory = self.group.find_first_note(f"{self.key}: directory", self.key)
        if directory is None:
            return
        note = f"{self.key}: files of rank {self.group.rank}"
        try:
            if not Path(directory).is_dir():
                raise CheckpointError(f"save: {directory} must be on a file system that all ranks share, not rank 0's.")
            self.group.leave_note(note, json.dumps(write_tensors(Path(directory), self.mine)))
        except BaseException as error:
            self.group.leave_note(note, json.dumps({"problem": f"{type(error).__name__}: {error}"}))
            if self.group.find_note(self.key) is None:  # else rank 0 has failed, and removed the directory
                raise


def write_taken(directory: Path, taken: Taken | Dealt, document: Mapping[str, Any]) -> None:
    """Write the files of a checkpoint to an empty directory.

    Raises:
        CheckpointContentError: something is shared out, and nothing said so before all ranks took part.
    """
    if isinstance(taken, Dealt):
        taken.write(directory, document)
        return
    spread = next((n for tensors in taken.tensors.values() for n, t in tensors.items() if is_shard(t)), None)
    if spread is not None:
        raise CheckpointContentError(
            f"save: {spread} is shared out over ranks. Pass the model or the optimizer that it is of, too: model=model."
        )
    write_files(directory, taken.tensors, document)


def deal(taken: Taken, key: str) -> Dealt:
    """Put tensors together one at a time, each in the memory of the rank that writes it; all ranks call it.

    Raises:
        RankError: a rank doesn't.
    """
    group = join()
    if group is None:
        raise RankError("save: the process group has ended, and tensors are shared out over its ranks. Save before.")
    _meet(group, key)
    total = sum(t.nbytes for tensors in taken.tensors.values() for t in tensors.values())
    # Those that every rank has come first, to stand in files of rank 0.
    ordered = {stem: dict(sorted(part.items(), key=_is_shared_out)) for stem, part in taken.tensors.items()}
    files = files_of(ordered, min(SHARD_BYTES, -(-total // group.size)))
    mine: dict[str, dict[str, Tensor]] = {}
    for i, (file, tensors) in enumerate(files.items()):
        owner = i % group.size if all(map(is_shard, tensors.values())) else 0
        if owner == group.rank:
            mine[file] = {}
        for name, tensor in tensors.items():
            whole = whole_of(tensor) if is_shard(tensor) else tensor.detach()
            if owner == group.rank:
                mine[file][name] = whole.to("cpu", copy=True)
    empty = {file: {name: _without_memory(t) for name, t in tensors.items()} for file, tensors in files.items()}
    return Dealt(document=taken.document, group=group, key=key, files=empty, mine=mine)


def take_rows(optimizer: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state, saved whole, with this rank's rows of what is of a parameter's shape."""
    found = {}
    for group, own in zip(state["param_groups"], optimizer.param_groups):
        for key, p in zip(group["params"], own["params"]):
            if key in state["state"]:
                found[key] = {name: _rows(value, p) for name, value in state["state"][key].items()}
    return {**state, "state": found}


def _rows(value: Any, p: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    return part_like(value, p) if is_shard(p) and value.shape == p.shape else value.clone()


def write_together(ranks: "OneWriter", dealt: Dealt, write: Callable[[], object]) -> None:
    """Write a checkpoint on all ranks: rank 0 calls ``write``, and is waited for; what it raises, all raise."""
    if dealt.group.rank == 0:
        ranks.write(dealt.key, write)
    else:
        dealt.write_part()
        ranks.wait(dealt.key)


def _meet(group: Group, key: str) -> None:
    """Wait for all ranks before the first collective, which a rank that isn't coming would have stand still."""
    group.leave_note(f"{key}: rank {group.rank}", "")
    for rank in range(group.size):
        try:
            group.read_note(f"{key}: rank {rank}", MEET_S)
        except RankError as cause:
            raise RankError(
                f"save: the model is shared out over ranks, and rank {rank} hasn't come to save its part in "
                f"{MEET_S:g} s. Call save on all ranks, not under is_main()."
            ) from cause


def _without_memory(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


def _is_shared_out(named: tuple[str, Tensor]) -> bool:
    return is_shard(named[1])
