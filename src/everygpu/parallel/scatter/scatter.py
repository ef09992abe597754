"""Split a batch into one shard per replica, each on its device."""

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from everygpu import comm, tree
from everygpu.comm import upload
from everygpu.devices.parse import DeviceLike, parse_devices
from everygpu.errors import SplitError
from everygpu.parallel.buckets.copies import broadcast_tensor, keep_requires_grad
from everygpu.parallel.scatter.reuse import reuse_shards
from everygpu.parallel.scatter.split import Replicated, Split, SplitPlan, find_rows, plan_split
from everygpu.parallel.sharded.batch import ShardedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The arguments of one replica."""

    position: int
    """Of the replica in ``device_ids``."""
    rows: int | None
    """Rows of the batch; None when the call has no tensor to split."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def scatter(
    inputs: Any,
    device_ids: Sequence[DeviceLike],
    dim: int = 0,
    *,
    split: Split = "chunk",
) -> list[Any]:
    """Split every tensor in ``inputs`` along ``dim`` and put one part on each device.

    ::

        batch = {"x": torch.zeros(5, 8), "y": torch.zeros(5)}
        first, second = everygpu.scatter(batch, ["cpu", "cpu"])
        first["x"].shape, second["x"].shape  # (3, 8), (2, 8)

    Args:
        inputs: A tensor of shape (..., rows, ...), or any nesting of containers with such tensors. NumPy arrays
            are split alike, and stay arrays. 0-dim tensors, ``Replicated`` values and everything else go to every
            device.
        device_ids: Devices, as ints (CUDA indices), names or ``torch.device``.
        dim: The dimension of the rows.
        split: ``"chunk"`` (as ``torch.chunk``), ``"even"`` (shares differ by one row at most), or one weight of 0 or
            more per device.
    Returns:
        One structure like ``inputs`` for each device that receives rows. Gradients flow back to ``inputs``.
    Raises:
        SplitError: tensors disagree on the number of rows; one has no dimension ``dim``; an object that is no
            container holds tensors.
        OptionError: ``split`` is none of these.
        DeviceError: a device is unknown or absent.
    Source:
        ``torch.nn.parallel.scatter.scatter``, which silently drops rows where tensors disagree.
    """
    devices = parse_devices(device_ids)
    shards = scatter_call((inputs,), {}, devices, dim, split)
    return [shard.args[0] for shard in shards]


def scatter_call(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    devices: Sequence[torch.device],
    dim: int,
    split: Split,
) -> list[Shard]:
    """Split a call's arguments by one plan, so that every replica receives all of them.

    Returns:
        The shards of the replicas that run, in order. A call without tensors runs on every device; one
        without any argument runs on the first only.
    """
    named = [(f"args[{i}]", a) for i, a in enumerate(args)] + [(f'kwargs["{k}"]', v) for k, v in kwargs.items()]
    num_rows = find_rows(named, dim)
    plan = None if num_rows is None else plan_split(num_rows, len(devices), split)
    all_positions = tuple(range(len(devices))) if named else (0,)
    active = all_positions if plan is None else plan.active
    scatter_leaf = _LeafScatter(plan, active, [devices[i] for i in active], dim)
    arg_columns = tree.fan_out(scatter_leaf, list(args), len(active))
    kwarg_columns = tree.fan_out(scatter_leaf, dict(kwargs), len(active))
    return [
        Shard(
            position=position,
            rows=None if plan is None else plan.rows[position],
            args=tuple(arg_columns[i]),
            kwargs=kwarg_columns[i],
        )
        for i, position in enumerate(active)
    ]


def move_tree(value: Any, device: torch.device) -> Any:
    """Put every tensor of a nested value on one device, unwrapping ``Replicated``; no copy where it is there."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Replicated):
            return move_tree(leaf.value, device)
        if isinstance(leaf, PackedSequence):
            return _move_packed(leaf, device)
        return comm.copy(leaf, device) if isinstance(leaf, Tensor) else leaf

    return tree.map_leaves(move, value)


def _move_packed(x: PackedSequence, device: torch.device) -> PackedSequence:
    orders = [None if order is None else comm.copy(order, device) for order in (x.sorted_indices, x.unsorted_indices)]
    return PackedSequence(comm.copy(x.data, device), x.batch_sizes, *orders)


class _LeafScatter:
    """From one leaf of the arguments to one value per running replica."""

    def __init__(
        self, plan: SplitPlan | None, active: Sequence[int], devices: Sequence[torch.device], dim: int
    ) -> None:
        self.plan = plan
        self.active = active
        self.devices = devices
        self.dim = dim

    def __call__(self, leaf: Any) -> Sequence[Any]:
        if isinstance(leaf, Replicated):
            copies = leaf.copies_on(self.devices, self.active)
            if copies is not None:
                return copies
            return tree.fan_out(self._copies, leaf.value, len(self.devices))
        if self.plan is not None and tree.has_dims(leaf):
            return self._split_rows(leaf, self.plan)
        if len(self.devices) > 1:
            _check_object(leaf)
        return self._copies(leaf)

    def _split_rows(self, x: Any, plan: SplitPlan) -> Sequence[Any]:
        rows = [plan.rows[position] for position in self.active]
        if not isinstance(x, Tensor):
            views: list[Any] = sys.modules["numpy"].split(x, list(itertools.accumulate(rows))[:-1], self.dim)
            return views
        reused = reuse_shards(x, self.devices, rows, self.dim) if isinstance(x, ShardedBatch) else None
        if reused is not None:
            return reused
        if x.device.type == "cpu" and self.devices[0].type == "cuda" and not x.requires_grad:
            return _upload_rows(_cut(x, rows, self.dim), self.devices)
        return self._copied_rows(x, rows)

    def _copied_rows(self, x: Tensor, rows: Sequence[int]) -> list[Tensor]:
        # As on several GPUs: the first replica receives the input itself, the others receive copies. Replicas may
        # write into their inputs, and views of one tensor would share its version counter and history.
        with keep_requires_grad(x):
            return [
                comm.copy(part, device, fresh=i > 0)
                for i, (part, device) in enumerate(zip(_cut(x, rows, self.dim), self.devices))
            ]

    def _copies(self, leaf: Any) -> Sequence[Any]:
        if isinstance(leaf, Tensor):
            return broadcast_tensor(leaf, self.devices)
        if isinstance(leaf, PackedSequence):
            return [move_tree(leaf, device) for device in self.devices]
        return [leaf] * len(self.devices)


def _check_object(leaf: Any) -> None:
    """Refuse an object that holds tensors with rows, which every replica would receive whole."""
    found = None if isinstance(leaf, Tensor) else tree.find_tensor(leaf)
    if found is not None:
        (path, shape), kind = found, type(leaf).__qualname__
        raise SplitError(
            f"scatter: tensors must be in containers for their rows to be shared, got the {kind} object with shape "
            f"{shape} at {path}. Pass a dict or a dataclass of its tensors, register {kind} with "
            f"torch.utils._pytree.register_pytree_node, or send it whole on purpose, as everygpu.Replicated(...)."
        )


def _cut(x: Tensor, rows: Sequence[int], dim: int) -> list[Tensor]:
    # Not torch.split, whose results must not be written when there is a graph.
    ends = itertools.accumulate(rows)
    return [x.narrow(dim, end - num_rows, num_rows) for end, num_rows in zip(ends, rows)]


def _upload_rows(parts: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """Copy host memory to each device on its copy stream, while the computing streams go on."""
    uploads = [upload.upload(part, device) for part, device in zip(parts, devices)]
    upload.receive(uploads, upload.mark(devices))
    return uploads
