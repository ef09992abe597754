"""Directories of torch.distributed.checkpoint (DCP): tensors in pieces, spread over the files of the ranks."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everygpu.checkpoint.brief import brief
from everygpu.checkpoint.foreign.dcp_metadata import Entry, Piece, Span, read_entries
from everygpu.checkpoint.foreign.faults import broken
from everygpu.checkpoint.foreign.formats import DCP_METADATA, is_plain_name
from everygpu.checkpoint.foreign.torch_file import read_torch_bytes
from everygpu.checkpoint.regular_file import open_regular, require_regular


def read_dcp(directory: Path, *, with_values: bool = True) -> dict[Any, Any]:
    """Read a distributed checkpoint as what was passed to ``torch.distributed.checkpoint.save``.

    Needs no process group and runs nothing: see `dcp_metadata` for the metadata; pieces are read with
    ``weights_only=True``.

    Args:
        directory: Holds ``.metadata``.
        with_values: False gives tensors on the meta device, without reading the data.
    Returns:
        Nested dicts and lists as they were saved; keys that were numbers are text, as DCP keeps them.
    Raises:
        CheckpointForeignError: something in it needs more than tensors and plain containers.
        CheckpointDamagedError: a file is missing, cut off or altered.
    """
    metadata = directory / DCP_METADATA
    tree: dict[Any, Any] = {}
    entries = read_entries(metadata)
    _check_spans(directory, entries.values(), with_values)
    for name, entry in entries.items():
        if not _put(tree, entry.path, _read_entry(directory, name, entry, with_values)):
            raise broken(metadata, f"puts {brief(name)} where something else is")
    return {name: _with_lists(value) for name, value in tree.items()}


def _read_entry(directory: Path, name: str, entry: Entry, with_values: bool) -> Any:
    if entry.dtype is None:
        return None if entry.span is None else _load(directory, entry.span)
    if not with_values:
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")
    _check_pieces(directory, name, entry)
    pieces = [(piece, _load_piece(directory, name, piece, entry.dtype)) for piece in entry.pieces]
    if len(pieces) == 1:  # it has the tensor's shape, as the pieces fill the tensor
        return pieces[0][1]
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    for piece, tensor in pieces:
        box = tuple(slice(offset, offset + size) for offset, size in zip(piece.offsets, piece.sizes))
        whole[box] = tensor
    return whole


def _check_spans(directory: Path, entries: Iterable[Entry], with_values: bool) -> None:
    """See that what is read is no more than the files hold: a thousand tensors may name the same gigabyte."""
    entries = list(entries)
    spans = [entry.span for entry in entries if entry.span is not None]
    if with_values:
        spans += [piece.span for entry in entries for piece in entry.pieces]
    ends: dict[Path, int] = {}
    for span in spans:
        path = _file(directory, span)
        ends[path] = max(ends.get(path, 0), span.offset + span.length)
    for path, end in ends.items():
        try:
            size = require_regular(path).st_size
        except OSError as cause:
            raise broken(path, f"can't be read ({cause.strerror})") from cause
        if size < end:
            raise broken(path, f"ends before byte {end}")
    if sum(span.length for span in spans) > sum(ends.values()):
        raise broken(directory / DCP_METADATA, "names the same data for several values")


def _check_pieces(directory: Path, name: str, entry: Entry) -> None:
    """See that the pieces fill the tensor, before memory is taken for it."""
    for piece in entry.pieces:
        ends = [offset + size for offset, size in zip(piece.offsets, piece.sizes)]
        fits = len(piece.offsets) == len(piece.sizes) == len(entry.shape)
        if not fits or any(end > size for end, size in zip(ends, entry.shape)):
            raise broken(directory / DCP_METADATA, f"has a piece of {brief(name)} outside its shape")
        if entry.dtype is not None and math.prod(piece.sizes) * entry.dtype.itemsize > piece.span.length:
            raise broken(directory / DCP_METADATA, f"has a piece of {brief(name)} that is larger than its data")
    num_given = sum(math.prod(piece.sizes) for piece in entry.pieces)
    if num_given != math.prod(entry.shape) or not entry.pieces or _overlap(entry.pieces):
        raise broken(directory / DCP_METADATA, f"has pieces of {brief(name)} that do not fill its shape")


def _overlap(pieces: tuple[Piece, ...]) -> bool:
    pieces = tuple(piece for piece in pieces if math.prod(piece.sizes))
    if len(pieces) < 2:
        return False
    begins = torch.tensor([piece.offsets for piece in pieces])
    ends = begins + torch.tensor([piece.sizes for piece in pieces])
    if not begins.shape[1]:
        return True
    # In the order of the axis that is cut most often, a box meets few of those after it.
    axis = max(range(begins.shape[1]), key=lambda i: len(set(begins[:, i].tolist())))
    order = begins[:, axis].argsort()
    begins, ends = begins[order], ends[order]
    stops = torch.searchsorted(begins[:, axis].contiguous(), ends[:, axis].contiguous()).tolist()
    return any(
        bool(((begins[i] < ends[i + 1 : stop]) & (begins[i + 1 : stop] < ends[i])).all(1).any())
        for i, stop in enumerate(stops)
        if stop > i + 1
    )


def _load_piece(directory: Path, name: str, piece: Piece, dtype: torch.dtype) -> Tensor:
    tensor = _load(directory, piece.span)
    if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != piece.sizes:
        raise broken(_file(directory, piece.span), f"holds something else than the piece of {brief(name)} it should")
    return tensor


def _load(directory: Path, span: Span) -> Any:
    path = _file(directory, span)
    try:
        with open_regular(path) as file:
            file.seek(span.offset)
            data = file.read(span.length)
    except OSError as cause:
        raise broken(path, f"can't be read ({cause.strerror})") from cause
    if len(data) != span.length:
        raise broken(path, f"ends before byte {span.offset + span.length}")
    return read_torch_bytes(data, path)


def _file(directory: Path, span: Span) -> Path:
    if not is_plain_name(span.file):
        raise broken(directory / DCP_METADATA, f"names the file {brief(span.file)}, which is none in the directory")
    return directory / span.file


def _put(tree: dict[Any, Any], path: tuple[str | int, ...], value: Any) -> bool:
    *steps, last = path
    for step in steps:
        tree = tree.setdefault(step, _Branch())
        if not isinstance(tree, _Branch):
            return False
    return tree.setdefault(last, value) is value


class _Branch(dict[Any, Any]):
    """A container that was taken apart; a dict that was saved whole is a value."""


def _with_lists(value: Any) -> Any:
    """Turn branches with the keys 0, 1, 2 … back into lists."""
    if not isinstance(value, _Branch):
        return value
    items: Mapping[Any, Any] = {key: _with_lists(item) for key, item in value.items()}
    if items and all(type(key) is int for key in items) and sorted(items) == list(range(len(items))):
        return [items[i] for i in range(len(items))]
    return dict(items)
