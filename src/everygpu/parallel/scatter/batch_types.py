"""Batches that are no tensors: ``Rows``, and classes with a way of their own to be counted, cut, joined and moved.

Those of torch's and other libraries are found by name: no library is imported for them.
"""

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from everygpu import comm, tree
from everygpu.errors import OptionError, SplitError
from everygpu.parallel.scatter.split import Replicated
from everygpu.parallel.sharded.batch import ShardedBatch

T = TypeVar("T")

# Looked at for every part of every call.
_PLAIN = frozenset(
    {int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, dict}
    | {list, tuple, ShardedBatch, nn.Parameter, Replicated}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchType:
    """How objects of a class are shared by replicas."""

    count: Callable[[Any], int | None]
    """Returns the number of rows; None for an object that is no batch after all."""
    split: Callable[[Any, Sequence[int]], Sequence[Any]]
    """From a batch and the rows of each part to the parts."""
    join: Callable[[Sequence[Any]], Any]
    move: Callable[[Any, torch.device], Any]
    is_row: bool = False
    """Each object is one row: lists of them are batches, it alone is none."""
    is_on_dim_0: bool = False
    """Its tensors have their rows on dim 0, so that another ``dim`` means something else."""


def spans(rows: Iterable[int]) -> list[slice]:
    """Return where parts of so many rows are in the whole."""
    ends = list(itertools.accumulate(rows, initial=0))
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def move_by_method(batch: Any, device: torch.device) -> Any:
    """Call ``batch.to(device)``, if there is such a method."""
    return batch.to(device) if hasattr(batch, "to") else batch


def row_type(move: Callable[[Any, torch.device], Any] = move_by_method) -> BatchType:
    """Describe a class whose objects are each a row."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError("one row is neither split nor joined")

    return BatchType(count=refuse, split=refuse, join=refuse, move=move, is_row=True)


class Rows(list[T]):
    """A list whose items are each a row of the batch: strings, dicts, images of several sizes, or any objects.

    Each replica receives a ``Rows`` with its items, the tensors in them on its device. From the replicas' outputs one
    is made, in the order of the rows::

        images = everygpu.Rows([torch.rand(3, 48, 64), torch.rand(3, 50, 40), torch.rand(3, 8, 8)])
        first, second = everygpu.parallel.scatter(images, ["cpu", "cpu"])
        len(first), first[1].shape, second[0].shape  # 2, (3, 50, 40), (3, 8, 8)

    It may be anywhere in the arguments, together with tensors of as many rows, whatever ``dim`` is. A ``collate_fn``
    or forward may return it. Of a plain list each tensor is cut by itself and the rest goes to every replica; and
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


class ReplicaObjects(list[Any]):
    """An object with tensors in it from each replica, such as a cache: passed back, each replica receives its own.

    They aren't joined: what else they hold, such as a batch size, may be of a replica's rows.
    """

    def __init__(self, items: Iterable[Any], rows: Sequence[int]) -> None:
        super().__init__(items)
        self.rows = tuple(rows)

    def split(self, rows: Sequence[int]) -> list[Any]:
        """Return the objects, for as many rows as they have."""
        if tuple(rows) != self.rows:
            raise SplitError(
                f"scatter: objects that replicas returned, such as {type(self[0]).__qualname__}, can be passed back "
                f"for the same rows of each replica, {list(self.rows)}, got {list(rows)}. Pass as many rows as before, "
                f"or return tensors in a dict from forward, which are joined."
            )
        return list(self)


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
        first, second = everygpu.parallel.scatter(Ragged(torch.arange(6), torch.tensor([1, 3, 2])), ["cpu", "cpu"])
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
    _registered()[kind] = known
    _found().clear()


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
    known = _find(kind)
    if known is None:
        return NESTED if isinstance(value, Tensor) and value.is_nested else None
    return known if known.is_row or known.count(value) is not None else None


def open_batch(value: Any) -> tree.Container | None:
    """Open one level of a container, as ``tree.open_container``; what has a ``batch_type`` stays whole."""
    return None if type(value) is Tensor or batch_type(value) is not None else tree.open_container(value)


def move_tree(value: Any, device: torch.device) -> Any:
    """Put every tensor of a nested value on one device, unwrapping ``Replicated``; no copy where it is there."""

    def move(leaf: Any) -> Any:
        if type(leaf) is Tensor:  # also nested ones
            return leaf if leaf.device == device else comm.copy(leaf, device)
        if isinstance(leaf, Replicated):
            return move_tree(leaf.value, device)
        known = known_type(leaf)
        if known is not None:
            return known.move(leaf, device)
        plain = comm.as_plain(leaf) if isinstance(leaf, Tensor) else leaf
        if plain is not leaf and leaf.device == device:
            return leaf
        return comm.copy(plain, device) if isinstance(plain, Tensor) else leaf

    return tree.map_leaves(move, value, open_known)


def slice_batch(batch: Any, kind: BatchType, part: slice) -> Any:
    """Return a range of a batch's rows."""
    num_rows = kind.count(batch) or 0
    begin, end, _ = part.indices(num_rows)
    before, after = [n for n in (begin,) if n], [n for n in (num_rows - end,) if n]
    return split_batch(batch, kind, [*before, end - begin, *after])[len(before)]


def split_batch(batch: Any, kind: BatchType, rows: Sequence[int]) -> list[Any]:
    """Cut a batch into parts of so many rows."""
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
    known = [_find(kind) for kind in set(map(type, items))]
    return all(found is not None and found.is_row for found in known)


ROWS = BatchType(
    count=len,
    split=lambda items, rows: [type(items)(items[part]) for part in spans(rows)],
    join=lambda parts: type(parts[0])(item for part in parts for item in part),
    move=lambda items, device: type(items)(move_tree(item, device) for item in items),
)
"""``Rows``, and lists of objects that are each a row."""

OWN = BatchType(
    count=lambda objects: sum(objects.rows),
    split=ReplicaObjects.split,
    join=list,
    move=lambda own, device: own,
)
"""``ReplicaObjects``."""


@functools.cache
def _registered() -> dict[type, BatchType]:
    """Return what this process has registered."""
    return {Rows: ROWS, ReplicaObjects: OWN}


@functools.cache
def _found() -> "weakref.WeakKeyDictionary[type, BatchType | None]":
    """Return what was found for the classes of this process's batches."""
    return weakref.WeakKeyDictionary()


def _find(kind: type) -> BatchType | None:
    try:
        return _found()[kind]
    except KeyError:
        known = (_registered().get(base) or find_ready(base) for base in kind.__mro__)
        found = _found()[kind] = next((k for k in known if k is not None), None)
        return found


def _check_rows(rows: Sequence[int], what: str) -> None:
    """Refuse parts without rows, as a rank may get them, of what can't be without."""
    if 0 in rows:
        raise SplitError(
            f"scatter: a {what} has 1 row or more, got none for a part of it. Leave out a last batch with fewer rows "
            f"than ranks, as by drop_last=True, or pass it padded."
        )


def _split_packed(batch: PackedSequence, rows: Sequence[int]) -> list[PackedSequence]:
    _check_rows(rows, "PackedSequence")
    padded, lengths = pad_packed_sequence(batch, batch_first=True)
    return [_pack(padded[part], lengths[part], is_sorted=batch.sorted_indices is None) for part in spans(rows)]


def _join_packed(batches: Sequence[PackedSequence]) -> PackedSequence:
    padded, lengths = zip(*(pad_packed_sequence(batch, batch_first=True) for batch in batches))
    longest = max(x.shape[1] for x in padded)
    whole = [torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, longest - x.shape[1])) for x in padded]
    are_sorted = all(batch.sorted_indices is None for batch in batches)
    every = torch.cat(lengths)
    return _pack(torch.cat(whole), every, is_sorted=are_sorted and bool((every[:-1] >= every[1:]).all()))


def _pack(padded: Tensor, lengths: Tensor, *, is_sorted: bool) -> PackedSequence:
    longest = int(lengths.max())
    return pack_padded_sequence(padded[:, :longest], lengths, batch_first=True, enforce_sorted=is_sorted)


def _move_packed(batch: PackedSequence, device: torch.device) -> PackedSequence:
    orders = [None if x is None else comm.copy(x, device) for x in (batch.sorted_indices, batch.unsorted_indices)]
    return PackedSequence(comm.copy(batch.data, device), batch.batch_sizes, *orders)


def _split_nested(batch: Tensor, rows: Sequence[int]) -> list[Tensor]:
    _check_rows(rows, "nested tensor")
    parts = batch.unbind()
    return [_nest(parts[part], batch.layout) for part in spans(rows)]


def _nest(rows: Sequence[Tensor], layout: torch.layout) -> Tensor:
    nested: Tensor = torch.nested.as_nested_tensor(list(rows), layout=layout)
    return nested


def _move_nested(batch: Tensor, device: torch.device) -> Tensor:
    """Copy row by row: autograd takes no gradient of layout jagged from one GPU to another."""
    rows = batch.unbind() if batch.device != device else ()
    return _nest([comm.copy(row, device) for row in rows], batch.layout) if rows else comm.copy(batch, device)


def _split_graphs(batch: Any, rows: Sequence[int]) -> list[Any]:
    graphs = batch.to_data_list()
    return [_batch_graphs(graphs[part], batch) for part in spans(rows)]


def _batch_graphs(graphs: list[Any], like: Any) -> Any:
    keys = like.keys()
    followed = [key[: -len("_batch")] for key in keys if key.endswith("_batch") and key[: -len("_batch")] in keys]
    return sys.modules["torch_geometric.data"].Batch.from_data_list(graphs, follow_batch=followed)


PACKED = BatchType(count=lambda x: int(x.batch_sizes[0]), split=_split_packed, join=_join_packed, move=_move_packed)
NESTED = BatchType(
    count=lambda x: x.size(0),
    split=_split_nested,
    join=lambda parts: _nest([row for part in parts for row in part.unbind()], parts[0].layout),
    move=_move_nested,
)
_GRAPHS = BatchType(
    count=lambda x: x.num_graphs,
    split=_split_graphs,
    join=lambda parts: _batch_graphs([graph for part in parts for graph in part.to_data_list()], parts[0]),
    move=move_by_method,
)
_TENSORDICT = BatchType(
    count=lambda x: x.batch_size[0] if len(x.batch_size) else None,
    split=lambda x, rows: x.split(list(rows), 0),
    join=lambda parts: torch.cat(list(parts), 0),
    move=move_by_method,
    is_on_dim_0=True,
)
_LIBRARIES = (
    ("torch_geometric.data", "Batch", _GRAPHS),
    ("torch_geometric.data", "Data", row_type()),
    ("torch_geometric.data", "HeteroData", row_type()),
    ("tensordict", "TensorDictBase", _TENSORDICT),
    ("tokenizers", "Encoding", row_type()),  # a BatchEncoding keeps a list of them
)


def find_ready(kind: type) -> BatchType | None:
    """Return how objects of exactly this class are shared, if it is one that is known by its name."""
    if kind is PackedSequence:
        return PACKED
    for module, name, known in _LIBRARIES:
        if module in sys.modules and getattr(sys.modules[module], name, None) is kind:
            return known
    tensordict = sys.modules.get("tensordict")
    return _TENSORDICT if tensordict is not None and tensordict.is_tensorclass(kind) else None
