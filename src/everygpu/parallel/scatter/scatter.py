"""Cut a call's arguments into one share per replica, each on its device."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from everygpu import comm, tree
from everygpu.comm import upload
from everygpu.devices.parse import DeviceLike, parse_devices
from everygpu.errors import SplitError
from everygpu.parallel.buckets import broadcast_tensor, keep_requires_grad, versions_of
from everygpu.parallel.call import Call
from everygpu.parallel.scatter.batch_types import (
    OWN,
    batch_type,
    known_type,
    move_tree,
    spans,
    split_batch,
)
from everygpu.parallel.scatter.row_count import (
    WITHOUT_ROWS,
    Arguments,
    count_rows,
    name_arguments,
    warn_of_lists,
)
from everygpu.parallel.scatter.split import Replicated, Split, plan_split
from everygpu.parallel.sharded.batch import ShardedBatch, is_split_as, was_joined
from everygpu.parallel.sharded.layout import RowWeights

_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


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
        first, second = everygpu.parallel.scatter(batch, ["cpu", "cpu"])
        first["x"].shape, second["x"].shape  # (3, 8), (2, 8)

    Args:
        inputs: A tensor of shape (..., rows, ...), or any nesting of containers with such tensors. NumPy arrays
            are split likewise, and stay arrays; so are ``Rows`` and what ``register_batch`` knows. Of a tensor with the
            same integer for each device, of shape (devices,) or (devices, 1), as ``transformers`` passes
            ``num_items_in_batch``, each device gets its own. 0-dim tensors, ``Replicated`` values and everything else
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
        OptionError: ``split`` is something else.
        DeviceError: a device is unknown or absent.
    Source:
        ``torch.nn.parallel.scatter.scatter``, which silently drops rows where tensors disagree.
    """
    devices = parse_devices(device_ids)
    if type(inputs) is tuple and inputs and batch_type(inputs) is None:  # a call's arguments, most often
        return list(scatter_call(inputs, {}, devices, dim, split).args)
    return [args[0] for args in scatter_call((inputs,), {}, devices, dim, split).args]


def scatter_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], devices: Sequence[torch.device], dim: int, split: Split
) -> Call:
    """Split a call's arguments by one plan, so that every replica receives all of them.

    A call without tensors runs on every device; one without any argument runs on the first only.
    """
    found = Arguments(name_arguments(args, kwargs))
    num_rows = count_rows(found.leaves, dim, len(devices))
    if found.lists and num_rows and num_rows > 1 and len(devices) > 1:
        warn_of_lists(found, num_rows, dim)
    plan = None if num_rows is None else plan_split(num_rows, len(devices), split)
    positions = plan.active if plan is not None else tuple(range(len(devices) if args or kwargs else 1))
    rows = None if plan is None else tuple(plan.rows[p] for p in positions)
    cutter = _Cutter(num_rows, rows or (), positions, devices, dim)
    columns: list[Sequence[Any]] = []
    of_tensors: dict[int, Sequence[Any]] = {}
    for path, leaf in found.leaves:
        try:
            column = of_tensors.get(id(leaf)) or cutter.cut(leaf)
        except RuntimeError as error:
            _explain_layout(path, leaf, error)
            raise
        columns.append(column)
        if isinstance(leaf, Tensor):  # a tensor that is passed twice is also one tensor in a replica
            of_tensors[id(leaf)] = column
    shares = [found.around([column[i] for column in columns]) for i in range(len(positions))]
    return Call(
        positions=positions,
        args=tuple(tuple(share[: len(args)]) for share in shares),
        kwargs=tuple(dict(zip(kwargs, share[len(args) :])) for share in shares),
        rows=rows,
        weights=(1,) * len(positions) if rows is None or cutter.has_entries else RowWeights(rows),
        lent=cutter.lent,
    )


class _Cutter:
    """From one leaf of the arguments to one value per running replica."""

    def __init__(
        self,
        num_rows: int | None,
        rows: tuple[int, ...],
        positions: Sequence[int],
        all_devices: Sequence[torch.device],
        dim: int,
    ) -> None:
        self.num_rows = num_rows
        self.rows = rows
        self.positions = positions
        self.devices = [all_devices[p] for p in positions]
        self.all_devices = all_devices
        self.dim = dim
        self.has_entries = False
        """Whether a leaf had an entry per device, so that results of all replicas count equally."""
        self.lent: list[Lent] = []

    def cut(self, leaf: Any) -> Sequence[Any]:
        if type(leaf) in WITHOUT_ROWS:
            return [leaf] * len(self.devices)
        known = None if type(leaf) is Tensor and not leaf.is_nested else batch_type(leaf)
        if known is not None:
            parts = split_batch(leaf, known, self.rows) if len(self.rows) > 1 or known is OWN else [leaf]
            return [known.move(part, device) for part, device in zip(parts, self.devices)]
        if self.num_rows is not None and tree.has_dims(leaf):
            if leaf.shape[self.dim] == self.num_rows:
                return self._cut_rows(leaf, self.rows, range(len(self.positions)))
            self.has_entries = True
            return self._cut_rows(leaf, (1,) * len(self.all_devices), self.positions)
        if isinstance(leaf, Replicated):
            copies = leaf.copies_on(self.devices, self.positions)
            return copies or self._copy_all(leaf.value)
        if len(self.devices) > 1:
            _check_object(leaf)
        return self._copies(leaf)

    def _cut_rows(self, x: Any, rows: tuple[int, ...], wanted: Sequence[int]) -> Sequence[Any]:
        """Cut a tensor or array into parts of so many rows, and return those that are wanted."""
        if not isinstance(x, Tensor):
            places = spans(rows)
            return [x[(slice(None),) * (self.dim % x.ndim) + (places[i],)] for i in wanted]
        if isinstance(x, ShardedBatch):
            devices = self.devices if len(wanted) == len(rows) else self.all_devices
            if is_split_as(x, rows, devices, self.dim):
                shards = self._reuse(x)
                return [shards[i] for i in wanted]
        is_there = x.device == self.devices[0]
        with keep_requires_grad(x):
            x = comm.as_plain(x)
            parts = cut_rows(x, rows, self.dim)
            parts = parts if len(wanted) == len(rows) else [parts[i] for i in wanted]
            is_upload = not is_there and x.device.type == "cpu" and self.devices[0].type == "cuda"
            if is_upload and x.layout is torch.strided and not x.requires_grad:
                # On each device's copy stream, while the compute streams continue.
                uploads = [upload.upload(part, device) for part, device in zip(parts, self.devices)]
                upload.receive(uploads, upload.mark(self.devices))
                return uploads
            # Each its own memory: views of one tensor would share its version counter and history.
            shares = [comm.copy(part, d, fresh=len(rows) > 1) for part, d in zip(parts, self.devices)]
        if is_there and len(wanted) == len(rows) > 1 and x.layout is torch.strided and not isinstance(x, ShardedBatch):
            self.lent.append(Lent(x, shares, self.dim))
        return shares

    def _reuse(self, x: ShardedBatch) -> list[Tensor]:
        """Return the shards themselves: a replica that writes into its input writes into the batch, as on one device.

        Copies on the same devices where a graph, a view or the joined tensor may read that memory.
        """
        if x.requires_grad or x._memory.is_viewed or was_joined(x):
            with keep_requires_grad(x):
                return [s.clone() for s in x.shards]
        self.lent.append(Lent(x, x._parts))
        return [p.detach() for p in x._parts]

    def _copy_all(self, value: Any) -> Sequence[Any]:
        """Copy what is in ``Replicated`` for each device."""
        inside = Arguments([("", value)])
        columns = [self._copies(leaf) for _, leaf in inside.leaves]
        return [inside.around([column[i] for column in columns])[0] for i in range(len(self.devices))]

    def _copies(self, leaf: Any) -> Sequence[Any]:
        if isinstance(leaf, Tensor) and not leaf.is_nested:
            with keep_requires_grad(leaf):
                return broadcast_tensor(comm.as_plain(leaf), self.devices)
        if known_type(leaf) is not None:
            return [move_tree(leaf, device) for device in self.devices]
        return [leaf] * len(self.devices)


def cut_rows(x: Tensor, rows: Sequence[int], dim: int) -> list[Tensor]:
    """Cut a tensor into parts of so many rows: views, but copies of a sparse tensor, and where code that calls
    ``view`` on a contiguous tensor would meet one that isn't.
    """
    starts = itertools.accumulate(rows, initial=0)
    if x.layout is torch.sparse_coo and not x.requires_grad:
        return [torch.narrow_copy(x, dim % x.ndim, start, n) for start, n in zip(starts, rows)]
    # Not torch.split, whose results must not be written when there is a graph.
    parts = [x.narrow(dim, start, n) for start, n in zip(starts, rows)]
    if dim == 0 or x.layout is not torch.strided:
        return parts
    formats = [f for f in _FORMATS if x.is_contiguous(memory_format=f)]
    return [part.contiguous(memory_format=f) for part in parts for f in formats[:1]] or parts


class Lent:
    """A tensor whose shares are replicas' inputs, on the device that it is on.

    What they write to these, as far as torch counts it, is written to the tensor, as on one device.
    """

    def __init__(self, tensor: Tensor, shares: Sequence[Tensor], dim: int | None = None) -> None:
        self._tensor, self._shares, self._dim = tensor, shares, dim
        self._versions = versions_of(shares)

    def note_writes(self) -> None:
        """Copy the shares to the tensor if one was written, and they aren't its memory; count it as written."""
        if versions_of(self._shares) == self._versions:
            return
        if self._dim is None:
            increment_version(self._tensor)
        else:
            here = [comm.copy(share, self._tensor.device) for share in self._shares]
            self._tensor.copy_(torch.cat(here, self._dim))


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


def _explain_layout(path: str, x: Any, error: RuntimeError) -> None:
    """Name a tensor that torch has no way to cut, or to send to a device."""
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(x, Tensor) or x.is_nested:
        return
    what = "meta" if x.is_meta else "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
    if what == "strided" or (what == "sparse_coo" and not x.requires_grad):
        return
    ways = {"meta": "Make it on a device.", "quantized": "Pass x.dequantize()."}
    raise SplitError(
        f"scatter: tensors must have rows that torch can cut, got a {what.removeprefix('_')} tensor of shape "
        f"{tuple(x.shape)} in {path}. {ways.get(what, 'Pass x.to_dense().')}"
    ) from error
