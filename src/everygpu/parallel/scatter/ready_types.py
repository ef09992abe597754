"""Batches of torch's and other libraries' classes, which are found by name: no library is imported for them."""

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from everygpu import comm
from everygpu.errors import SplitError


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


_NO_ROWS = "Leave out a last batch with fewer rows than ranks, as by drop_last=True, or pass it"


def _split_packed(batch: PackedSequence, rows: Sequence[int]) -> list[PackedSequence]:
    padded, lengths = pad_packed_sequence(batch, batch_first=True)
    if 0 in rows:
        raise SplitError(f"scatter: a PackedSequence has 1 row or more, got none for a part of it. {_NO_ROWS} padded.")
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
    parts = batch.unbind()
    return [_nest(parts[part], batch.layout) if parts[part] else _nest_nothing(batch) for part in spans(rows)]


def _join_nested(batches: Sequence[Tensor]) -> Tensor:
    return _nest([row for batch in batches for row in batch.unbind()], batches[0].layout)


def _nest(rows: Sequence[Tensor], layout: torch.layout) -> Tensor:
    nested: Tensor = torch.nested.as_nested_tensor(list(rows), layout=layout)
    return nested


def _move_nested(batch: Tensor, device: torch.device) -> Tensor:
    """Copy row by row: autograd takes no gradient of layout jagged from one GPU to another."""
    rows = batch.unbind() if batch.device != device else ()
    return _nest([comm.copy(row, device) for row in rows], batch.layout) if rows else comm.copy(batch, device)


def _nest_nothing(batch: Any) -> Tensor:
    """Return a nested tensor like another, but without rows."""
    if batch.layout is not torch.jagged:
        raise SplitError(
            f"scatter: a nested tensor of layout torch.strided has 1 row or more, got none for a part of it. "
            f"{_NO_ROWS} with layout=torch.jagged."
        )
    ragged = next(d for d, size in enumerate(batch.shape) if isinstance(size, torch.SymInt))
    values, offsets = batch.values().narrow(ragged - 1, 0, 0), torch.zeros_like(batch.offsets()[:1])
    nested: Tensor = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged)
    return nested


def _split_graphs(batch: Any, rows: Sequence[int]) -> list[Any]:
    graphs = batch.to_data_list()
    return [_batch_graphs(graphs[part], batch) for part in spans(rows)]


def _join_graphs(batches: Sequence[Any]) -> Any:
    return _batch_graphs([graph for batch in batches for graph in batch.to_data_list()], batches[0])


def _batch_graphs(graphs: list[Any], like: Any) -> Any:
    keys = like.keys()
    followed = [key[: -len("_batch")] for key in keys if key.endswith("_batch") and key[: -len("_batch")] in keys]
    return sys.modules["torch_geometric.data"].Batch.from_data_list(graphs, follow_batch=followed)


def _count_tensordict(batch: Any) -> int | None:
    return batch.batch_size[0] if len(batch.batch_size) else None


PACKED = BatchType(count=lambda x: int(x.batch_sizes[0]), split=_split_packed, join=_join_packed, move=_move_packed)
NESTED = BatchType(count=lambda x: x.size(0), split=_split_nested, join=_join_nested, move=_move_nested)
_GRAPHS = BatchType(count=lambda x: x.num_graphs, split=_split_graphs, join=_join_graphs, move=move_by_method)
_TENSORDICT = BatchType(
    count=_count_tensordict,
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
