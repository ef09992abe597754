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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _CLASSES:
            found = type(name, (getattr(import_module(module), name),), {})
            # Of one class all instances are equal only to those of the same class.
            return self.__dict__.setdefault(f"{module}.{name}", found)
        if (module, name) in _FUNCTIONS:
            function = getattr(import_module(module), name)
            return lambda *args: function(*args)
        if (module, name) == ("collections", "OrderedDict"):
            return lambda *args: dict(*args)
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):  # where it was saved; nothing is read
            return lambda *parts: "/".join(parts)
        dtype = vars(torch).get(name) if module == "torch" else None  # getattr imports torch's further modules
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {module}.{name}")


def read_dcp(directory: Path) -> dict[Any, Any]:
    """Read what was passed to ``torch.distributed.checkpoint.save``."""
    path = directory / METADATA
    try:
        with open_regular(path) as file:
            metadata = _Unpickler(file).load()
        _check(directory, metadata)
        state = _read_values(directory, metadata)
        return dict(unflatten(state, {name: (name,) for name in state} | dict(metadata.planner_data or {})))
    except CheckpointDamagedError:
        raise
    except Exception as cause:  # altered records fail in any way
        if isinstance(cause, pickle.UnpicklingError) and str(cause).startswith(("Unsupported", "Weights")):
            raise
        raise damaged(path, f"can't be read as a distributed checkpoint's ({type(cause).__name__}: {cause})") from cause


def _check(directory: Path, metadata: Any) -> None:
    """See that files are there in the size that is needed, and that the pieces of each tensor are all of it."""
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        if Path(name).name != name or "\\" in name:
            raise damaged(directory / METADATA, f"names the file {cut(repr(name))}, which is none in the directory")
        if not (directory / name).is_file() or (directory / name).stat().st_size < end:
            raise damaged(directory / name, f"is missing, or ends before byte {end}")
    for name, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            continue
        is_whole = sum(math.prod(c.sizes) for c in entry.chunks) == math.prod(entry.size) <= 8 * sum(ends.values())
        covered = torch.zeros(entry.size if is_whole else (), dtype=torch.bool, device="cpu")
        for chunk in entry.chunks if is_whole else ():
            covered[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes))] = True
        if not is_whole or not covered.all():
            raise damaged(directory / METADATA, f"has pieces of {cut(repr(name))} that do not fill its shape")


def _read_values(directory: Path, metadata: Any) -> dict[str, Any]:
    # These take half a second, and only this needs them.
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            state[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    about = metadata.state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu") if hasattr(entry, "chunks") else None
        for name, entry in about.items()
    }
    reader, planner = FileSystemReader(directory), Planner(flatten_state_dict=False)
    # Equal only to its own class.
    places = {MetadataIndex(i.fqn, i.offset, i.index): info for i, info in metadata.storage_data.items()}
    whole = Metadata(state_dict_metadata=about, storage_data=places)
    reader.set_up_storage_reader(whole, is_coordinator=True)
    planner.set_up_planner(state, whole, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    return state
