"""Places where Python keeps what a step reads, each with a way to write there."""

import array
import collections
import ctypes
import enum
import functools
import itertools
import math
import os
import threading
import types
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace as Namespace
from typing import Any

import numpy as np
import torch
from torch import nn

VALUES: list[Any] = [0.0, -0.0, 1, True, 1.0, False, 0, Fraction(1), Fraction(3), Decimal(2), np.float32(1), 1 + 0j, 0j]
"""Equal ones among them are of other types, or other bits."""
FLOATS = [0.0, -0.0, 1.0, 2.5, -3.0]
_KINDS = list(dict.fromkeys(map(type, VALUES)))


def number_of(value: Any) -> float:
    """Return another number for each value, of whatever type, that is another."""
    real = float(value.real) if isinstance(value, complex) else float(value)
    return real + 0.25 * math.copysign(1, real) + 0.125 * _KINDS.index(type(value))


class Place:
    """Holds one value."""

    values: list[Any] = VALUES
    is_seen = True
    """Whether steps that read it may be captured."""
    is_written = False
    """Whether steps write to it: two models don't read the same there."""

    def __init__(self) -> None:
        self.prepare()
        self.write(1.0)

    def prepare(self) -> None:
        """Make what the value is held by."""

    def read(self) -> Any:
        raise NotImplementedError

    def write(self, value: Any) -> None:
        raise NotImplementedError

    def drop(self) -> None:
        """End what outlives the place."""


PLACES: list[type[Place]] = []


def place(
    name: str,
    read: Callable[[Any], Any],
    write: Callable[[Any, Any], Any],
    held: Callable[[], Any] | None = None,
    **more: Any,
) -> type[Place]:
    """Make a kind of place.

    Args:
        held: Makes what becomes its attribute of this name.
        more: What else its class has.
    """
    if held is not None:
        more["prepare"] = lambda self: setattr(self, "held", held())
    PLACES.append(type(name, (Place,), {"read": read, "write": write, **more}))
    return PLACES[-1]


def _set(owner: str, name: str) -> Callable[[Any, Any], None]:
    """Set an attribute of what is found at a path from the place."""
    return lambda p, value: setattr(functools.reduce(getattr, owner.split(".") if owner else [], p), name, value)


# In attributes and objects.


def _through_none(p: Any, value: Any) -> None:
    """The old value's memory may be the new one's."""
    p.value = None
    p.value = Fraction(value)


def _delete_or_set(p: Any, value: Any) -> None:
    if "value" in vars(p):
        del p.value
    else:
        p.value = value


class Config:
    sub: Any = None
    value: Any = None


class A:
    factor = 1.0


class B:
    factor = 2.0


@dataclass
class Options:
    value: Any = 1.0
    others: list[int] = field(default_factory=list)


class Slotted:
    __slots__ = ("value",)


def _held_value(p: Any) -> Any:
    return p.held.value


_set_held = _set("held", "value")
FRACTIONS = [Fraction(1), Fraction(3), Fraction(5)]

place("Attribute", lambda p: p.value, _set("", "value"))
place("ThroughNone", lambda p: p.value, _through_none, values=FRACTIONS)
place("Deleted", lambda p: getattr(p, "value", 1.5), _delete_or_set, value=1.5)
place("Nested", lambda p: p.held.sub.alpha, _set("held.sub", "alpha"), lambda: Namespace(sub=Namespace()))
place("Replaced", lambda p: p.held.sub.alpha, lambda p, v: setattr(p.held, "sub", Namespace(alpha=v)), Namespace)
place(
    "OtherDict",
    lambda p: p.held.sub.alpha,
    lambda p, v: setattr(p.held, "__dict__", {"sub": Namespace(alpha=v)}),
    Config,
)
place(
    "OfAnotherClass",
    lambda p: p.held[0].factor,
    lambda p, v: setattr(p.held[0], "__class__", (A, B)[int(v)]),
    lambda: [A()],
    values=[0, 1],
)
place("InDataclass", _held_value, _set_held, Options)
place("InSlots", _held_value, _set_held, Slotted)
place("InTuple", lambda p: p.held[1].value, lambda p, v: setattr(p.held[1], "value", v), lambda: ("name", Namespace()))
# A module that is no part of the model.
place(
    "Unregistered",
    lambda p: p.held[0].value,
    lambda p, v: setattr(p.held[0], "value", v),
    lambda: (nn.Dropout(0.5).eval(),),
)


# In containers.


class OwnList(list):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(())


def _refill(p: Any, value: Any) -> None:
    p.held.clear()
    if isinstance(p.held, set):
        p.held.add(value)
    else:
        p.held["value"] = value


def _other_key(p: Any, value: Any) -> None:
    p.held.clear()
    p.held[value] = "key"


def _proxied() -> Any:
    table: dict[str, Any] = {}
    return Namespace(table=types.MappingProxyType(table), write=table.__setitem__)


def _weakly(p: Any) -> None:
    p.kept = Config()
    p.refs = weakref.WeakValueDictionary(kept=p.kept)


for _kind, _list in (("Element", list), ("InDeque", collections.deque), ("OwnList", OwnList)):
    place(
        _kind,
        lambda p: p.held["deep"][0]["deeper"][0],
        lambda p, v: p.held["deep"][0]["deeper"].__setitem__(0, v),
        lambda kind=_list: {"deep": [{"deeper": kind([1.0])}]},
    )
place("InSet", lambda p: next(iter(p.held)), _refill, set)
place("Key", lambda p: next(iter(p.held)), _other_key, dict)
place(
    "Order",
    lambda p: next(iter(p.held.values())),
    lambda p, v: p.held.move_to_end(next(iter(p.held))),
    lambda: collections.OrderedDict(a=1.0, b=2.0),
)
place("InUserDict", lambda p: p.held["value"], lambda p, v: p.held.__setitem__("value", v), collections.UserDict)
place("InDefaults", lambda p: p.held.get("value", 1.0), _refill, lambda: collections.defaultdict(lambda: 2.0))
place("Proxied", lambda p: p.held.table["value"], lambda p, v: p.held.write("value", v), _proxied)
place("Weakly", lambda p: p.refs["kept"].value, _set("kept", "value"), prepare=_weakly)
place(
    "InArray",
    lambda p: float(p.held.array[1, 2]),
    lambda p, v: p.held.array.__setitem__((1, 2), v),
    lambda: Namespace(array=np.ones((2, 3))),
    values=FLOATS,
)
InObjectArray = place(
    "InObjectArray",
    lambda p: p.held.array[1, 2],
    lambda p, v: p.held.array.__setitem__((1, 2), v),
    lambda: Namespace(array=np.array([[None] * 3] * 2)),
)
# On the host; written as NumPy does, which torch doesn't count.
place(
    "InTensor",
    lambda p: float(p.held.value.numpy()[1]),
    lambda p, v: p.held.value.numpy().__setitem__(1, v),
    lambda: Namespace(value=torch.ones(3)),
    values=FLOATS,
)


# In functions.


def _in_cell(p: Any) -> None:
    value: Any = 1.0

    def read() -> Any:
        return value

    def write(new: Any) -> None:
        nonlocal value
        value = new

    p.get, p.put = read, write


def _deep_in_cell(p: Any) -> None:
    held = Namespace(values=[1.0])
    p.get, p.put = lambda: held.values[0], functools.partial(held.values.__setitem__, 0)


def _cached(p: Any) -> None:
    held = [1.0]
    p.put, p.get = functools.partial(held.__setitem__, 0), functools.lru_cache(lambda: held[0])


def _default(p: Any) -> None:
    def get(value: Any = 1.0) -> Any:
        return value

    p.get = get


def _keyword_default(p: Any) -> None:
    def get(*, value: Any = 1.0) -> Any:
        return value

    p.get = get


def _call(p: Any) -> Any:
    return p.get()


_CODES = ((lambda value: 1.0).__code__, (lambda value: 2.0).__code__)

place("InCell", _call, lambda p, v: p.put(v), prepare=_in_cell)
place("DeepInCell", _call, lambda p, v: p.put(v), prepare=_deep_in_cell)
place("Cached", _call, lambda p, v: (p.put(v), p.get.cache_clear()), prepare=_cached)
place("Default", _call, lambda p, v: setattr(p.get, "__defaults__", (v,)), prepare=_default)
place("KeywordDefault", _call, lambda p, v: p.get.__kwdefaults__.update(value=v), prepare=_keyword_default)
place("FunctionAttribute", lambda p: p.get.value, _set("get", "value"), prepare=_default)
Code = place("Code", _call, lambda p, v: setattr(p.get, "__code__", _CODES[int(v)]), prepare=_default, values=[0, 1])
place(
    "Partial",
    lambda p: p.held()["value"],
    lambda p, v: p.held.keywords.__setitem__("value", v),
    lambda: functools.partial(dict, value=1.0),
)


# In modules and classes.

HERE: Any = 1.0
SETTINGS: dict[str, Any] = {"deep": Namespace(value=1.0)}
other = types.ModuleType("other")


def _read_global() -> Any:
    return HERE


def _appear_or_go(p: Any, value: Any) -> None:
    if hasattr(other, "sometimes"):
        del other.sometimes
    else:
        other.sometimes = value  # type: ignore[attr-defined]


class Kind(enum.Enum):
    FIRST = 1


place("Global", lambda p: _read_global(), lambda p, v: globals().__setitem__("HERE", v))
place("InGlobal", lambda p: SETTINGS["deep"].value, lambda p, v: setattr(SETTINGS["deep"], "value", v))
place("OtherModule", lambda p: other.value, lambda p, v: setattr(other, "value", v))
# A name that wasn't there.
place(
    "Appears",
    lambda p: getattr(other, "sometimes", 1.0),
    _appear_or_go,
    prepare=lambda p: setattr(other, "sometimes", 3.0),
)
place("OfClass", lambda p: p.shared, lambda p, v: setattr(type(p), "shared", v), shared=1.0)
place("InClass", lambda p: p.shared["deep"][0], lambda p, v: p.shared["deep"].__setitem__(0, v), shared={"deep": [1.0]})
place("OfBase", lambda p: p.inherited, lambda p, v: setattr(Place, "inherited", v))
place("Method", _call, lambda p, v: setattr(type(p), "get", lambda self: v), get=lambda self: 1.0)
place("Property", lambda p: p.value, _set("", "_value"), value=property(lambda self: self._value))
place("InEnum", lambda p: Kind.FIRST.factor, lambda p, v: setattr(Kind.FIRST, "factor", v))  # type: ignore[attr-defined]


# Of the thread and the process.

VARIABLE: ContextVar[Any] = ContextVar("VARIABLE", default=1.0)
_NAME = "EVERYGPU_TEST_PLACE"

place("InContext", lambda p: VARIABLE.get(), lambda p, v: VARIABLE.set(v))
place(
    "InEnvironment",
    lambda p: float(os.environ["EVERYGPU_TEST_PLACE"]),
    lambda p, v: os.environ.__setitem__(_NAME, str(v)),
    values=FLOATS,
    drop=lambda p: os.environ.pop(_NAME, None),
)


# Those that hide.


def _count(p: Any) -> int:
    """Forward counts, in a global."""
    SETTINGS["count"] = count = SETTINGS.get("count", 0) + 1
    return count


_HIDDEN = {"is_seen": False}
_WRITTEN = {**_HIDDEN, "is_written": True}

place("Counting", lambda p: next(p.held), lambda p, v: None, itertools.count, **_WRITTEN)
place("InC", _held_value, _set_held, lambda: ctypes.c_double(1.0), values=FLOATS, **_HIDDEN)
place(
    "InPlainArray",
    lambda p: p.held[0],
    lambda p, v: p.held.__setitem__(0, v),
    lambda: array.array("d", [1.0]),
    values=FLOATS,
    **_HIDDEN,
)
place("OfThread", _held_value, _set_held, threading.local, **_HIDDEN)
place("WrittenByReading", _count, lambda p, v: None, **_WRITTEN)
