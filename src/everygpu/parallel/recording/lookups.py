"""Tables of which a compiled graph only looks rows up, such as a language model's embedding."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from everygpu.parallel.dynamo_graph import inputs_of, is_written, value_of

Lookups = Mapping[int, Sequence[int]]
"""By a function's argument that is a table: those that name the rows."""

NO_LOOKUPS: Lookups = MappingProxyType({})

RESHAPING = frozenset({"contiguous", "flatten", "reshape", "unsqueeze", "view"})
"""Methods of tensors that leave all values, unless they are given a dtype."""


def find_lookups(graph: Any) -> Lookups:
    """Find the inputs of one of Dynamo's graphs in which it looks up rows that other inputs name, and nothing else.

    Args:
        graph: A ``torch.fx.GraphModule``, whose parameters are inputs; not yet compiled.
    """
    inputs = inputs_of(graph)
    # Who calls it doesn't know what one that is written will hold.
    places = {n: i for i, n in enumerate(inputs) if isinstance(value_of(n), Tensor) and not is_written(n)}
    found = {i: [_named_by(user, node) for user in node.users] for i, node in enumerate(inputs)}
    return {i: [places[n] for n in named] for i, named in found.items() if named and all(n in places for n in named)}


def _named_by(user: Any, table: Any) -> Any:
    """Return what names the rows that a node looks up in a table, before it was shaped anew; None of other nodes."""
    if user.target is not F.embedding:
        return None
    rows, weight, max_norm = _arguments(*user.args, **user.kwargs)
    while rows.op == "call_method" and rows.target in RESHAPING and not _casts(rows):
        rows = rows.args[0]
    return rows if weight is table and max_norm is None else None


def _casts(node: Any) -> bool:
    """Tell whether a view is of another dtype."""
    return any(isinstance(x, torch.dtype) for x in (*node.args, *node.kwargs.values()))


def _arguments(
    input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, *_: Any, **__: Any
) -> tuple[Any, Any, Any]:
    """Return those of ``embedding`` that matter, however it was called."""
    return input, weight, max_norm
