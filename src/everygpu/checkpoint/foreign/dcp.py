"""Directories of torch.distributed.checkpoint (DCP): tensors in pieces, spread over the files of the ranks."""

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everygpu.checkpoint.foreign.dcp_metadata import Entry, Piece, Span, read_entries
from everygpu.checkpoint.foreign.faults import broken
from everygpu.checkpoint.foreign.formats import DCP_METADATA, is_plain_name
from everygpu.checkpoint.foreign.torch_file import load_weights


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
    for name, entry in read_entries(metadata).items():
        if not _put(tree, entry.path, _read_entry(directory, name, entry, with_values)):
            raise broken(metadata, f"puts {name!r} where something else is")
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


def _check_pieces(directory: Path, name: str, entry: Entry) -> None:
    """See that the pieces fill the tensor, before memory is taken for it."""
    for piece in entry.pieces:
        ends = [offset + size for offset, size in zip(piece.offsets, piece.sizes)]
        fits = len(piece.offsets) == len(piece.sizes) == len(entry.shape)
        if not fits or any(end > size for end, size in zip(ends, entry.shape)):
            raise broken(directory / DCP_METADATA, f"has a piece of {name!r} outside its shape {entry.shape}")
    num_given = sum(math.prod(piece.sizes) for piece in entry.pieces)
    if num_given != math.prod(entry.shape) or not entry.pieces or _overlap(entry.pieces):
        raise broken(directory / DCP_METADATA, f"has pieces of {name!r} that do not fill its shape {entry.shape}")


def _overlap(pieces: tuple[Piece, ...]) -> bool:
    boxes = [[(o, o + s) for o, s in zip(piece.offsets, piece.sizes)] for piece in pieces if math.prod(piece.sizes)]
    return any(
        all(begin < other_end and other_begin < end for (begin, end), (other_begin, other_end) in zip(box, other))
        for position, box in enumerate(boxes)
        for other in boxes[:position]
    )


def _load_piece(directory: Path, name: str, piece: Piece, dtype: torch.dtype) -> Tensor:
    tensor = _load(directory, piece.span)
    if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != piece.sizes:
        raise broken(_file(directory, piece.span), f"holds something else than the piece of {name!r} it should")
    return tensor


def _load(directory: Path, span: Span) -> Any:
    path = _file(directory, span)
    try:
        with open(path, "rb") as file:
            file.seek(span.offset)
            data = file.read(min(span.length, path.stat().st_size))
    except (OSError, ValueError, OverflowError) as cause:
        raise broken(path, f"can't be read ({cause})") from cause
    if len(data) != span.length:
        raise broken(path, f"ends before byte {span.offset + span.length}")
    return load_weights(io.BytesIO(data), path)


def _file(directory: Path, span: Span) -> Path:
    if not is_plain_name(span.file):
        raise broken(directory / DCP_METADATA, f"names the file {span.file!r}, which is none in the directory")
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
