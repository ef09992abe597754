"""Read a checkpoint that another program wrote, whatever its format."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from everygpu.checkpoint.foreign.bounds import check_bounds
from everygpu.checkpoint.foreign.dcp import read_dcp
from everygpu.checkpoint.foreign.faults import broken
from everygpu.checkpoint.foreign.formats import Place, find_model_file, is_native, locate
from everygpu.checkpoint.foreign.sections import Contents, is_optimizer_state, sort_document
from everygpu.checkpoint.foreign.sharded import read_shards
from everygpu.checkpoint.foreign.torch_file import read_torch_file
from everygpu.checkpoint.tensors import read_tensors
from everygpu.errors import CheckpointError

_WORDS = {
    "torch": "torch.save",
    "safetensors": "safetensors",
    "index": "sharded, with an index",
    "dcp": "torch.distributed.checkpoint",
}
_COMPANIONS = {"optimizer": ("optimizer.bin", "optimizer.pt"), "scheduler": ("scheduler.bin", "scheduler.pt")}
"""What Accelerate and Transformers' Trainer put beside a model."""


def is_foreign(path: Path) -> bool:
    """Tell whether there is something at a path that `read_foreign` should be asked to read.

    Args:
        path: Anything.
    Returns:
        True for every file, and for directories with a model in them that are none of ours.
    """
    return path.is_file() or (path.is_dir() and not is_native(path) and find_model_file(path) is not None)


def read_foreign(path: Path, *, section: str | None = None, with_values: bool = True) -> Contents:
    """Read a foreign checkpoint: a file of torch.save, safetensors, shards with an index, or a DCP directory.

    Args:
        path: A file, or a directory with one of them under a usual name.
        section: The dotted name of the model's state dict in the file; by default it is searched.
        with_values: False allows tensors on the meta device.
    Returns:
        The parts that were recognised; tensors on the CPU, perhaps backed by the file.
    Raises:
        CheckpointNotFoundError: nothing is there.
        CheckpointForeignError: it is of no known format, or can't be read without executing something in it.
        CheckpointDamagedError: it is empty, cut off, altered or incomplete.
        CheckpointMismatchError: the section is none.
    """
    place = locate(path)
    contents = sort_document(_read_document(place, with_values), _WORDS[place.format], section)
    return _with_companions(contents, path) if path.is_dir() else contents


def _read_document(place: Place, with_values: bool) -> Any:
    if place.format == "safetensors":
        return read_tensors(place.path)
    if place.format == "index":
        return read_shards(place.path, _read_shard)
    if place.format == "torch":
        document = read_torch_file(place.path)
        check_bounds(document, place.path, place.path.stat().st_size)
        return document
    tree = read_dcp(place.path, with_values=with_values)
    check_bounds(tree, place.path, sum(file.stat().st_size for file in place.path.iterdir() if file.is_file()))
    return tree


def _read_shard(path: Path) -> Any:
    place = locate(path)
    if place.format == "index":
        raise broken(path, "is listed as a shard, but is an index itself")
    return _read_document(place, with_values=True)


def _with_companions(contents: Contents, directory: Path) -> Contents:
    """Add the optimizer and scheduler that Accelerate keeps in files of their own."""
    optimizer, scheduler, notes = contents.optimizer, contents.scheduler, []
    for part, names in _COMPANIONS.items():
        path = next((directory / name for name in names if (directory / name).is_file()), None)
        if path is None:
            continue
        try:
            state = _read_document(locate(path), with_values=True)
        except CheckpointError as error:  # the model can be loaded all the same
            notes.append(f"{path.name} is left out ({error})")
            continue
        if part == "optimizer" and optimizer is None and is_optimizer_state(state):
            optimizer = state
        if part == "scheduler" and scheduler is None and isinstance(state, Mapping):
            scheduler = state
    return replace(contents, optimizer=optimizer, scheduler=scheduler, notes=(*contents.notes, *notes))
