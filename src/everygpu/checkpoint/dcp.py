"""Directories of torch.distributed.checkpoint (DCP), read by torch's reader without a process group.

The ``.metadata`` in them is a pickle, which torch unpickles without restriction: a crafted checkpoint can run programs
at its reader. Here it is unpickled with a list of the few classes that DCP writes; each reading gets subclasses of its
own, so that nothing in the file reaches torch's.
"""

import math
import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from everygpu.checkpoint.format import cut, damaged, open_regular
from everygpu.errors import CheckpointDamagedError
from everygpu.torch_private.distributed import unflatten

METADATA = ".metadata"

_RECORDS = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    *((_RECORDS, name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((_RECORDS, name) for name in ("ChunkStorageMetadata", "TensorProperties", "StorageMeta")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_FUNCTIONS = {(_RECORDS, "_MEM_FORMAT_ENCODING"), ("torch.serialization", "_get_layout"), ("torch", "Size")}
_PATH_MODULES = ("pathlib", "pathlib._local")


def read_dcp(directory: Path, *, with_values: bool = True) -> dict[Any, Any]:
    """Read what was passed to ``torch.distributed.checkpoint.save``; without values tensors are on the meta device."""
    path = directory / METADATA
    try:
        metadata = _read_metadata(path)
        about = metadata.state_dict_metadata
        state = {name: _empty(entry, "cpu" if with_values else "meta") for name, entry in about.items()}
        _check(directory, metadata, with_values)
        values = {name: value for name, value in state.items() if with_values or value is None}
        _read_values(directory, metadata, values)
        places = {name: (name,) for name in state} | dict(metadata.planner_data or {})
        return dict(unflatten(state | values, places))
    except (CheckpointDamagedError, pickle.UnpicklingError):
        raise
    except Exception as cause:  # altered records fail in any way
        raise damaged(path, f"can't be read as a distributed checkpoint's ({type(cause).__name__}: {cause})") from cause


def _read_metadata(path: Path) -> Any:
    with open_regular(path) as file:
        try:
            return _Unpickler(file).load()
        except pickle.UnpicklingError as cause:
            if not str(cause).startswith("Unsupported"):
                raise damaged(path, f"is no whole pickle ({cause})") from cause
            raise


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._found: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        key = (module, name)
        if key not in self._found:
            self._found[key] = self._find(module, name)
        return self._found[key]

    def _find(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return type(name, (getattr(import_module(module), name),), {})
        if (module, name) in _FUNCTIONS:
            function = getattr(import_module(module), name)
            return lambda *args: function(*args)
        if (module, name) == ("collections", "OrderedDict"):
            return lambda *args: dict(*args)
        if module in _PATH_MODULES and name.endswith("Path"):  # where it was saved; nothing is read from it
            return lambda *parts: "/".join(parts)
        dtype = vars(torch).get(name) if module == "torch" else None  # getattr imports torch's further modules
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {module}.{name}")


def _empty(entry: Any, device: str) -> torch.Tensor | None:
    is_tensor = hasattr(entry, "chunks")
    # Memory is taken when it is written to, which comes after the check.
    return torch.empty(tuple(entry.size), dtype=entry.properties.dtype, device=device) if is_tensor else None


def _check(directory: Path, metadata: Any, with_values: bool) -> None:
    """See that files are there in the size that is needed, and that the pieces of each tensor fill it."""
    ends: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        if with_values or not hasattr(metadata.state_dict_metadata[index.fqn], "chunks"):
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        if Path(name).name != name or "\\" in name:
            raise damaged(directory / METADATA, f"names the file {cut(repr(name))}, which is none in the directory")
        if not (directory / name).is_file() or (directory / name).stat().st_size < end:
            raise damaged(directory / name, f"is missing, or ends before byte {end}")
    for name, entry in metadata.state_dict_metadata.items() if with_values else ():
        pieces = [(tuple(c.offsets), tuple(c.sizes)) for c in getattr(entry, "chunks", ())]
        shape, num_bytes = tuple(getattr(entry, "size", ())), sum(ends.values())
        is_whole = sum(math.prod(sizes) for _, sizes in pieces) == math.prod(shape) <= num_bytes * 8
        if is_whole and pieces != [((0,) * len(shape), shape)]:
            covered = torch.zeros(shape, dtype=torch.bool)
            for offsets, sizes in pieces:
                covered[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))] = True
            is_whole = bool(covered.all())
        if hasattr(entry, "chunks") and not is_whole:
            raise damaged(directory / METADATA, f"has pieces of {cut(repr(name))} that do not fill its shape")


def _read_values(directory: Path, metadata: Any, state: dict[str, Any]) -> None:
    """Fill tensors, and put values in the place of what is None."""
    # These take half a second, and only this needs them.
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            state[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    reader, planner = FileSystemReader(directory), Planner(flatten_state_dict=False, allow_partial_load=True)
    # Equal only to its own class.
    places = {MetadataIndex(i.fqn, i.offset, i.index): info for i, info in metadata.storage_data.items()}
    wanted = {name: about for name, about in metadata.state_dict_metadata.items() if name in state}
    whole = Metadata(state_dict_metadata=wanted, storage_data=places)
    reader.set_up_storage_reader(whole, is_coordinator=True)
    planner.set_up_planner(state, whole, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()
