"""Tensors in a safetensors file, written one after another with the permissions that open() gives.

The layout is 8 bytes of header length (little endian), a JSON header, and the tensors' bytes without gaps:
https://github.com/huggingface/safetensors#format. What the format can't say is kept in the header's
metadata under ``everygpu``: tensors that are stored once under several names, and element types that
safetensors has no name for, which are stored as bytes with one more axis.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.parameter import is_lazy

from everygpu.checkpoint.brief import brief
from everygpu.checkpoint.manifest import damaged
from everygpu.checkpoint.regular_file import require_regular
from everygpu.errors import CheckpointContentError

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_METADATA = "__metadata__"
_NOTES = "everygpu"
_ALIGNMENT = 64
_CHUNK_BYTES = 4 * 2**20


class Writer(Protocol):
    """What tensors are written to: a file, or one that hashes too."""

    def write(self, data: Any, /) -> object: ...


def write_tensors(file: Writer, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as one safetensors file.

    Tensors that are the same view of the same memory are stored once. Tensors are handed on in parts of
    at most 8 MiB, which are copies where the tensor is not contiguous on the CPU.

    Args:
        file: Open for writing, at its start.
        tensors: Any shape, dtype, strides and device, as `check_storable` allows.
    """
    aliases = _find_aliases(tensors)
    # Widest elements first keeps every tensor aligned to its element size without gaps.
    order = sorted(tensors.keys() - aliases.keys(), key=lambda name: (-tensors[name].element_size(), name))
    header = _header({name: tensors[name] for name in order}, aliases)
    file.write(struct.pack("<Q", len(header)) + header)
    for name in order:
        _write_elements(file, tensors[name])


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file that `write_tensors` wrote.

    Returns:
        Tensors on the CPU, contiguous, perhaps backed by the file: copy what outlives the load.
    Raises:
        CheckpointDamagedError: the file is no valid safetensors file.
    """
    try:
        require_regular(path)
        with safe_open(str(path), framework="pt") as file:
            notes = json.loads((file.metadata() or {}).get(_NOTES, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _apply_notes(tensors, notes)
    except (
        SafetensorError,
        OSError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
    ) as cause:
        raise damaged(path, f"is no valid safetensors file ({cause})") from cause


def check_storable(tensor: Tensor, name: str) -> None:
    """Refuse tensors whose elements are not plain memory.

    Raises:
        CheckpointContentError: the tensor is sparse, nested, quantized, on the meta device, not made yet or of a
            subclass that keeps its elements elsewhere, or its name can't be written.
    """
    problem = None
    if name == _METADATA:
        problem = "one whose name the safetensors format reserves"
    elif not _is_unicode(name):  # it would be written, and no reader could open the file
        problem = "one whose name has half of a surrogate pair"
    elif is_lazy(tensor):
        problem = "one that a lazy module has not made yet"
    elif tensor.is_nested:
        problem = "a nested one"
    elif type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        problem = f"a {type(tensor).__name__}, which keeps its elements elsewhere"
    elif tensor.layout != torch.strided:
        problem = f"one with layout {tensor.layout}"
    elif tensor.is_meta:
        problem = "one on the meta device, which holds no data"
    elif tensor.is_quantized:
        problem = f"one quantized as {tensor.dtype}"
    if problem is not None:
        raise CheckpointContentError(
            f"save: a tensor must be dense and hold its data, got {problem} at "
            f"{name.encode(errors='backslashreplace').decode()}. "
            f"Turn it into an ordinary tensor first."
        )


def identity(tensor: Tensor) -> object:
    """Return what two tensors share if they are the same view of the same memory."""
    place = (tensor.device, tensor.data_ptr(), tensor.is_conj(), tensor.is_neg())
    return (*place, tensor.dtype, tuple(tensor.shape), tensor.stride())


def memory_of(tensor: Tensor) -> object:
    """As `identity`; of tensors without ordinary memory, none shares anything with another one."""
    has_memory = not tensor.is_meta and tensor.layout == torch.strided and tensor.numel() > 0
    return identity(tensor) if has_memory else id(tensor)


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _find_aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each further name of a tensor to the first one."""
    first: dict[object, str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        same = first.setdefault(identity(tensor), name)
        if same != name:
            aliases[name] = same
    return aliases


def _header(tensors: Mapping[str, Tensor], aliases: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {}
    dtypes = {}
    begin = 0
    for name, tensor in tensors.items():
        shape = list(tensor.shape)
        if tensor.dtype not in _DTYPE_NAMES:
            dtypes[name] = str(tensor.dtype).removeprefix("torch.")
            shape.append(tensor.element_size())
        end = begin + tensor.nbytes
        dtype = _DTYPE_NAMES.get(tensor.dtype, "U8")
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    notes = json.dumps({"aliases": aliases, "dtypes": dtypes})
    document = {_METADATA: {"format": "pt", _NOTES: notes}, **entries}
    text = json.dumps(document, separators=(",", ":")).encode()
    return text + b" " * (-(len(text) + 8) % _ALIGNMENT)


def _write_elements(file: Writer, tensor: Tensor) -> None:
    for piece in _pieces(tensor.detach()):
        file.write(piece.reshape(-1).view(torch.uint8).numpy())  # which keeps the piece alive


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Cut a tensor into parts on the CPU that follow each other in row-major order, each small or a view."""
    if tensor.nbytes <= _CHUNK_BYTES or tensor.numel() == 1:
        yield tensor.resolve_conj().resolve_neg().contiguous().cpu()
        return
    num_bytes = tensor.nbytes
    while len(tensor) == 1:
        tensor = tensor[0]
    if tensor.is_contiguous():
        tensor = tensor.reshape(-1)
    for part in torch.split(tensor, max(1, _CHUNK_BYTES * len(tensor) // num_bytes)):
        yield from _pieces(part)


def _apply_notes(tensors: dict[str, Tensor], notes: Any) -> dict[str, Tensor]:
    for name, dtype in notes.get("dtypes", {}).items():
        tensors[name] = tensors[name].view(_dtype_of(dtype)).squeeze(-1)
    return tensors | {name: tensors[same] for name, same in notes.get("aliases", {}).items()}


def _dtype_of(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)  # getattr imports torch's further modules
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{brief(name)} is no dtype")
    return dtype
