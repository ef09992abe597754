"""Split a batch into one shard per replica, each on its device."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everygpu import comm, tree
from everygpu.comm import upload
from everygpu.devices.parse import DeviceLike, parse_devices
from everygpu.errors import SplitError
from everygpu.parallel.buckets.copies import broadcast_tensor, keep_requires_grad
from everygpu.parallel.scatter.batch_types import batch_type, known_type, move_tree, open_batch, split_batch
from everygpu.parallel.scatter.layouts import cut_rows, explain_layout
from everygpu.parallel.scatter.ready_types import BatchType, spans
from everygpu.parallel.scatter.reuse import reuse_shards
from everygpu.parallel.scatter.row_count import find_rows, name_arguments
from everygpu.parallel.scatter.split import Replicated, Split, SplitPlan, plan_split
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
    counts_alike: bool = False
    """Whether a result for all rows counts as much as other replicas': the call came with an entry per device."""

    @property
    def weight(self) -> int:
        """How much a result for all rows counts beside other replicas'."""
        return 1 if self.rows is None or self.counts_alike else self.rows


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
            are split alike, and stay arrays; so are ``Rows`` and what ``register_batch`` knows. Of a tensor with one
            number per device, of shape (devices,) or (devices, 1), beside others that agree on another number of rows,
            each device gets its own, of shape (1,) or (1, 1). 0-dim tensors, ``Replicated`` values and everything else
            go to every device.
        device_ids: Devices, as ints (CUDA indices), names or ``torch.device``.
        dim: The dimension of the rows.
        split: ``"chunk"`` (as ``torch.chunk``), ``"even"`` (shares differ by one row at most), or one weight of 0 or
            more per device, the first above 0.
    Returns:
        One structure like ``inputs`` for each device that receives rows. Gradients flow back to ``inputs``.
    Raises:
        SplitError: tensors disagree on the number of rows; one has no dimension ``dim``, no values, or a layout that
            torch can't cut; an object that is no container holds tensors.
        OptionError: ``split`` is none of these.
        DeviceError: a device is unknown or absent.
    Source:
        ``torch.nn.parallel.scatter.scatter``, which silently drops rows where tensors disagree.
    """
    devices = parse_devices(device_ids)
    if type(inputs) is tuple and inputs and batch_type(inputs) is None:  # a call's arguments, most often
        return [shard.args for shard in scatter_call(inputs, {}, devices, dim, split)]
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
    named = name_arguments(args, kwargs)
    num_rows = find_rows(named, dim, len(devices), warns=True)
    plan = None if num_rows is None else plan_split(num_rows, len(devices), split)
    all_positions = tuple(range(len(devices))) if named else (0,)
    active = all_positions if plan is None else plan.active
    scatter_leaf = _LeafScatter(plan, active, devices, dim)
    try:
        columns = [tree.fan_out(scatter_leaf, value, len(active), open_batch) for _, value in named]
    except RuntimeError as error:
        explain_layout(named, error)
        raise
    return [
        Shard(
            position=position,
            rows=None if plan is None else plan.rows[position],
            args=tuple(column[i] for column in columns[: len(args)]),
            kwargs={key: column[i] for key, column in zip(kwargs, columns[len(args) :])},
            counts_alike=scatter_leaf.has_entries,
        )
        for i, position in enumerate(active)
    ]


class _LeafScatter:
    """From one leaf of the arguments to one value per running replica."""

    def __init__(
        self, plan: SplitPlan | None, active: Sequence[int], all_devices: Sequence[torch.device], dim: int
    ) -> None:
        self.num_rows = None if plan is None else plan.num_rows
        self.rows = [] if plan is None else [plan.rows[position] for position in active]
        self.active = active
        self.devices = [all_devices[position] for position in active]
        self.all_devices = all_devices
        self.dim = dim
        self.has_entries = False
        """Whether one of the leaves had an entry per device."""

    def __call__(self, leaf: Any) -> Sequence[Any]:
        known = None if type(leaf) is Tensor and not leaf.is_nested else batch_type(leaf)
        if known is not None:
            return self._split_batch(leaf, known)
        if self.num_rows is not None and tree.has_dims(leaf):
            if leaf.shape[self.dim] != self.num_rows:
                return self._pick_entries(leaf)
            return self._split_rows(leaf)
        if isinstance(leaf, Replicated):
            copies = leaf.copies_on(self.devices, self.active)
            if copies is not None:
                return copies
            return tree.fan_out(self._copies, leaf.value, len(self.devices), open_batch)
        if len(self.devices) > 1:
            _check_object(leaf)
        return self._copies(leaf)

    def _split_batch(self, batch: Any, known: BatchType) -> Sequence[Any]:
        parts = split_batch(batch, known, self.rows) if len(self.rows) > 1 else [batch]
        return [known.move(part, device) for part, device in zip(parts, self.devices)]

    def _pick_entries(self, x: Any) -> Sequence[Any]:
        """Give each replica the number at its position among all devices, which the caller has for it."""
        self.has_entries = True
        if not isinstance(x, Tensor):
            parts = sys.modules["numpy"].split(x, len(self.all_devices), self.dim)
            return [parts[position] for position in self.active]
        ones = [1] * len(self.all_devices)
        reused = reuse_shards(x, self.all_devices, ones, self.dim) if isinstance(x, ShardedBatch) else None
        if reused is not None:
            return [reused[position] for position in self.active]
        entries = cut_rows(x, ones, self.dim)
        return self._put([entries[position] for position in self.active], x)

    def _split_rows(self, x: Any) -> Sequence[Any]:
        if not isinstance(x, Tensor):
            views: list[Any] = [x[(slice(None),) * (self.dim % x.ndim) + (part,)] for part in spans(self.rows)]
            return views
        reused = reuse_shards(x, self.devices, self.rows, self.dim) if isinstance(x, ShardedBatch) else None
        if reused is not None:
            return reused
        is_plain = x.layout is torch.strided and not x.requires_grad
        if is_plain and x.device.type == "cpu" and self.devices[0].type == "cuda":
            return _upload_rows(cut_rows(x, self.rows, self.dim), self.devices)
        return self._put(cut_rows(x, self.rows, self.dim), x)

    def _put(self, parts: Sequence[Tensor], whole: Tensor) -> list[Tensor]:
        # As on several GPUs: the first replica receives the input itself, the others receive copies. Replicas may
        # write into their inputs, and views of one tensor would share its version counter and history.
        with keep_requires_grad(whole):
            return [comm.copy(part, device, fresh=i > 0) for i, (part, device) in enumerate(zip(parts, self.devices))]

    def _copies(self, leaf: Any) -> Sequence[Any]:
        if isinstance(leaf, Tensor) and not leaf.is_nested:
            return broadcast_tensor(leaf, self.devices)
        if known_type(leaf) is not None:
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
            f"everygpu.register_batch or torch.utils._pytree.register_pytree_node, pass a list with one {kind} per row "
            f"as everygpu.Rows(...), or send it whole on purpose, as everygpu.Replicated(...)."
        )


def _upload_rows(parts: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """Copy host memory to each device on its copy stream, while the computing streams go on."""
    uploads = [upload.upload(part, device) for part, device in zip(parts, devices)]
    upload.receive(uploads, upload.mark(devices))
    return uploads
