"""A batch on its way from the host to the devices: one thread sends the rows, another assembles the batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from everygpu import tree
from everygpu.comm.upload import mark, receive, upload
from everygpu.parallel.scatter.batch_types import ROWS, batch_type, move_tree, open_batch, open_known, spans
from everygpu.parallel.scatter.row_count import find_rows, has_entry_per_device
from everygpu.parallel.scatter.split import Replicated, ScatterSpec, SplitPlan, plan_split
from everygpu.parallel.sharded.batch import ShardedBatch, shard_batch

Make = Callable[[], Any]
"""Makes what the consumer gets of a leaf, once its copies have come."""


class SentBatch:
    """Queues the copies of every tensor in a batch: any nesting of containers, tensors of shape (..., rows, ...).

    Only what the consumer does decides which streams wait for the copies, so ``unpack`` is its part.
    """

    def __init__(self, batch: Any, route: ScatterSpec) -> None:
        self._route = route
        self._plan: SplitPlan | None = None
        if len(route.devices) > 1:
            num_rows = find_rows([("batch", batch)], route.dim, len(route.devices))
            self._plan = None if num_rows is None else plan_split(num_rows, len(route.devices), route.split)
        # Containers of our own: a loader may change its list or dict for the next batch before this one is unpacked.
        self._structure = tree.map_leaves(lambda leaf: leaf, batch, open_batch)
        self._copies: list[Tensor] = []
        with torch.no_grad():
            self._makes = [self._send(leaf) for _, leaf in tree.leaves(self._structure, "batch", open_batch)]
        self._marks = mark(route.devices)

    def unpack(self) -> Any:
        """Put the batch together for the calling thread, whose current streams wait for the copies."""
        receive(self._copies, self._marks)
        makes = iter(self._makes)
        return tree.map_leaves(lambda _: next(makes)(), self._structure, open_batch)

    def _send(self, leaf: Any) -> Make:
        home, plan = self._route.devices[0], self._plan
        if isinstance(leaf, Replicated):
            return self._send_replicated(leaf)
        known = batch_type(leaf)
        if known is ROWS:
            return self._send_items(leaf)
        if known is not None or (isinstance(leaf, Tensor) and leaf.layout is not torch.strided):
            return lambda: move_tree(leaf, home)
        if isinstance(leaf, ShardedBatch) or not isinstance(leaf, Tensor):
            return lambda: leaf
        if plan is not None and plan.active != (0,) and tree.has_dims(leaf):
            if has_entry_per_device(leaf, plan.num_rows, len(self._route.devices), self._route.dim):
                plan = SplitPlan((1,) * len(self._route.devices))
            return self._send_rows(leaf, plan)
        whole = self._note(upload(leaf, home))
        return lambda: _like(whole, leaf)

    def _send_rows(self, x: Tensor, plan: SplitPlan) -> Make:
        devices, dim = self._route.devices, self._route.dim
        rows = [x.detach().narrow(dim, sum(plan.rows[:i]), plan.rows[i]) for i in plan.active]
        # .data, for a version counter of its own: on CPU replicas this is the loader's memory, not a copy.
        parts = [self._note(upload(part, devices[i]).data) for i, part in zip(plan.active, rows)]
        return lambda: _like(shard_batch(parts, devices[0], dim), x)

    def _send_items(self, items: Any) -> Make:
        """Send what is in a list of rows to the devices of their replicas."""
        rows: Sequence[int] = [len(items)] if self._plan is None else self._plan.rows
        places = [device for device, part in zip(self._route.devices, spans(rows)) for _ in items[part]]

        def send(leaf: Any, device: torch.device) -> Any:
            return _like(self._note(upload(leaf.detach(), device)), leaf) if _is_plain(leaf) else leaf

        sent = [tree.map_leaves(lambda x, d=d: send(x, d), item, open_known) for item, d in zip(items, places)]  # type: ignore[misc]
        # What else there is moves on the consumer's streams.
        return lambda: type(items)(move_tree(item, device) for item, device in zip(sent, places))

    def _send_replicated(self, marked: Replicated) -> Make:
        def send(leaf: Any, device: torch.device, *, own: bool) -> Any:
            if not _is_plain(leaf):
                return move_tree(leaf, device)
            moved = upload(leaf.detach() if leaf.requires_grad else leaf, device)
            # Replicas on one device must not share memory: one may write into it.
            return self._note(moved.clone() if own and moved.device == leaf.device else moved)

        copies = [
            tree.map_leaves(lambda x, i=i, d=d: send(x, d, own=i > 0), marked.value, open_known)  # type: ignore[misc]
            for i, d in enumerate(self._route.devices)
        ]
        return lambda: copies[0] if len(copies) == 1 else Replicated(copies[0], copies=copies)

    def _note(self, copied: Tensor) -> Tensor:
        self._copies.append(copied)
        return copied


def _is_plain(leaf: Any) -> bool:
    """Tell whether a value is a tensor that can be sent ahead, on a stream of its own."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested


def _like(x: Tensor, original: Tensor) -> Tensor:
    return x.requires_grad_() if original.requires_grad and not x.requires_grad else x
