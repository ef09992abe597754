"""Nested Python values as a JSON skeleton plus named tensors, and back with the same types.

JSON has no tuples, no keys but strings, no nan and no bytes. Those become an object with a single key that
begins with ``$``; a dict of the user's with such a key, or one that is no string, becomes a list of pairs.
"""

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor

from everygpu.checkpoint.tensors import check_storable
from everygpu.errors import CheckpointContentError

Json: TypeAlias = Any
"""None, bool, int, finite float, str, list of these, or dict of str to these."""

STORABLE = (
    "None, bool, int, float, complex, str, bytes, tensors, NumPy arrays and scalars, and list, tuple and dict of these"
)

_MAX_INT_BITS = 14_000
"""Python refuses to read or write longer decimal numbers: ``sys.get_int_max_str_digits``."""


def encode(value: object, path: str, tensors: dict[str, Tensor]) -> Json:
    """Turn a value into JSON, putting its tensors aside.

    Subclasses come back as the type they derive from (a namedtuple as tuple, an IntEnum as int, a
    defaultdict as dict), except OrderedDict and Counter, which are kept. A Parameter comes back as Tensor.

    Args:
        value: Anything that `STORABLE` lists, nested at will.
        path: Where the value stands, dotted; names its tensors and appears in errors.
        tensors: Receives every tensor in the value under a name of its own.
    Returns:
        The skeleton; tensors appear in it as ``{"$tensor": name}``.
    Raises:
        CheckpointContentError: something in the value has no place in a checkpoint.
    """
    try:
        return _encode(value, path, tensors)
    except RecursionError as cause:
        raise CheckpointContentError(
            f"save: {path} must not contain itself nor be nested hundreds deep, got {type(value).__name__}. Flatten it."
        ) from cause


def decode(skeleton: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Turn a skeleton back into the value it was made from.

    Args:
        skeleton: What `encode` returned.
        tensors: The tensors put aside, by name.
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


def _encode(value: object, path: str, tensors: dict[str, Tensor]) -> Json:
    if isinstance(value, Tensor):
        return {"$tensor": _put_aside(value, path, tensors)}
    if isinstance(value, dict):
        return _encode_dict(value, path, tensors)
    if isinstance(value, tuple | list):
        items = [item if _is_json(item) else _encode(item, _join(path, i), tensors) for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, numpy.generic | numpy.ndarray):
        return _encode_numpy(value, path, tensors)
    return _encode_scalar(value, path)


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
    raise unstorable(value, path)


def unstorable(value: object, path: str) -> CheckpointContentError:
    """Say where a value stands that can't be stored, and what can."""
    return CheckpointContentError(
        f"save: {path} must be something that JSON and safetensors can hold, got {type(value).__qualname__}. "
        f"A checkpoint holds {STORABLE}; at the top also objects with state_dict and load_state_dict, "
        f"and torch.Generator."
    )


def _encode_dict(value: Mapping[object, object], path: str, tensors: dict[str, Tensor]) -> Json:
    special = next((tag for tag, kind in _DICTS.items() if isinstance(value, kind)), None)
    if special is None and all(type(key) is str and not key.startswith("$") for key in value):
        return {str(key): _encode(item, _join(path, key), tensors) for key, item in value.items()}
    pairs = [[_encode_key(key, path), _encode(item, _join(path, key), tensors)] for key, item in value.items()]
    return {special or "$dict": pairs}


def _encode_key(key: object, path: str) -> Json:
    found: dict[str, Tensor] = {}
    skeleton = _encode(key, f"a key of {path}", found)
    if found:
        raise unstorable(key, f"a key of {path}")
    return skeleton


def _encode_numpy(value: Any, path: str, tensors: dict[str, Tensor]) -> Json:
    if isinstance(value, numpy.generic):
        item = value.item()
        # Python has no number for longdouble; and dates and times in nanoseconds would become bare numbers.
        if type(item) is type(value) or value.dtype.kind in "mM":
            raise unstorable(value, path)
        return _encode_scalar(item, path)
    if hasattr(value, "mask"):  # a masked array would lose it
        raise unstorable(value, path)
    try:
        # A copy: torch refuses negative strides and warns of arrays that can't be written to.
        return {"$array": _put_aside(torch.from_numpy(value.copy(order="C")), path, tensors)}
    except (TypeError, ValueError) as cause:  # ValueError: bytes in another order than the machine's
        raise unstorable(value, f"{path} (dtype {value.dtype})") from cause


def _put_aside(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    check_storable(tensor, path)
    name, number = path, 1
    while name in tensors:
        number += 1
        name = f"{path}~{number}"
    tensors[name] = tensor.detach()
    return name


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


_Tensors: TypeAlias = Mapping[str, Tensor]


def _decode_pairs(kind: Callable[[Any], Any]) -> Callable[[Json, _Tensors], Any]:
    def decode_pairs(content: Iterable[tuple[Json, Json]], tensors: _Tensors) -> Any:
        return kind({decode(key, tensors): decode(item, tensors) for key, item in content})

    return decode_pairs


def _decode_complex(content: Json, tensors: _Tensors) -> complex:
    real, imag = (decode(part, tensors) for part in content)
    return complex(real, imag)


_DICTS: dict[str, type[Any]] = {"$ordered": OrderedDict, "$counter": Counter}
_DECODERS: dict[str, Callable[[Json, _Tensors], Any]] = {
    "$array": lambda content, tensors: tensors[content].cpu().numpy(),
    "$bytes": lambda content, _: base64.b64decode(content, validate=True),
    "$complex": _decode_complex,
    "$counter": _decode_pairs(Counter),
    "$dict": _decode_pairs(dict),
    "$float": lambda content, _: float(content),
    "$ordered": _decode_pairs(OrderedDict),
    "$tensor": lambda content, tensors: tensors[content],
    "$tuple": lambda content, tensors: tuple([decode(item, tensors) for item in content]),
}
