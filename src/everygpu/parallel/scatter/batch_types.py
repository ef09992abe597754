"""Batches that are no tensors: ``Rows``, and classes with a way of their own to be counted, cut, joined and moved."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from everygpu import comm, tree
from everygpu.errors import OptionError, SplitError
from everygpu.parallel.scatter.ready_types import NESTED, BatchType, find_ready, move_by_method, row_type, spans
from everygpu.parallel.scatter.split import Replicated
from everygpu.parallel.sharded.batch import ShardedBatch

T = TypeVar("T")

# Looked at for every part of every call.
_PLAIN = frozenset(
    {int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, dict}
    | {list, tuple, ShardedBatch, nn.Parameter, Replicated}
)


class Rows(list[T]):
    """A list whose items are each a row of the batch: strings, dicts, images of several sizes, or any objects.

    Each replica receives a ``Rows`` with its items, the tensors in them on its device. From the replicas' outputs one
    is made, in the order of the rows::

        images = everygpu.Rows([torch.rand(3, 48, 64), torch.rand(3, 50, 40), torch.rand(3, 8, 8)])
        first, second = everygpu.scatter(images, ["cpu", "cpu"])
        len(first), first[1].shape, second[0].shape  # 2, (3, 50, 40), (3, 8, 8)

    It may stand anywhere in the arguments, beside tensors with as many rows, whatever ``dim`` is; a ``collate_fn`` may
    return it, and forward may. Of a plain list each tensor is cut by itself and the rest goes to every replica; and
    lists that replicas return are joined item by item, as ``torch.nn.DataParallel`` joins them.

    Args:
        items: One per row.
    Raises:
        SplitError: from the call, if the number of items isn't that of the other inputs' rows.
    Source:
        ``torch_geometric.nn.DataParallel``, which takes a list with a graph per row.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Rows({super().__repr__()})"


def register_batch(
    kind: type,
    *,
    split: Callable[[Any, Sequence[int]], Sequence[Any]] | None = None,
    join: Callable[[Sequence[Any]], Any] | None = None,
    move: Callable[[Any, torch.device], Any] | None = None,
    rows: Callable[[Any], int] = len,
) -> None:
    """Say how objects of a class, and of its subclasses, are shared by the replicas, as inputs and as outputs.

    ::

        class Ragged:
            def __init__(self, values, lengths):  # shapes (sum of lengths, …) and (rows,)
                self.values, self.lengths = values, lengths

            def split(self, rows):
                lengths = self.lengths.split(rows)
                values = self.values.split([int(part.sum()) for part in lengths])
                return [Ragged(*part) for part in zip(values, lengths)]

        everygpu.register_batch(
            Ragged,
            split=Ragged.split,
            join=lambda parts: Ragged(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts])),
            move=lambda batch, device: Ragged(batch.values.to(device), batch.lengths.to(device)),
            rows=lambda batch: len(batch.lengths),
        )
        first, second = everygpu.scatter(Ragged(torch.arange(6), torch.tensor([1, 3, 2])), ["cpu", "cpu"])
        first.values, second.values  # tensor([0, 1, 2, 3]), tensor([4, 5])

    Without ``split`` and ``join`` each object is one row: a list or tuple of them is cut between them, as ``Rows`` are.
    Known already are lists of ``torch_geometric.data.Data`` and ``HeteroData``, torch_geometric's ``Batch``,
    tensordicts, ``PackedSequence``, nested tensors, and the ``Encoding``s that a ``BatchEncoding`` keeps. What is
    registered counts before what a class is besides: a dict, a dataclass, or known to torch's pytree.

    Args:
        kind: The class. Registered once more, it has the new functions.
        split: From a batch and a list with each part's number of rows to the parts, in order. A number is 0 only where,
            under torchrun, a rank has none of a batch's rows.
        join: From the replicas' batches, in order, to one. Gradients flow through what it does, as through ``split``.
        move: From a batch and a ``torch.device`` to the batch there; ``batch.to(device)`` when left out.
        rows: From a batch to the number of its rows.
    Raises:
        OptionError: ``kind`` is no class, or one whose meaning is fixed, as a tensor, list or dict itself; or only one
            of ``split`` and ``join`` is given.
    Source:
        ``torch.utils._pytree.register_pytree_node``, of whose containers each tensor is cut by itself.
    """
    if not isinstance(kind, type) or kind in _PLAIN or kind is Tensor:
        raise OptionError(
            f"register_batch: needs a class other than Python's and torch's plain ones, got {kind!r}. "
            f"Use everygpu.Rows for a list whose items are rows."
        )
    if split is None and join is None:
        known = row_type(move or move_by_method)
    elif split is not None and join is not None:
        known = BatchType(count=rows, split=split, join=join, move=move or move_by_method)
    else:
        raise OptionError(
            f"register_batch: needs both split and join, or none of them where each {kind.__qualname__} is one row, "
            f"got split={split!r} and join={join!r}. Pass both."
        )
    _Registry.of_this_process().add(kind, known)


def batch_type(value: Any) -> BatchType | None:
    """Return how a value is shared, if its class, or that of a list's items, is no plain one."""
    kind = type(value)
    if (kind is list or kind is tuple) and value:
        return ROWS if _are_rows(value) else None
    known = known_type(value)
    return None if known is None or known.is_row else known


def known_type(value: Any) -> BatchType | None:
    """Return what is known of a value's class, which may be that of a single row."""
    kind = type(value)
    if kind in _PLAIN:
        return None
    if kind is Tensor:
        return NESTED if value.is_nested else None
    known = _Registry.of_this_process().find(kind)
    if known is None:
        return NESTED if isinstance(value, Tensor) and value.is_nested else None
    return known if known.is_row or known.count(value) is not None else None


def open_batch(value: Any) -> tree.Container | None:
    """Open one level of a container, as ``tree.open_container``; what has a ``batch_type`` stays whole."""
    return None if type(value) is Tensor or batch_type(value) is not None else tree.open_container(value)


def move_tree(value: Any, device: torch.device) -> Any:
    """Put every tensor of a nested value on one device, unwrapping ``Replicated``; no copy where it is there."""

    def move(leaf: Any) -> Any:
        if type(leaf) is Tensor:  # nested ones, too
            return leaf if leaf.device == device else comm.copy(leaf, device)
        if isinstance(leaf, Replicated):
            return move_tree(leaf.value, device)
        known = known_type(leaf)
        if known is not None:
            return known.move(leaf, device)
        return comm.copy(leaf, device) if isinstance(leaf, Tensor) else leaf

    return tree.map_leaves(move, value, open_known)


def slice_batch(batch: Any, kind: BatchType, part: slice) -> Any:
    """Return a range of a batch's rows."""
    num_rows = kind.count(batch) or 0
    begin, end, _ = part.indices(num_rows)
    before, after = [n for n in (begin,) if n], [n for n in (num_rows - end,) if n]
    return split_batch(batch, kind, [*before, end - begin, *after])[len(before)]


def split_batch(batch: Any, kind: BatchType, rows: Sequence[int]) -> list[Any]:
    """Cut a batch into parts of so many rows.

    Raises:
        SplitError: what is registered returns another number of parts.
    """
    parts = list(kind.split(batch, list(rows)))
    if len(parts) != len(rows):
        raise SplitError(
            f"register_batch: split must return a part of a {type(batch).__qualname__} for each number of rows in "
            f"{list(rows)}, got {len(parts)}. Return a list of {len(rows)}."
        )
    return parts


def open_known(value: Any) -> tree.Container | None:
    """Open one level of a container; what has a ``known_type`` stays whole."""
    return None if type(value) is Tensor or known_type(value) is not None else tree.open_container(value)


def _are_rows(items: Sequence[Any]) -> bool:
    kind = type(items[0])
    if kind is Tensor or kind in _PLAIN:
        return False
    known = [_Registry.of_this_process().find(kind) for kind in set(map(type, items))]
    return all(found is not None and found.is_row for found in known)


def _join_items(parts: Sequence[Any]) -> Any:
    return type(parts[0])(item for part in parts for item in part)


def _move_items(items: Any, device: torch.device) -> Any:
    return type(items)(move_tree(item, device) for item in items)


ROWS = BatchType(
    count=len,
    split=lambda items, rows: [type(items)(items[part]) for part in spans(rows)],
    join=_join_items,
    move=_move_items,
)
"""``Rows``, and lists of objects that are each a row."""


class _Registry:
    """What this process has registered, and what was found for the classes of its batches."""

    def __init__(self) -> None:
        self._registered: dict[type, BatchType] = {Rows: ROWS}
        self._found: weakref.WeakKeyDictionary[type, BatchType | None] = weakref.WeakKeyDictionary()

    @staticmethod
    @functools.cache
    def of_this_process() -> "_Registry":
        return _Registry()

    def add(self, kind: type, known: BatchType) -> None:
        self._registered[kind] = known
        self._found.clear()

    def find(self, kind: type) -> BatchType | None:
        try:
            return self._found[kind]
        except KeyError:
            known = (self._registered.get(base) or find_ready(base) for base in kind.__mro__)
            found = next((k for k in known if k is not None), None)
            self._found[kind] = found
            return found
