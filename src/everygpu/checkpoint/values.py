"""Nested Python values as JSON plus named tensors, and back with the same types.

JSON has no tuples, no keys but strings, no nan and no bytes. Those become an object with a single key that
begins with ``$``; a dict of the user's with such a key, or one that is no string, becomes a list of pairs.
"""

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from everygpu.errors import CheckpointContentError

Json: TypeAlias = Any

STORABLE = (
    "None, bool, int, float, complex, str, bytes, tensors, NumPy arrays and scalars, and list, tuple and dict of these"
)

_MAX_INT_BITS = 14_000
"""Python refuses to read or write longer decimal numbers: ``sys.get_int_max_str_digits``."""

_DTYPES = frozenset(
    {
        *("float64", "float32", "float16", "bfloat16", "complex64", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    }
)
"""Those that safetensors has, by torch's names."""


def encode(value: object, path: str, tensors: dict[str, Tensor]) -> Json:
    """Turn a value into JSON, putting its tensors aside.

    Subclasses come back as the type they derive from (a namedtuple as tuple, an IntEnum as int, a
    defaultdict as dict), except OrderedDict and Counter, which are kept. A Parameter comes back as Tensor.

    Args:
        value: Anything that `STORABLE` lists, nested at will.
        path: Where the value stands, dotted; names its tensors and appears in errors.
        tensors: Receives every tensor in the value; equal views of the same memory once.
    Returns:
        The skeleton; tensors appear in it as ``{"$tensor": name}``.
    Raises:
        CheckpointContentError: something in the value has no place in a checkpoint.
    """
    try:
        return _Encoder(tensors).encode(value, path)
    except RecursionError as cause:
        raise CheckpointContentError(
            f"save: {path} contains itself, or is nested hundreds deep ({type(value).__name__}). Flatten it."
        ) from cause


def decode(skeleton: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Turn a skeleton back into the value it was made from.

    Raises:
        LookupError, TypeError, ValueError: the skeleton is not one that `encode` makes.
    """
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
    if tensor.is_meta or tensor.layout != torch.strided:
        return id(tensor)
    if tensor.numel() == 0:
        return tensor.device, tensor.dtype, tuple(tensor.shape)
    place = (tensor.device, tensor.data_ptr(), tensor.is_conj(), tensor.is_neg())
    return (*place, tensor.dtype, tuple(tensor.shape), tensor.stride())


def check_storable(tensor: Tensor, name: str) -> None:
    """Refuse tensors whose elements are not plain memory, or of a dtype that safetensors lacks."""
    shown = name.encode(errors="backslashreplace").decode()
    problem = None
    if shown != name or name == "__metadata__":  # half of a surrogate pair
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
    elif str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
        problem = f"is of {tensor.dtype}, which safetensors lacks"
    if problem is not None:
        raise CheckpointContentError(f"save: the tensor at {shown} {problem}. Turn it into an ordinary one first.")


class _Encoder:
    """Puts tensors aside under names of their own."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._names = {identity(tensor): name for name, tensor in tensors.items()}

    def encode(self, value: object, path: str) -> Json:
        if isinstance(value, Tensor):
            return {"$tensor": self._put_aside(value, path)}
        if isinstance(value, dict):
            return self._dict(value, path)
        if isinstance(value, tuple | list):
            items = [item if _is_json(item) else self.encode(item, _join(path, i)) for i, item in enumerate(value)]
            return {"$tuple": items} if isinstance(value, tuple) else items
        if isinstance(value, numpy.generic | numpy.ndarray):
            return self._numpy(value, path)
        return _encode_scalar(value, path)

    def _dict(self, value: Mapping[object, object], path: str) -> Json:
        special = next((tag for tag, kind in _DICTS.items() if isinstance(value, kind)), None)
        if special is None and all(type(key) is str and not key.startswith("$") for key in value):
            return {str(key): self.encode(item, _join(path, key)) for key, item in value.items()}
        pairs = [[_encode_key(key, path), self.encode(item, _join(path, key))] for key, item in value.items()]
        return {special or "$dict": pairs}

    def _numpy(self, value: Any, path: str) -> Json:
        if isinstance(value, numpy.generic):
            item = value.item()
            # Python has no number for longdouble; and dates and times in nanoseconds would become bare numbers.
            if type(item) is type(value) or value.dtype.kind in "mM":
                raise _unstorable(value, path)
            return _encode_scalar(item, path)
        if hasattr(value, "mask"):  # a masked array would lose it
            raise _unstorable(value, path)
        try:
            # A copy: torch refuses negative strides and warns of arrays that can't be written to.
            return {"$array": self._put_aside(torch.from_numpy(value.copy(order="C")), path)}
        except (TypeError, ValueError) as cause:  # ValueError: bytes in another order than the machine's
            raise _unstorable(value, f"{path} (dtype {value.dtype})") from cause

    def _put_aside(self, tensor: Tensor, path: str) -> str:
        check_storable(tensor, path)
        key = identity(tensor)
        if key not in self._names:
            name, number = path, 1
            while name in self._tensors:
                number += 1
                name = f"{path}~{number}"
            self._tensors[name] = tensor.detach()
            self._names[key] = name
        return self._names[key]


def _encode_key(key: object, path: str) -> Json:
    found: dict[str, Tensor] = {}
    skeleton = _Encoder(found).encode(key, f"a key of {path}")
    if found:
        raise _unstorable(key, f"a key of {path}")
    return skeleton


def _is_json(value: object) -> bool:
    """Tell quickly that JSON holds a value as it is: lists of random states and parameters are long."""
    if type(value) is int:
        return value.bit_length() <= _MAX_INT_BITS
    return value is None or type(value) in (str, bool)


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
    return CheckpointContentError(
        f"save: {path} is a {type(value).__qualname__}, which JSON and safetensors can't hold. A checkpoint holds "
        f"{STORABLE}; at the top also objects with state_dict and load_state_dict, and torch.Generator."
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
    "$counter": _pairs(Counter),
    "$dict": _pairs(dict),
    "$float": lambda content, _: float(content),
    "$ordered": _pairs(OrderedDict),
    "$tensor": lambda content, tensors: tensors[content],
    "$tuple": lambda content, tensors: tuple([decode(item, tensors) for item in content]),
}
