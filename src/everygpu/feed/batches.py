"""A batch on its way from the host to the devices: one thread sends the rows, another assembles the batch.

Sending queues the copies; only what the consumer does decides which streams wait for them, so the second half
is its part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everygpu import tree
from everygpu.comm.upload import Mark, mark, receive, upload
from everygpu.parallel.scatter.batch_types import ROWS, batch_type, move_tree, open_batch, open_known, spans
from everygpu.parallel.scatter.row_count import find_rows, has_entry_per_device
from everygpu.parallel.scatter.split import Replicated, ScatterSpec, SplitPlan, plan_split
from everygpu.parallel.sharded.batch import ShardedBatch, shard_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """One leaf of a batch."""

    tensors: Sequence[Tensor] = ()
    """Events that the consumer's streams wait for."""
    unpack: Callable[[], Any]
    """Makes of them what the consumer gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBatch:
    """A batch whose copies are queued."""

    structure: Any
    """The containers, around leaves that are not used."""
    parcels: list[Parcel]
    """In the order of the leaves."""
    marks: list[Mark]


def send_batch(batch: Any, route: ScatterSpec) -> SentBatch:
    """Queue the copies of every tensor in a batch: any nesting of containers, tensors of shape (..., rows, ...)."""
    plan = None
    if len(route.devices) > 1:
        num_rows = find_rows([("batch", batch)], route.dim, len(route.devices))
        plan = None if num_rows is None else plan_split(num_rows, len(route.devices), route.split)
    # Containers of our own: a loader may change its list or dict for the next batch before this one is unpacked.
    structure = tree.map_leaves(lambda leaf: leaf, batch, open_batch)
    with torch.no_grad():
        parcels = [_pack(leaf, plan, route) for _, leaf in tree.leaves(structure, "batch", open_batch)]
    return SentBatch(structure=structure, parcels=parcels, marks=mark(route.devices))


def unpack_batch(sent: SentBatch) -> Any:
    """Put a batch together for the calling thread, whose current streams wait for the copies."""
    receive([t for parcel in sent.parcels for t in parcel.tensors], sent.marks)
    parcels = iter(sent.parcels)
    return tree.map_leaves(lambda _: next(parcels).unpack(), sent.structure, open_batch)


def _pack(leaf: Any, plan: SplitPlan | None, route: ScatterSpec) -> Parcel:
    home = route.devices[0]
    if isinstance(leaf, ShardedBatch):
        return Parcel(unpack=lambda: leaf)
    if isinstance(leaf, Replicated):
        return _pack_replicated(leaf, route)
    known = batch_type(leaf)
    if known is ROWS:
        return _pack_items(leaf, plan, route)
    if known is not None or (isinstance(leaf, Tensor) and leaf.layout is not torch.strided):
        return Parcel(unpack=lambda: move_tree(leaf, home))
    if not isinstance(leaf, Tensor):
        return Parcel(unpack=lambda: leaf)
    if plan is not None and plan.active != (0,) and tree.has_dims(leaf):
        if has_entry_per_device(leaf, plan.num_rows, len(route.devices), route.dim):
            plan = SplitPlan((1,) * len(route.devices))
        return _pack_rows(leaf, plan, route)
    whole = upload(leaf, home)
    return Parcel(tensors=[whole], unpack=lambda: _like(whole, leaf))


def _pack_rows(x: Tensor, plan: SplitPlan, route: ScatterSpec) -> Parcel:
    home, dim = route.devices[0], route.dim
    parts = []
    for position in plan.active:
        part = x.detach().narrow(dim, sum(plan.rows[:position]), plan.rows[position])
        # .data, for a version counter of its own: on CPU replicas this is the loader's memory, not a copy.
        parts.append(upload(part, route.devices[position]).data)
    return Parcel(tensors=parts, unpack=lambda: _like(shard_batch(parts, home, dim), x))


def _pack_items(items: Any, plan: SplitPlan | None, route: ScatterSpec) -> Parcel:
    """Send what is in a list of rows to the devices of their replicas."""
    rows = [len(items)] if plan is None else plan.rows
    places = [device for device, part in zip(route.devices, spans(rows)) for _ in items[part]]

    def send(leaf: Any, device: torch.device) -> Any:
        return _like(upload(leaf.detach(), device), leaf) if _is_plain(leaf) else leaf

    sent = [tree.map_leaves(lambda x, d=d: send(x, d), item, open_known) for item, d in zip(items, places)]  # type: ignore[misc]
    # What else there is moves on the consumer's streams.
    return Parcel(
        tensors=_plain_tensors(sent),
        unpack=lambda: type(items)(move_tree(item, device) for item, device in zip(sent, places)),
    )


def _pack_replicated(marked: Replicated, route: ScatterSpec) -> Parcel:
    copies = [_copy_tree(marked.value, device, own=i > 0) for i, device in enumerate(route.devices)]
    tensors = _plain_tensors(copies)
    if len(copies) == 1:
        return Parcel(tensors=tensors, unpack=lambda: copies[0])
    return Parcel(tensors=tensors, unpack=lambda: Replicated(copies[0], copies=copies))


def _copy_tree(value: Any, device: torch.device, *, own: bool) -> Any:
    def copy(leaf: Any) -> Any:
        if not _is_plain(leaf):
            return move_tree(leaf, device)
        moved = upload(leaf.detach() if leaf.requires_grad else leaf, device)
        # Replicas on one device must not share memory: one may write into it.
        return moved.clone() if own and moved.device == leaf.device else moved

    return tree.map_leaves(copy, value, open_known)


def _plain_tensors(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in tree.leaves(value, "", open_known) if _is_plain(leaf)]


def _is_plain(leaf: Any) -> bool:
    """Tell whether a value is a tensor that can be sent ahead, on a stream of its own."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested


def _like(x: Tensor, original: Tensor) -> Tensor:
    return x.requires_grad_() if original.requires_grad and not x.requires_grad else x
