"""Join the replicas' outputs into what one device would have returned."""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from everygpu import comm, tree
from everygpu.devices.parse import DeviceLike, parse_target
from everygpu.errors import GatherError, OptionError
from everygpu.parallel.listed_rows import are_listed_rows
from everygpu.parallel.replicas.module_tree import is_dense
from everygpu.parallel.rows_elsewhere import find_rows_elsewhere, find_state_rows, warn_of_rows_elsewhere
from everygpu.parallel.scatter.batch_types import ROWS, Rows, batch_type, known_type, move_tree, open_known
from everygpu.parallel.scatter.ready_types import BatchType
from everygpu.parallel.sharded.batch import ShardedBatch, join, shard_batch

_SMALL = 2**20
"""Bytes up to which copying costs less than finding out whose a tensor is."""


def gather(outputs: Any, target_device: DeviceLike | None = None, dim: int = 0) -> Any:
    """Join the replicas' outputs, or a batch whose rows are still on their devices.

    ::

        outputs = [torch.zeros(3, 10), torch.zeros(2, 10)]  # from two replicas
        everygpu.gather(outputs, "cpu").shape  # (5, 10)
        everygpu.gather(model(x))  # the plain tensor of a DataParallel's output

    Tensors of shape (..., rows, ...) are concatenated along ``dim``; 0-dim tensors become a vector with one
    entry per replica; tensors that are on the CPU in all replicas stay there; NumPy arrays are concatenated.
    Other values that are equal in all replicas pass through, differing ones come back as a list. Containers
    are rebuilt; ``Rows`` and what ``register_batch`` knows are joined in the order of the rows.

    Args:
        outputs: A list with one output per replica, alike in structure; or the output of a ``DataParallel``.
        target_device: Device of the joined tensors; -1 is the CPU. Required for a list of outputs; else that of each
            batch.
        dim: The dimension of the rows in a list of outputs.
    Returns:
        One output of plain tensors of shape (..., rows of all replicas, ...); gradients flow back to the replicas'
        tensors.
    Raises:
        GatherError: ``outputs`` is empty, or the outputs differ in structure or in a shape that must agree.
        OptionError: ``outputs`` is a list of plain outputs, and ``target_device`` is None.
        DeviceError: ``target_device`` is unknown or absent.
    Source:
        ``torch.nn.parallel.gather``, which loses None, strings and numbers, and warns at scalars.
    """
    device = None if target_device is None else parse_target(target_device)
    if device is None or isinstance(outputs, (Tensor, Rows)):
        return _join_batches(outputs, device)
    return gather_outputs(list(outputs), Joiner(device=device, dim=dim))


def _join_batches(output: Any, device: torch.device | None) -> Any:
    """Join the output of a ``DataParallel``; plain tensors stay as they are."""
    found = any(isinstance(leaf, ShardedBatch) for _, leaf in tree.leaves(output, ""))
    if device is None and isinstance(output, list) and not isinstance(output, Rows) and not found:
        raise OptionError("gather: a list of outputs needs a target_device to be joined on, got None.")

    def join_leaf(leaf: Any) -> Any:
        if known_type(leaf) is not None:
            return leaf if device is None else move_tree(leaf, device)
        joined = join(leaf) if isinstance(leaf, ShardedBatch) else leaf
        return joined if device is None or not isinstance(joined, Tensor) else comm.copy(joined, device)

    return tree.map_leaves(join_leaf, output, open_known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """How tensors are joined."""

    device: torch.device
    """Device of the joined tensors, unless all of them are on the CPU."""
    dim: int
    rows: tuple[int, ...] | None = None
    """How much each replica's results count: tensors are kept on their devices, as a ``ShardedBatch``."""
    num_rows: tuple[int, ...] | None = None
    """Rows of the batch behind each replica."""
    pad_value: float | None = None
    """What fills up tensors and arrays at their ends whose sizes along other dimensions differ; None to refuse them."""
    advice: str = "Pad to a common length inside forward."
    """Against such sizes."""
    modules: tuple[nn.Module, ...] = field(default=(), compare=False)
    """The replicas, whose parameters and buffers are written by later forwards; none where that isn't known."""
    suspects: list[tuple[str, int]] = field(default_factory=list, compare=False)
    """Filled by ``join``: outputs whose rows may be on another dimension, and on which."""

    def join(self, tensors: list[Tensor], path: str) -> Tensor:
        """Join one tensor of the output."""
        _check_layouts(tensors, path)
        target = torch.device("cpu") if all(t.device.type == "cpu" for t in tensors) else self.device
        stays_sharded = self.rows is not None and len(tensors) > 1 and _can_stay_sharded(tensors)
        entries, dim, rows = [self._copy_if_shared(t) for t in tensors] if stays_sharded else tensors, self.dim, None
        if all(t.ndim == 0 for t in tensors):
            entries, dim, rows = [t.unsqueeze(0) for t in entries], 0, self.rows
        else:
            if self.pad_value is not None:
                entries = [_filled(t, widths, self.pad_value) for t, widths in zip(entries, self._missing(entries))]
            _check_shapes([tuple(t.shape) for t in entries], self, path)
            rows = self.rows if _are_results_per_replica(tensors, self.rows) else None
            self._look_for_rows(tensors, path)
        if stays_sharded:
            return shard_batch(entries, target, dim, rows)
        return torch.cat([comm.copy(t, target) for t in entries], dim)

    def _copy_if_shared(self, t: Tensor) -> Tensor:
        """Copy a tensor that forward may not have made: an input, a parameter or a buffer, which is written later."""
        root = t if t._base is None else t._base
        if not root.is_leaf:
            return t
        if self.modules and t.nbytes > _SMALL and not t.is_nested:  # without gradients everything is a leaf
            held = (x for m in self.modules for x in itertools.chain(m.parameters(), m.buffers()) if is_dense(x))
            place = t.untyped_storage().data_ptr()
            return t.clone() if any(x.untyped_storage().data_ptr() == place for x in held) else t
        return t.clone()

    def _look_for_rows(self, tensors: list[Tensor], path: str) -> None:
        if self.num_rows and len(tensors) > 1 and tensors[0].shape[self.dim] != self.num_rows[0]:
            found = find_state_rows(tensors, self.num_rows, self.dim)
            if found is not None:
                self.suspects.append((path, found))

    def _missing(self, entries: Sequence[Any]) -> list[list[int]]:
        """Return by how much each entry is shorter than the longest, along each dimension but that of the rows."""
        shapes = [tuple(e.shape) for e in entries]
        if len({len(shape) for shape in shapes}) > 1:
            return [[0] * len(shape) for shape in shapes]
        longest = list(map(max, zip(*shapes)))
        row_dim = self.dim % max(1, len(longest))
        return [[0 if i == row_dim else longest[i] - n for i, n in enumerate(shape)] for shape in shapes]


def _are_results_per_replica(tensors: list[Tensor], rows: tuple[int, ...] | None) -> bool:
    """Tell one number per replica, as a loss of shape (1,), from rows; with one row each, the two are equal."""
    return rows is not None and any(n > 1 for n in rows) and all(t.numel() == 1 for t in tensors)


def _can_stay_sharded(tensors: list[Tensor]) -> bool:
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided for t in tensors)
    return plain and len({t.dtype for t in tensors}) == 1 and not tensors[0].is_quantized


def _check_layouts(tensors: list[Tensor], path: str) -> None:
    """Refuse what ``torch.cat`` can't join."""
    per_channel = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
    for t in tensors:
        is_per_channel = t.is_quantized and t.qscheme() in per_channel
        if is_per_channel or t.layout not in (torch.strided, torch.sparse_coo, torch.jagged):
            kind = "quantized per channel" if is_per_channel else f"of layout {t.layout}"
            raise GatherError(
                f"gather: {path} must be strided, or sparse of layout torch.sparse_coo, got a tensor {kind}. "
                f"torch can't join these: return its {'dequantize()' if is_per_channel else 'to_dense()'}."
            )


def _filled(t: Tensor, widths: Sequence[int], value: float) -> Tensor:
    """Append a value to a tensor along its dimensions."""
    if not any(widths):
        return t
    return torch.nn.functional.pad(t, [n for width in reversed(widths) for n in (0, width)], value=value)


def gather_outputs(outputs: list[Any], joiner: Joiner) -> Any:
    """Join the replicas' outputs; see ``gather``."""
    if not outputs:
        raise GatherError("gather: needs the output of at least one replica, got none.")
    joiner = replace(joiner, suspects=[])  # a recording's is used again
    joined = _join(outputs, joiner, "out")
    if joiner.suspects and joiner.num_rows:
        warn_of_rows_elsewhere(joiner.suspects, outputs[0], joiner.num_rows[0], joiner.dim)
    return joined


def _join(values: list[Any], joiner: Joiner, path: str) -> Any:
    first = values[0]
    if all(isinstance(v, Tensor) and not v.is_nested for v in values):
        return joiner.join(values, path)
    known = batch_type(first)
    if known is not None:
        return _join_batches_of(known, values, joiner, path)
    if joiner.num_rows and len(values) > 1 and are_listed_rows(values, joiner.num_rows, joiner.dim, path, _is_equal):
        return [_to_device(item, joiner.device) for items in values for item in items]
    opened = [tree.open_container(v) for v in values]
    if all(node is None for node in opened):
        return _join_leaves(values, joiner, path)
    containers = [node for node in opened if node is not None]
    if len(containers) < len(values) or any(type(v) is not type(first) for v in values):
        raise _structure_error(path, [_describe(v) for v in values])
    places = [dict(zip(node.accessors, node.children)) for node in containers]
    if any(place.keys() != places[0].keys() for place in places):
        advice = _IS_LIST if type(first) is list else _SAME_KIND
        raise _structure_error(path, [_describe_places(first, list(place)) for place in places], advice)
    joined = [_join([place[a] for place in places], joiner, path + a) for a in containers[0].accessors]
    return containers[0].rebuild(joined)


def _join_batches_of(known: BatchType, values: list[Any], joiner: Joiner, path: str) -> Any:
    """Join objects of a class with a way of its own."""
    if any(batch_type(v) is not known or (known is ROWS and type(v) is not type(values[0])) for v in values):
        raise _structure_error(path, [_describe(v) for v in values])
    if known is ROWS:
        return known.join([type(items)(_to_device(item, joiner.device) for item in items) for items in values])
    moved = [known.move(v, joiner.device) for v in values]
    return known.join(moved) if len(moved) > 1 else moved[0]


def _to_device(item: Any, device: torch.device) -> Any:
    """Move a row's tensors to a device, but for those that are on the CPU."""
    return tree.map_leaves(lambda leaf: leaf if _is_on_cpu(leaf) else move_tree(leaf, device), item, open_known)


def _is_on_cpu(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "cpu"


def _check_shapes(shapes: list[tuple[int, ...]], joiner: Joiner, path: str) -> None:
    ndim, dim = len(shapes[0]), joiner.dim
    if any(len(shape) != ndim for shape in shapes):
        raise _structure_error(path, [f"shape {shape}" for shape in shapes], _KEEP_ROWS)
    if not -ndim <= dim < ndim:
        raise GatherError(
            f"gather: {path} must have the batch on dim {dim}, got shape {shapes[0]}. "
            f"Return it with that dimension, or as a 0-dim tensor for one entry per replica."
        )
    others = [shape[: dim % ndim] + shape[dim % ndim + 1 :] for shape in shapes]
    if any(other != others[0] for other in others):
        found = find_rows_elsewhere(shapes, joiner.num_rows, dim)
        raise GatherError(
            f"gather: {path} must have equal shapes except on dim {dim}, got {_list(shapes)} from the replicas. "
            + (joiner.advice if found is None else f"If its rows are on dim {found}, permute it inside forward.")
        )


def _join_leaves(values: list[Any], joiner: Joiner, path: str) -> Any:
    arrays = [v for v in values if tree.is_array(v)]
    if any(isinstance(v, Tensor) for v in values) or (arrays and len(arrays) < len(values)):
        raise _structure_error(path, [_describe(v) for v in values])
    if arrays:
        return _join_arrays(arrays, joiner, path)
    if any(_holds_tensors(v) for v in values):
        raise GatherError(
            f"gather: {path} is a {type(values[0]).__name__} with tensors in it, which has no order to join by. "
            f"Return a list or a dict."
        )
    none = [v is None for v in values]
    if any(none) and not all(none):
        raise _structure_error(path, [_describe(v) for v in values])
    return values[0] if all(_is_equal(v, values[0]) for v in values[1:]) else values


def _join_arrays(arrays: list[Any], joiner: Joiner, path: str) -> Any:
    numpy = sys.modules["numpy"]  # an array is here, so NumPy is loaded; torch works without it
    if all(a.ndim == 0 for a in arrays):
        return numpy.stack(arrays)
    if joiner.pad_value is not None:
        pairs = zip(arrays, joiner._missing(arrays))
        arrays = [numpy.pad(a, [(0, n) for n in w], constant_values=joiner.pad_value) for a, w in pairs]
    _check_shapes([a.shape for a in arrays], joiner, path)
    return numpy.concatenate(arrays, joiner.dim)


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, (set, frozenset)) and any(isinstance(v, Tensor) for v in value)


def _is_equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b) or tree.find_tensor(a) is not None:
        return False  # == of objects may leave their tensors out
    try:
        return bool(a == b) or bool(a != a and b != b)  # nan differs from itself
    except (RuntimeError, TypeError, ValueError):  # == gives no plain truth value
        return False


_SAME_KIND = "Return the same kind of value whatever rows a replica sees."
_IS_LIST = "Return everygpu.Rows(...) where each item is a row; else as many whatever rows a replica sees."
_KEEP_ROWS = "A plain squeeze() also drops the rows' dimension of a single row: name what to drop, as in squeeze(-1)."


def _structure_error(path: str, found: list[str], advice: str = _SAME_KIND) -> GatherError:
    other = next((i for i, f in enumerate(found) if f != found[0]), 0)
    return GatherError(
        f"gather: {path} must have the same structure in all replicas, got {found[0]} from replica 0 and "
        f"{found[other]} from replica {other}. {advice}"
    )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else type(value).__name__


def _describe_places(value: Any, accessors: list[str]) -> str:
    return f"{type(value).__name__} of {len(accessors)} ({', '.join(accessors[:8])})"


def _list(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(str(shape) for shape in shapes)
