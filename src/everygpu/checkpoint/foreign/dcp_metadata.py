"""The ``.metadata`` of torch.distributed.checkpoint (DCP): which tensor is where in which file.

The file is a pickle, and torch's own reader unpickles it without restriction: a crafted checkpoint can run
programs at its reader. Here it is unpickled with a list of the few classes that DCP writes, and even these are not the
real ones: each becomes an inert record made for this one reading, so that nothing in the file reaches torch's classes.
"""

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from everygpu.checkpoint.brief import brief
from everygpu.checkpoint.foreign.faults import broken, refused
from everygpu.checkpoint.foreign.pickle_scan import scan_pickle
from everygpu.checkpoint.regular_file import read_document
from everygpu.errors import EveryGPUError

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = frozenset(
    {
        *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata")),
        *((_METADATA, name) for name in ("ChunkStorageMetadata", "TensorProperties", "StorageMeta")),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
    }
)
_MAX_DEPTH = 100
_MAX_OFFSET = 2**62
"""Of sizes and offsets; two of them together still are a number of 64 bits."""

_PATH_MODULES = frozenset({"pathlib", "pathlib._local"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where a piece of a file stands."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box cut from a tensor, and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor in pieces, or a value that was saved by itself."""

    path: tuple[str | int, ...]
    """Where it stood in what was saved."""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    """None for a value that is no tensor."""
    pieces: tuple[Piece, ...] = ()
    span: Span | None = None
    """Of a value that is no tensor."""


def read_entries(path: Path) -> dict[str, Entry]:
    """Read the metadata of a distributed checkpoint.

    Args:
        path: The file ``.metadata``.
    Returns:
        The saved entries, by flat name.
    Raises:
        CheckpointForeignError: the file asks for more than DCP's own records, or its data is compressed.
        CheckpointDamagedError: it is cut off or altered.
    Source:
        ``torch.distributed.checkpoint.FileSystemReader.read_metadata``, which runs any pickle.
    """
    try:
        data = read_document(path)
        scan_pickle(io.BytesIO(data), len(data), path)
        return _entries(_Unpickler(io.BytesIO(data), path).load(), path)
    except EveryGPUError:
        raise
    except OSError as cause:
        raise broken(path, f"can't be read ({cause.strerror})") from cause
    except Exception as cause:  # altered pickles fail in any way
        raise broken(path, f"is no metadata of a distributed checkpoint ({type(cause).__name__}: {cause})") from cause


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path
        self._known: dict[tuple[str, str], Any] = {name: _new_record(name[1]) for name in _RECORDS}

    def find_class(self, module: str, name: str, /) -> Any:
        known = self._known.get((module, name)) or _find_plain(module, name)
        if known is None:
            raise refused(
                self._path,
                f"which wants to run {module}.{name}",
                "Nothing of it was run. Convert it where it was made: "
                "torch.distributed.checkpoint.format_utils.dcp_to_torch_save.",
            )
        return known


def _new_record(name: str) -> type[Any]:
    class Record:
        """Keeps what it is given and does nothing with it."""

        def __init__(self, *_: object) -> None:
            self.fields: dict[str, Any] = {}

        def __setstate__(self, state: Any) -> None:
            self.fields = state if isinstance(state, dict) else {"state": state}

    Record.__name__ = name
    return Record


def _find_plain(module: str, name: str) -> Callable[..., Any] | torch.dtype | None:
    if (module, name) == ("torch", "Size"):
        return tuple
    if (module, name) == ("collections", "OrderedDict"):
        return dict
    if module in _PATH_MODULES and name.endswith("Path"):  # where it was saved; nothing is read from it
        return _join
    dtype = vars(torch).get(name) if module == "torch" else None  # getattr imports torch's further modules
    return dtype if isinstance(dtype, torch.dtype) else None


def _join(*parts: str) -> str:
    return "/".join(parts)


def _entries(document: Any, path: Path) -> dict[str, Entry]:
    metadata = document.fields
    spans = {_key(index): _span(info, path) for index, info in metadata["storage_data"].items()}
    places = metadata.get("planner_data") or {}
    entries = {}
    for name, about in metadata["state_dict_metadata"].items():
        if not isinstance(name, str):
            raise TypeError(f"{brief(name)} is no name")
        place = places.get(name, (name,)) if isinstance(places, dict) else (name,)
        is_place = isinstance(place, tuple | list) and 0 < len(place) <= _MAX_DEPTH
        if not is_place or not all(isinstance(step, str | int) for step in place):
            raise TypeError(f"{brief(name)} stands at {brief(place)}")
        entries[name] = _entry(name, tuple(place), about, spans)
    return entries


def _entry(name: str, place: tuple[str | int, ...], about: Any, spans: dict[Any, Span]) -> Entry:
    if type(about).__name__ == "BytesStorageMetadata":
        return Entry(path=place, span=spans[name, None])
    fields = about.fields
    dtype = _dtype_of(fields["properties"].fields)
    pieces = [(_ints(chunk.fields["offsets"]), _ints(chunk.fields["sizes"])) for chunk in fields["chunks"]]
    return Entry(
        path=place,
        shape=_ints(fields["size"]),
        dtype=dtype,
        pieces=tuple(Piece(offsets=offsets, sizes=sizes, span=spans[name, offsets]) for offsets, sizes in pieces),
    )


def _dtype_of(properties: dict[str, Any]) -> torch.dtype:
    dtype = properties["state"][0] if "state" in properties else properties["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{brief(dtype)} is no dtype")
    return dtype


def _key(index: Any) -> tuple[str, tuple[int, ...] | None]:
    name, offset = index.fields["fqn"], index.fields.get("offset")
    if not isinstance(name, str):
        raise TypeError(f"{brief(name)} is no name")
    return name, None if offset is None else _ints(offset)


def _span(info: Any, path: Path) -> Span:
    fields = info.fields
    if fields.get("transform_descriptors"):
        raise refused(
            path,
            f"whose data went through {brief(fields['transform_descriptors'])}",
            "Convert it where it was made: torch.distributed.checkpoint.format_utils.dcp_to_torch_save.",
        )
    offset, length = _ints((fields["offset"], fields["length"]))
    file = fields["relative_path"]
    if not isinstance(file, str):
        raise TypeError(f"{brief(file)} is no file's name")
    return Span(file=file, offset=offset, length=length)


def _ints(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and 0 <= value <= _MAX_OFFSET for value in values):
        raise ValueError(f"sizes and offsets must be whole numbers from 0, got {brief(values)}")
    return tuple(values)
