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
from contextvars import ContextVar
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
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
        self.write(1.0)

    def read(self) -> Any:
        raise NotImplementedError

    def write(self, value: Any) -> None:
        raise NotImplementedError

    def drop(self) -> None:
        """End what outlives the place."""


class Attribute(Place):
    def read(self) -> Any:
        return self.value

    def write(self, value: Any) -> None:
        self.value = value


class ThroughNone(Attribute):
    """The old value's memory may be the new one's."""

    values = [Fraction(1), Fraction(3), Fraction(5)]

    def write(self, value: Any) -> None:
        self.value = None
        self.value = Fraction(value)


class Deleted(Place):
    value: Any = 1.5

    def read(self) -> Any:
        return getattr(self, "value", 1.5)

    def write(self, value: Any) -> None:
        if "value" in vars(self):
            del self.value
        else:
            self.value = value


class Nested(Place):
    def __init__(self) -> None:
        self.config = SimpleNamespace(sub=SimpleNamespace())
        super().__init__()

    def read(self) -> Any:
        return self.config.sub.alpha

    def write(self, value: Any) -> None:
        self.config.sub.alpha = value


class Replaced(Nested):
    def write(self, value: Any) -> None:
        self.config.sub = SimpleNamespace(alpha=value)


class Config:
    sub: Any = None
    value: Any = None


class OtherDict(Place):
    def __init__(self) -> None:
        self.config = Config()
        super().__init__()

    def read(self) -> Any:
        return self.config.sub.alpha

    def write(self, value: Any) -> None:
        self.config.__dict__ = {"sub": SimpleNamespace(alpha=value)}


class OfAnotherClass(Place):
    class A:
        factor = 1.0

    class B:
        factor = 2.0

    values = [0, 1]

    def __init__(self) -> None:
        self.held = [self.A()]
        super().__init__()

    def read(self) -> Any:
        return self.held[0].factor

    def write(self, value: Any) -> None:
        self.held[0].__class__ = (self.A, self.B)[int(value)]  # type: ignore[assignment]


class Element(Place):
    kind: Any = list

    def __init__(self) -> None:
        self.held = {"deep": [{"deeper": self.kind([1.0])}]}
        super().__init__()

    def read(self) -> Any:
        return self.held["deep"][0]["deeper"][0]

    def write(self, value: Any) -> None:
        self.held["deep"][0]["deeper"][0] = value


class InDeque(Element):
    kind = collections.deque


class OwnList(Element):
    class kind(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(())


class InTuple(Place):
    def __init__(self) -> None:
        self.held = ("name", SimpleNamespace())
        super().__init__()

    def read(self) -> Any:
        return self.held[1].value

    def write(self, value: Any) -> None:
        self.held[1].value = value


class InSet(Place):
    def __init__(self) -> None:
        self.held: set[Any] = set()
        super().__init__()

    def read(self) -> Any:
        return next(iter(self.held))

    def write(self, value: Any) -> None:
        self.held.clear()
        self.held.add(value)


class Key(InSet):
    def __init__(self) -> None:
        self.kept: dict[Any, str] = {}
        super().__init__()

    def read(self) -> Any:
        return next(iter(self.kept))

    def write(self, value: Any) -> None:
        self.kept.clear()
        self.kept[value] = "key"


class Order(Place):
    def __init__(self) -> None:
        self.held = collections.OrderedDict(a=1.0, b=2.0)
        super().__init__()

    def read(self) -> Any:
        return next(iter(self.held.values()))

    def write(self, value: Any) -> None:
        self.held.move_to_end(next(iter(self.held)))


class InUserDict(Element):
    def __init__(self) -> None:
        self.held = collections.UserDict(value=1.0)  # type: ignore[assignment]
        Place.__init__(self)

    def read(self) -> Any:
        return self.held["value"]

    def write(self, value: Any) -> None:
        self.held["value"] = value


class InDefaults(Element):
    def __init__(self) -> None:
        self.held = collections.defaultdict(lambda: 2.0)  # type: ignore[assignment]
        Place.__init__(self)

    def read(self) -> Any:
        return self.held.get("value", 1.0)

    def write(self, value: Any) -> None:
        self.held.clear()
        self.held["value"] = value


class Proxied(Element):
    def __init__(self) -> None:
        self.inner = SimpleNamespace(table=types.MappingProxyType(table := {}))
        self.inner.write = table.__setitem__
        Place.__init__(self)

    def read(self) -> Any:
        return self.inner.table["value"]

    def write(self, value: Any) -> None:
        self.inner.write("value", value)


@dataclass
class Options:
    value: Any = 1.0
    others: list[int] = field(default_factory=list)


class InDataclass(Place):
    def __init__(self) -> None:
        self.held = Options()
        super().__init__()

    def read(self) -> Any:
        return self.held.value

    def write(self, value: Any) -> None:
        self.held.value = value


class Slotted:
    __slots__ = ("value",)


class InSlots(InDataclass):
    def __init__(self) -> None:
        self.held = Slotted()  # type: ignore[assignment]
        Place.__init__(self)


class InCell(Place):
    def __init__(self) -> None:
        value: Any = 1.0

        def read() -> Any:
            return value

        def write(new: Any) -> None:
            nonlocal value
            value = new

        self.get, self.put = read, write
        super().__init__()

    def read(self) -> Any:
        return self.get()

    def write(self, value: Any) -> None:
        self.put(value)


class DeepInCell(InCell):
    def __init__(self) -> None:
        held = SimpleNamespace(values=[1.0])
        self.get, self.put = lambda: held.values[0], functools.partial(held.values.__setitem__, 0)
        Place.__init__(self)


class Default(Place):
    def __init__(self) -> None:
        def get(value: Any = 1.0) -> Any:
            return value

        self.get = get
        super().__init__()

    def read(self) -> Any:
        return self.get()

    def write(self, value: Any) -> None:
        self.get.__defaults__ = (value,)


class KeywordDefault(Default):
    def __init__(self) -> None:
        def get(*, value: Any = 1.0) -> Any:
            return value

        self.get = get
        Place.__init__(self)

    def write(self, value: Any) -> None:
        self.get.__kwdefaults__["value"] = value


class FunctionAttribute(Default):
    def read(self) -> Any:
        return self.get.value  # type: ignore[attr-defined]

    def write(self, value: Any) -> None:
        self.get.value = value  # type: ignore[attr-defined]


class Code(Default):
    values = [0, 1]

    def write(self, value: Any) -> None:
        self.get.__code__ = ((lambda value: 1.0), (lambda value: 2.0))[int(value)].__code__


class Partial(Place):
    def __init__(self) -> None:
        self.get = functools.partial(dict, value=1.0)
        super().__init__()

    def read(self) -> Any:
        return self.get()["value"]

    def write(self, value: Any) -> None:
        self.get.keywords["value"] = value


HERE: Any = 1.0


class Global(Place):
    def read(self) -> Any:
        return _read_global()

    def write(self, value: Any) -> None:
        globals()["HERE"] = value


def _read_global() -> Any:
    return HERE


SETTINGS = {"deep": SimpleNamespace(value=1.0)}


class InGlobal(Place):
    def read(self) -> Any:
        return SETTINGS["deep"].value

    def write(self, value: Any) -> None:
        SETTINGS["deep"].value = value


other = types.ModuleType("other")


class OtherModule(Place):
    def read(self) -> Any:
        return other.value

    def write(self, value: Any) -> None:
        other.value = value  # type: ignore[attr-defined]


class Appears(Place):
    """A name that wasn't there."""

    def read(self) -> Any:
        return getattr(other, "sometimes", 1.0)

    def write(self, value: Any) -> None:
        if hasattr(other, "sometimes"):
            del other.sometimes
        else:
            other.sometimes = value  # type: ignore[attr-defined]

    def __init__(self) -> None:
        other.sometimes = 3.0  # type: ignore[attr-defined]
        super().__init__()


class OfClass(Place):
    shared: Any = 1.0

    def read(self) -> Any:
        return self.shared

    def write(self, value: Any) -> None:
        OfClass.shared = value


class InClass(Place):
    shared = {"deep": [1.0]}

    def read(self) -> Any:
        return self.shared["deep"][0]

    def write(self, value: Any) -> None:
        self.shared["deep"][0] = value


class OfBase(OfClass):
    def write(self, value: Any) -> None:
        Place.inherited = value  # type: ignore[attr-defined]

    def read(self) -> Any:
        return self.inherited  # type: ignore[attr-defined]


class Method(Place):
    def read(self) -> Any:
        return self.get()

    def get(self) -> Any:
        return 1.0

    def write(self, value: Any) -> None:
        Method.get = lambda self: value  # type: ignore[method-assign]


class Property(Place):
    def read(self) -> Any:
        return self.value

    @property
    def value(self) -> Any:
        return self._value

    def write(self, value: Any) -> None:
        self._value = value


class Kind(enum.Enum):
    FIRST = 1


class InEnum(Place):
    def read(self) -> Any:
        return Kind.FIRST.factor  # type: ignore[attr-defined]

    def write(self, value: Any) -> None:
        Kind.FIRST.factor = value  # type: ignore[attr-defined]


class InArray(Place):
    values = FLOATS

    def __init__(self) -> None:
        self.held = SimpleNamespace(array=np.ones((2, 3)))
        super().__init__()

    def read(self) -> Any:
        return float(self.held.array[1, 2])

    def write(self, value: Any) -> None:
        self.held.array[1, 2] = value


class InObjectArray(InArray):
    values = VALUES

    def __init__(self) -> None:
        self.held = SimpleNamespace(array=np.array([[None] * 3] * 2))
        Place.__init__(self)

    def read(self) -> Any:
        return self.held.array[1, 2]


class InTensor(Place):
    """On the host; written as NumPy does, which torch doesn't count."""

    values = FLOATS

    def __init__(self) -> None:
        self.held = SimpleNamespace(value=torch.ones(3))
        super().__init__()

    def read(self) -> Any:
        return float(self.held.value.numpy()[1])

    def write(self, value: Any) -> None:
        self.held.value.numpy()[1] = value


VARIABLE: ContextVar[Any] = ContextVar("VARIABLE", default=1.0)


class InContext(Place):
    def read(self) -> Any:
        return VARIABLE.get()

    def write(self, value: Any) -> None:
        VARIABLE.set(value)


class InEnvironment(Place):
    values = FLOATS

    def read(self) -> Any:
        return float(os.environ["EVERYGPU_TEST_PLACE"])

    def write(self, value: Any) -> None:
        os.environ["EVERYGPU_TEST_PLACE"] = str(value)

    def drop(self) -> None:
        os.environ.pop("EVERYGPU_TEST_PLACE", None)


class Weakly(Place):
    def __init__(self) -> None:
        self.kept = Config()
        self.refs = weakref.WeakValueDictionary(kept=self.kept)
        super().__init__()

    def read(self) -> Any:
        return self.refs["kept"].value

    def write(self, value: Any) -> None:
        self.kept.value = value


class Cached(Place):
    def __init__(self) -> None:
        held = [1.0]
        self.put = functools.partial(held.__setitem__, 0)
        self.get = functools.lru_cache(lambda: held[0])
        super().__init__()

    def read(self) -> Any:
        return self.get()

    def write(self, value: Any) -> None:
        self.put(value)
        self.get.cache_clear()


class Unregistered(Place):
    """A module that is no part of the model."""

    def __init__(self) -> None:
        self.held = (nn.Dropout(0.5).eval(),)
        super().__init__()

    def read(self) -> Any:
        return self.held[0].value

    def write(self, value: Any) -> None:
        self.held[0].value = value


class Unseen(Place):
    is_seen = False


class Counting(Unseen):
    is_written = True

    def __init__(self) -> None:
        self.counter = itertools.count()
        super().__init__()

    def read(self) -> Any:
        return next(self.counter)

    def write(self, value: Any) -> None:
        pass


class InC(Unseen):
    values = FLOATS

    def __init__(self) -> None:
        self.held: Any = ctypes.c_double(1.0)
        super().__init__()

    def read(self) -> Any:
        return self.held.value

    def write(self, value: Any) -> None:
        self.held.value = value


class InPlainArray(Unseen):
    values = FLOATS

    def __init__(self) -> None:
        self.held = array.array("d", [1.0])
        super().__init__()

    def read(self) -> Any:
        return self.held[0]

    def write(self, value: Any) -> None:
        self.held[0] = value


class OfThread(Unseen):
    def __init__(self) -> None:
        self.held = threading.local()
        super().__init__()

    def read(self) -> Any:
        return self.held.value

    def write(self, value: Any) -> None:
        self.held.value = value


class WrittenByReading(Unseen):
    """Forward counts, in a global."""

    is_written = True

    def read(self) -> Any:
        SETTINGS["count"] = count = SETTINGS.get("count", 0) + 1  # type: ignore[assignment, operator]
        return count

    def write(self, value: Any) -> None:
        pass


PLACES: list[type[Place]] = [
    kind for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Place) and kind not in (Place, Unseen)
]  # fmt: skip
