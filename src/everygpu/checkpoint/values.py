"""Nested Python values as JSON plus named tensors, and back with the same types.

JSON has no tuples, no keys but strings, no nan and no bytes. Those become an object with a single key that
begins with ``$``; a dict of the user's with such a key, or one that is no string, becomes a list of pairs.
Subclasses come back as the type they derive from, except OrderedDict and Counter. Equal views are stored once.
"""

import base64
import math
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from everygpu.errors import CheckpointContentError
from everygpu.parallel.fully_sharded.shards import is_shard, local_if_single, local_part

Json: TypeAlias = Any

DTYPES = {
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (64, 32, 16, 8)},
    **{f"float{bits}": f"F{bits}" for bits in (64, 32, 16)},
    **{f"float8_{kind}": f"F8_{kind.upper()}" for kind in ("e5m2", "e4m3fnuz", "e5m2fnuz")},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "float4_e2m1fn_x2": "F4"},  # noqa: PIE800
    **{"bfloat16": "BF16", "complex64": "C64", "bool": "BOOL"},  # noqa: PIE800
}
"""What safetensors calls torch's types of elements."""

_MAX_SHOWN = 240
_WORDS = range(-(2**63), 2**63)
_MAX_INT_BITS = 14_000
"""Python refuses to read or write longer decimal numbers: ``sys.get_int_max_str_digits``."""


def encode(value: object, path: str, tensors: dict[str, Tensor]) -> Json:
    """Turn a value at a dotted path into JSON, with ``{"$tensor": name}`` for tensors put aside."""
    names = {identity(tensor): name for name, tensor in tensors.items()}
    try:
        return _encode(value, path, tensors, names)
    except RecursionError as cause:
        raise CheckpointContentError(
            f"save: {path} contains itself, or is nested hundreds deep ({type(value).__name__}). Flatten it."
        ) from cause


def decode(skeleton: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Turn a skeleton back into the value; a LookupError, TypeError or ValueError where `encode` made no such one."""
    if isinstance(skeleton, list):
        return [decode(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if len(skeleton) == 1:
        ((key, content),) = skeleton.items()
        if key.startswith("$"):
            return _DECODERS[key](content, tensors)
    return {key: decode(item, tensors) for key, item in skeleton.items()}


def identity(tensor: Tensor) -> object:
    """Return what two tensors share if they are the same view of the same memory."""
    if is_shard(tensor):  # the same on all ranks, also those without rows: what is made for a parameter has padding
        address = local_part(tensor).untyped_storage().data_ptr() or id(tensor)
        return tensor.device, address, tensor.dtype, tuple(tensor.shape)
    if tensor.is_meta or tensor.layout != torch.strided:
        return id(tensor)
    if tensor.numel() == 0:
        return tensor.device, tensor.dtype, tuple(tensor.shape)
    place = (tensor.device, tensor.data_ptr(), tensor.is_conj(), tensor.is_neg())
    return (*place, tensor.dtype, tuple(tensor.shape), tensor.stride())


def check_storable(tensor: Tensor, name: str) -> None:
    """Refuse tensors whose elements are not plain memory, or of a dtype that safetensors lacks."""
    tensor = local_part(tensor)
    problem = None
    if not is_utf8(name) or name == "__metadata__":  # half of a surrogate pair
        problem = "has a name that safetensors can't write"
    elif is_lazy(tensor):
        problem = "was not made yet by its lazy module"
    elif tensor.is_nested:
        problem = "is nested"
    elif type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        problem = f"is a {type(tensor).__name__}, which keeps its elements elsewhere"
    elif tensor.layout != torch.strided:
        problem = f"has the layout {tensor.layout}"
    elif tensor.is_meta:
        problem = "is on the meta device, which holds no data"
    elif dtype_name(tensor) not in DTYPES:
        problem = f"is of {tensor.dtype}, which safetensors lacks"
    if problem is not None:
        raise CheckpointContentError(f"save: the tensor at {cut(name)} {problem}. Turn it into an ordinary one first.")


def is_utf8(text: object) -> bool:
    """Whether libraries in other languages than Python can take a name or a path."""
    return str(text).encode(errors="ignore").decode() == str(text)


def cut(text: object) -> str:
    """Print the beginning of what a file may have made long, without what a terminal or a log would obey."""
    text = str(text)
    shown = "".join(x if x.isprintable() else ascii(x)[1:-1] for x in text[:_MAX_SHOWN])
    return shown if len(text) <= _MAX_SHOWN else f"{shown}…"


def dtype_name(tensor: Tensor) -> str:
    """Name the type of a tensor's elements, without ``torch.``."""
    return str(tensor.dtype).removeprefix("torch.")


def _encode(value: object, path: str, tensors: dict[str, Tensor], names: dict[object, str]) -> Json:
    if isinstance(value, Tensor):
        value = local_if_single(value)
        if value.dtype == torch.complex128 and value.layout == torch.strided and not is_shard(value):
            pairs = torch.view_as_real(value.detach().resolve_conj().resolve_neg())
            return {"$complex128": _put_aside(pairs, path, tensors, names)}
        return {"$tensor": _put_aside(value, path, tensors, names)}
    if isinstance(value, dict):
        items = {key: _encode(item, _join(path, key), tensors, names) for key, item in value.items()}
        tag = next((tag for tag, kind in _DICTS.items() if isinstance(value, kind)), None)
        if tag is None and all(type(key) is str and not key.startswith("$") for key in items):
            return items
        return {tag or "$dict": [[_encode_key(key, path), item] for key, item in items.items()]}
    if isinstance(value, tuple | list):
        found = [  # lists of random states are long
            x if type(x) is int and x in _WORDS else _encode(x, _join(path, i), tensors, names)
            for i, x in enumerate(value)
        ]
        return {"$tuple": found} if isinstance(value, tuple) else found
    if type(value) is numpy.ndarray:
        try:
            # A copy: torch refuses negative strides and warns of arrays that can't be written to.
            array = torch.from_numpy(value.copy(order="C"))
        except (TypeError, ValueError) as cause:  # ValueError: bytes in another order than the machine's
            raise _unstorable(value, f"{path} (dtype {value.dtype})") from cause
        return {"$array": _put_aside(array, path, tensors, names)}
    if isinstance(value, numpy.generic) and value.dtype.kind not in "mM":  # of dates a bare number would be left
        value = value.item()
    return _encode_scalar(value, path)


def _put_aside(tensor: Tensor, path: str, tensors: dict[str, Tensor], names: dict[object, str]) -> str:
    check_storable(tensor, path)
    key = identity(tensor)
    if key not in names:
        name, number = path, 1
        while name in tensors:
            number += 1
            name = f"{path}~{number}"
        tensors[name] = tensor.detach()
        names[key] = name
    return names[key]


def _encode_key(key: object, path: str) -> Json:
    found: dict[str, Tensor] = {}
    skeleton = _encode(key, f"a key of {path}", found, {})
    if found:
        raise _unstorable(key, f"a key of {path}")
    return skeleton


def _encode_scalar(value: object, path: str) -> Json:
    # The base class's own conversion drops subclasses that json would write in their own way.
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and value.bit_length() <= _MAX_INT_BITS:
        return int.__int__(value)
    if isinstance(value, float):
        number = float.__float__(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if isinstance(value, complex):
        return {"$complex": [_encode_scalar(value.real, path), _encode_scalar(value.imag, path)]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    raise _unstorable(value, path)


def _unstorable(value: object, path: str) -> CheckpointContentError:
    advice = f" Pass vars({path.rpartition('.')[2]})." if isinstance(value, Namespace) else ""
    return CheckpointContentError(
        f"save: {path} is a {type(value).__qualname__}, which JSON and safetensors can't hold.{advice} A checkpoint "
        f"holds None, bool, int, float, complex, str, bytes, tensors, NumPy arrays and scalars, in list, tuple and "
        f"dict; at the top also objects with state_dict and load_state_dict, and torch.Generator."
    )


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _pairs(kind: Callable[[Any], Any]) -> Callable[[Json, Mapping[str, Tensor]], Any]:
    return lambda content, tensors: kind({decode(key, tensors): decode(item, tensors) for key, item in content})


_DICTS: dict[str, type[Any]] = {"$ordered": OrderedDict, "$counter": Counter}
_DECODERS: dict[str, Callable[[Json, Mapping[str, Tensor]], Any]] = {
    "$array": lambda content, tensors: tensors[content].cpu().numpy(),
    "$bytes": lambda content, _: base64.b64decode(content, validate=True),
    "$complex": lambda content, tensors: complex(decode(content[0], tensors), decode(content[1], tensors)),
    "$complex128": lambda content, tensors: torch.view_as_complex(tensors[content]),
    "$dict": _pairs(dict),
    "$float": lambda content, _: float(content),
    "$tensor": lambda content, tensors: tensors[content],
    "$tuple": lambda content, tensors: tuple([decode(item, tensors) for item in content]),
    **{tag: _pairs(kind) for tag, kind in _DICTS.items()},
}
