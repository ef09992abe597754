"""What a forward reads beside its arguments that Dynamo's guards leave out: which tensors, and the code of classes."""

from collections.abc import Callable
from itertools import starmap
from types import CodeType
from typing import Any

from torch import Tensor


def tensor_reader(sources: list[str], scope: dict[str, Any]) -> Callable[[dict[str, Any]], tuple[Tensor, ...]]:
    """Make the function that reads tensors where Dynamo has found them, from what a call gets.

    Args:
        sources: Python over ``L``, what the call gets, and ``G``, globals.
        scope: The globals.
    """
    items = "".join(f"{source}, " for source in sources)
    read: Callable[[dict[str, Any]], tuple[Tensor, ...]] = eval(f"lambda L: ({items})", {"G": scope})
    return read


def class_reader(classes: set[type], codes: list[CodeType]) -> Callable[[], tuple[Any, ...]]:
    """Make the function that reads what Dynamo takes to stay as it is in classes: the number of their attributes, and
    the functions whose code was traced.

    Args:
        classes: Those of all objects that a trace has met.
        codes: What it went through.
    """
    traced = set(map(id, codes))
    spaces = [vars(base) for base in {base for owner in classes for base in owner.__mro__}]
    places = [(owner, name) for owner in classes for name in dir(owner) if id(_code_of(owner, name)[1]) in traced]
    return lambda: (*map(len, spaces), *starmap(_code_of, places))


def _code_of(owner: type, name: str) -> tuple[Any, Any]:
    """Return a class's function and its code; that of a property's getter; of anything else, None as the code."""
    value = getattr(owner, name, None)
    value = getattr(value, "fget", getattr(value, "__func__", value))  # a class method is bound anew by each look
    return value, getattr(value, "__code__", None)
