"""Copies counters and the like from a replica into the module, where the module itself did not run."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from everygpu.parallel.replicas.watch import TABLES

_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None)})


def take_plain_attributes(originals: Sequence[nn.Module], replicas: Sequence[nn.Module]) -> None:
    """Set the numbers, texts and containers of such that a forward has changed in a replica in the original, too.

    Attributes that hold tensors, modules or other objects stay as they are in the original: theirs are on another
    device, or are parts of the replica.

    Args:
        originals: The module tree.
        replicas: Those of one replica, in the same order.
    """
    for original, replica in zip(originals, replicas):
        mine = vars(original)
        for name, value in vars(replica).items():
            if name not in TABLES and _is_plain(value) and _is_plain(mine.get(name)) and _differ(mine.get(name), value):
                mine[name] = _written(mine.get(name), value)


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return _PLAIN.issuperset(map(type, value)) and _PLAIN.issuperset(map(type, value.values()))
    return _PLAIN.issuperset(map(type, value)) if type(value) in (list, set) else type(value) in _PLAIN


def _differ(mine: Any, theirs: Any) -> bool:
    return type(mine) is not type(theirs) or bool(mine != theirs)


def _written(mine: Any, theirs: Any) -> Any:
    """Return the value to set: a container of the same type keeps its identity, as other code may refer to it."""
    if type(mine) is not type(theirs) or type(mine) in _PLAIN:
        return theirs.copy() if type(theirs) in (dict, list, set) else theirs
    mine.clear()
    mine.extend(theirs) if type(mine) is list else mine.update(theirs)
    return mine
