"""Checkpoints of other programs, recognised by their first bytes and read without executing anything in them.

Directories of torch.distributed.checkpoint (DCP) are read by torch's reader without a process group. The ``.metadata``
in them is a pickle, which torch unpickles without restriction: it could run programs. Here a list has the few classes
that DCP writes; each reading gets subclasses of its own, so that nothing in the file reaches torch's.
"""

import json
import math
import pickle
import re
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from everygpu.checkpoint.format import damaged, opened, read_json, read_safetensors, require_there
from everygpu.checkpoint.parts import Contents, sort_document
from everygpu.checkpoint.values import cut, is_utf8
from everygpu.errors import CheckpointDamagedError, CheckpointError, CheckpointForeignError
from everygpu.torch_private.core import unflatten

METADATA = ".metadata"
_RECORDS = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    *((_RECORDS, name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((_RECORDS, name) for name in ("ChunkStorageMetadata", "TensorProperties", "StorageMeta")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_FUNCTIONS = {(_RECORDS, "_MEM_FORMAT_ENCODING"), ("torch.serialization", "_get_layout"), ("torch", "Size")}

Format: TypeAlias = Literal["torch.save", "safetensors", "sharded, with an index", "torch.distributed.checkpoint"]

_MODEL_FILES = tuple(
    f"{stem}{suffix}"
    for stem in ("model", "pytorch_model", "diffusion_pytorch_model", "adapter_model")
    for suffix in (".safetensors.index.json", ".safetensors", ".bin.index.json", ".bin")
)
"""Names that Transformers, Accelerate, Diffusers and PEFT give to a model's file, the preferred one first."""

_HEAD_BYTES = 512
_OTHERS = {
    b"version https://git-lfs": ("a pointer of Git LFS", "Fetch the file itself: git lfs pull."),
    b"GGUF": ("a GGUF file", "Convert it with the tools it was made by."),
    b"\x89HDF": ("an HDF5 file, as Keras writes", "Convert it with the tools it was made by."),
    b"\x93NUMPY": ("a NumPy array", "Read it with numpy.load."),
    b"<": ("a web page or XML", "The download went wrong: fetch the file again."),
}
_WANTED = re.compile(r"(?:unsupported GLOBAL|Unsupported global: GLOBAL|Unsupported class) (\S+)")
_FRAME = "Unsupported operand 149"
"""What torch says of the first instruction that every pickle of protocol 4 or later has, and no earlier one."""


def read_foreign(path: Path, section: str | None = None) -> Contents:
    """Read a file of torch.save or safetensors, shards with an index, or a directory with such files, or of DCP."""
    words, file, *_ = list_files(path)
    try:
        return sort_document(_read(file, words), words, section)
    except RecursionError as cause:
        raise damaged(path, "contains itself, or is nested hundreds deep") from cause


def list_files(path: Path) -> tuple[Any, ...]:
    """Name a foreign checkpoint's format, what to read, and the files that it consists of."""
    require_there(path)
    file: Path | None = path
    if path.is_dir() and not (path / METADATA).is_file():
        file = next((path / name for name in _MODEL_FILES if (path / name).is_file()), None)
    if file is None:
        names = sorted(entry.name for entry in path.iterdir())
        shown = f": {', '.join(names[:8])}{', …' if len(names) > 8 else ''}" if names else ""
        raise CheckpointForeignError(
            f"load: {path} holds no checkpoint: none of checkpoint.json, {METADATA}, {', '.join(_MODEL_FILES[:4])}. "
            f"Pass one of its files or directories{shown}."
        )
    words = format_of(file)
    if words == "torch.distributed.checkpoint":
        return words, file, file / METADATA, *sorted(entry for entry in file.glob("*.distcp") if entry.is_file())
    return words, file, file, *(sorted(set(_weight_map(file).values())) if words == "sharded, with an index" else ())


def format_of(path: Path) -> Format:
    """Return a file's format, by its first bytes: names are unreliable, and several formats share ``.bin``."""
    if path.is_dir():
        return "torch.distributed.checkpoint"
    with opened(path) as file:
        head = file.read(_HEAD_BYTES)
    if not head:
        raise damaged(path, "is empty")
    # Eight letters of text, taken as a length, are far above any header's. This comes before pickles: headers of
    # 128 and 384 bytes, and some longer ones, have lengths that begin as those do.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**40:
        return "safetensors"
    if head.startswith(b"PK\x03\x04") or (head[0] == 0x80 and head[1:2] <= b"\x05"):
        return "torch.save"
    if head.lstrip().startswith(b"{"):
        return "sharded, with an index"
    for magic, (what, advice) in _OTHERS.items():
        if head.lstrip().startswith(magic):
            raise _refused(path, f"is {what}", advice)
    advice = "Pass a file of torch.save, a safetensors file, or a directory with such files."
    raise _refused(path, "has no known format", advice)


def find_archive_fault(path: Path) -> str | None:
    """Compare the checksums that torch.save wrote, if it did, with the content; torch.load itself does not."""
    if not zipfile.is_zipfile(path):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            altered = archive.testzip() if any(entry.CRC for entry in archive.infolist()) else None
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile) as cause:
        return f"can't be read as the archive it is ({cut(cause)})"
    return None if altered is None else f"was altered in {cut(altered)}: its checksum differs"


def _read(path: Path, words: Format) -> Any:
    if words == "safetensors":
        tensors = read_safetensors(path)
        with opened(path) as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        # Other names of a tensor, which ``safetensors.torch.save_model`` has there.
        names = {k: n for k, n in header.get("__metadata__", {}).items() if k not in (*tensors, "format")}
        return tensors | {alias: tensors[name] for alias, name in names.items() if name in tensors}
    if words == "torch.save":
        return read_torch(path)
    if words == "torch.distributed.checkpoint":
        try:
            return read_dcp(path)
        except pickle.UnpicklingError as cause:
            raise _explain(path, str(cause)) from None
    shards = _weight_map(path)
    contents = {}
    for shard in sorted(set(shards.values())):
        inner = format_of(shard)
        if inner == "sharded, with an index":
            raise damaged(shard, "is listed as a shard, but is an index itself")
        contents[shard] = _read(shard, inner)
    for name, shard in shards.items():
        if not isinstance(contents[shard], dict) or not isinstance(contents[shard].get(name), Tensor):
            raise damaged(shard, f"lacks {cut(repr(name))}, which the index puts there")
    return {name: contents[shard][name] for name, shard in shards.items()}


def read_torch(path: Path) -> Any:
    """Run torch's restricted unpickler. There is no switch around it: a pickle is a program."""
    can_map = zipfile.is_zipfile(path)
    if can_map:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        if any(entry.filename.endswith("/constants.pkl") for entry in entries):
            advice = "Where you trust it, save its weights: torch.save(torch.jit.load(path).state_dict(), new)."
            raise _refused(path, "is a TorchScript archive, which holds code", advice)
        # torch.load takes a name that ends so for another format; mapped, a compressed tensor would be what it packs.
        is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
        can_map = is_stored and path.suffix != ".safetensors" and is_utf8(path)
    try:
        if can_map:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        with open(path, "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as cause:  # which advises to load without the restriction
        raise _explain(path, str(cause)) from None
    except Exception as cause:  # altered bytes come out of torch as errors of any type
        raise damaged(path, f"can't be read by torch.load ({_first_line(cause)})") from cause


def _weight_map(path: Path) -> dict[str, Path]:
    """Read an index such as ``model.safetensors.index.json``: the file of each tensor, all existing."""
    document = read_json(path)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict):
        raise _refused(path, "is JSON without a 'weight_map'", "Pass an index of shards, or the weights' own file.")
    shards = {}
    for name, shard in weight_map.items():
        # A link in the directory may lead out of it, as in the Hugging Face cache. A name must not.
        if not isinstance(shard, str) or not re.fullmatch(r"[^/\\\0]+", shard) or shard in (".", ".."):
            raise damaged(
                path, f"puts {cut(repr(name))} into {cut(repr(shard))}, which is no file name in the same directory"
            )
        shards[name] = path.parent / shard
    if missing := sorted({shard.name for shard in shards.values() if not shard.is_file()}):
        raise damaged(path, f"lists {len(missing)} shards that are not in the same directory, such as {missing[0]}")
    return shards


def _explain(path: Path, message: str) -> CheckpointError:
    """Say what torch's restricted unpickler has refused."""
    wanted = _WANTED.search(message)
    if wanted is None and _FRAME not in message:
        return damaged(path, f"can't be read by torch's restricted unpickler ({_first_line(message)})")
    if wanted is not None:
        advice = "Ask for a file with only a state_dict, or allow this name, where you know it to be harmless, with "
        advice += "torch.serialization.add_safe_globals before loading."
        return _refused(path, f"wants to run {wanted[1].rstrip('.')}", advice)
    advice = "If you trust the file, read it with torch.load(path, weights_only=False), and save it again with "
    advice += "torch.save(state_dict, new_path)."
    what = "has a pickle of protocol 4 or later, which torch's restricted unpickler can't read"
    return _refused(path, what, advice)


def _refused(path: Path, what: str, advice: str) -> CheckpointForeignError:
    return CheckpointForeignError(f"load: {path} {cut(what)}. Nothing in it was executed. {advice}")


def _first_line(cause: object) -> str:
    text = str(cause).split("WeightsUnpickler")[-1].strip().splitlines() or [repr(cause)]
    return text[0][:200]


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
        with opened(path) as file:
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
            raise damaged(directory / METADATA, f"names the file {cut(repr(name))}, which the directory doesn't have")
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
