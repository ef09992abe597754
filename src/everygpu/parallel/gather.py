"""Join the replicas' outputs into what one device would have returned."""

import functools
import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from everygpu import comm, tree
from everygpu.devices.parse import DeviceLike, parse_target
from everygpu.errors import GatherError, OptionError
from everygpu.once import Once
from everygpu.parallel.call import Call
from everygpu.parallel.replicas.module_tree import is_dense
from everygpu.parallel.scatter.batch_types import (
    ROWS,
    BatchType,
    ReplicaObjects,
    Rows,
    batch_type,
    known_type,
    move_tree,
    open_known,
)
from everygpu.parallel.scatter.batch_weight import weight_results
from everygpu.parallel.scatter.denominator import denominator_of
from everygpu.parallel.sharded.batch import ShardedBatch, join, shard_batch

logger = logging.getLogger("everygpu")

_SMALL = 2**20
"""Bytes up to which copying costs less than finding out whose a tensor is."""
_NUMBERS = (int, float, complex, bool, type(None))


def gather(outputs: Any, target_device: DeviceLike | None = None, dim: int = 0) -> Any:
    """Join the replicas' outputs, or a batch whose rows are still on their devices.

    ::

        outputs = [torch.zeros(3, 10), torch.zeros(2, 10)]  # from two replicas
        everygpu.parallel.gather(outputs, "cpu").shape  # (5, 10)
        everygpu.parallel.gather(model(x))  # the plain tensor of a DataParallel's output

    Tensors of shape (..., rows, ...) are concatenated along ``dim``; 0-dim tensors become a vector with one
    entry per replica; tensors that are on the CPU in all replicas stay there; NumPy arrays are concatenated.
    Other values that are equal in all replicas pass through, differing ones come back as a list. Containers
    are rebuilt; ``Rows`` and what ``register_batch`` knows are joined in the order of the rows.

    Args:
        outputs: A list with one output per replica, of equal structure; or the output of a ``DataParallel``.
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


@dataclass(slots=True, kw_only=True)
class Joiner:
    """How outputs are joined, and what was seen in them."""

    device: torch.device
    """Device of the joined tensors, unless all of them are on the CPU."""
    dim: int
    call: Call | None = None
    is_sharded: bool = False
    """Whether tensors are kept on their devices, as a ``ShardedBatch``, where it is known what each counts."""
    has_rows: bool = False
    """Whether shapes show what has rows and what hasn't: outputs with a share's rows, or shares that differ."""
    _inputs: set[int] | None = None
    """Where the memory of the call's tensors is, once that is asked for; and of what its modules have."""
    _held: set[int] | None = None
    odd: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """Outputs as large in all replicas, other than the shares: without rows, or with several entries for each row."""

    @property
    def rows(self) -> tuple[int, ...] | None:
        return None if self.call is None else self.call.rows

    def join(self, tensors: list[Tensor], path: str) -> Tensor:
        """Join one tensor of the output."""
        tensors = [comm.as_plain(t) for t in tensors]
        _check_layouts(tensors, path)
        weights = self.call.weights if self.is_sharded and self.call is not None else None
        target = torch.device("cpu") if all(t.device.type == "cpu" for t in tensors) else self.device
        is_sharded = weights is not None and len(tensors) > 1 and _can_stay_sharded(tensors)
        entries, dim = [self._copy_if_shared(t) for t in tensors] if is_sharded else tensors, self.dim
        if all(t.ndim == 0 for t in tensors):
            entries, dim = [t.unsqueeze(0) for t in entries], 0
        else:
            entries = self._filled(entries)
            self._check_shapes([tuple(t.shape) for t in entries], path)
            self._look_for_rows(tensors, path)
            # One number per replica, as a loss of shape (1,), is no row; with one row each, rows count equally.
            is_row = max(self.rows or (1,)) < 2 and any(denominator_of(t) is None for t in tensors)
            if is_row or any(t.numel() != 1 for t in tensors):
                weights = None
        if is_sharded:
            if weights is not None and self.call is not None:
                weights = weight_results(self.call, tensors, target)
            return shard_batch(entries, target, dim, weights)
        return torch.cat([comm.copy(t, target) for t in entries], dim)

    def join_arrays(self, arrays: list[Any], path: str) -> Any:
        """Join one NumPy array of the output."""
        numpy = sys.modules["numpy"]  # an array is here, so NumPy is loaded; torch works without it
        if all(a.ndim == 0 for a in arrays):
            return numpy.stack(arrays)
        arrays = self._filled(arrays)
        self._check_shapes([a.shape for a in arrays], path)
        return numpy.concatenate(arrays, self.dim)

    def _copy_if_shared(self, t: Tensor) -> Tensor:
        """Copy a tensor that forward may not have made: an input, a parameter or a buffer, which is written later."""
        is_leaf, call = (t if t._base is None else t._base).is_leaf, self.call
        if (is_leaf and t.nbytes <= _SMALL) or call is None:
            return t.clone() if is_leaf else t
        if self._inputs is None:
            self._inputs = _places(leaf for _, leaf in tree.leaves((call.args, call.kwargs), ""))
        if is_leaf and self._held is None:  # without gradients everything is a leaf
            self._held = _places(_attributes(call.modules))
        return t.clone() if _place(t) in self._inputs or (is_leaf and _place(t) in (self._held or ())) else t

    def _filled(self, entries: list[Any]) -> list[Any]:
        """Pad tensors or arrays to the longest, in dimensions other than the rows."""
        value = None if self.call is None else self.call.pad_value
        shapes = [tuple(e.shape) for e in entries]
        if value is None or len({len(shape) for shape in shapes}) > 1:
            return entries
        longest, row_dim = list(map(max, zip(*shapes))), self.dim % len(shapes[0])
        widths = [[0 if d == row_dim else longest[d] - n for d, n in enumerate(shape)] for shape in shapes]
        if isinstance(entries[0], Tensor):
            pads = [[n for width in reversed(w) for n in (0, width)] for w in widths]
            return [torch.nn.functional.pad(t, p, value=value) if any(p) else t for t, p in zip(entries, pads)]
        pad = sys.modules["numpy"].pad
        return [pad(a, [(0, n) for n in w], constant_values=value) for a, w in zip(entries, widths)]

    def _check_shapes(self, shapes: list[tuple[int, ...]], path: str) -> None:
        ndim, dim = len(shapes[0]), self.dim
        if any(len(shape) != ndim for shape in shapes):
            raise _structure_error(path, [f"shape {shape}" for shape in shapes], _KEEP_ROWS)
        if not -ndim <= dim < ndim:
            raise GatherError(
                f"gather: {path} must have the batch on dim {dim}, got shape {shapes[0]}. "
                f"Return it with that dimension, or as a 0-dim tensor for one entry per replica."
            )
        at = dim % ndim
        if len({shape[:at] + shape[at + 1 :] for shape in shapes}) > 1:
            advice = "Pad to a common length inside forward."
            if self.call is not None and self.call.method is not None:
                advice = "Pass pad_value=... to call_method to fill the shorter ones up."
            found = next((d for d in range(ndim) if d != at and tuple(s[d] for s in shapes) == self.rows), None)
            raise GatherError(
                f"gather: {path} must have equal shapes except on dim {dim}, got "
                f"{', '.join(map(str, shapes))} from the replicas. "
                + (advice if found is None else f"If its rows are on dim {found}, permute it inside forward.")
            )

    def _look_for_rows(self, tensors: list[Tensor], path: str) -> None:
        if self.rows is None or len(tensors) < 2:
            return
        sizes, shape = [t.shape[self.dim] for t in tensors], tensors[0].shape
        if sizes == list(self.rows):
            self.has_rows = True
        elif sizes[0] > 1 and len(set(sizes)) == 1:
            self.odd.append((path, tuple(shape)))
            self.has_rows |= len(set(self.rows)) > 1  # or sizes would differ as they do


def _place(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _places(values: Iterable[Any]) -> set[int]:
    return {_place(x) for x in values if isinstance(x, Tensor) and is_dense(x)}


def _attributes(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the attributes of modules and their submodules, and the items of lists there, including parameters."""
    for value in (v for root in modules for m in root.modules() for v in vars(m).values()):
        if type(value) in (dict, list, tuple):
            yield from value.values() if type(value) is dict else value
        elif isinstance(value, Tensor):
            yield value


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


@Once
def _warn_of_no_rows(path: str, shape: tuple[int, ...], dim: int, num_replicas: int) -> None:
    logger.warning(
        "gather: %s has shape %s in each of %d replicas, other than their rows on dim %d: joined there all the same, "
        "as torch.nn.DataParallel joins it. Return the state of an nn.LSTM with its rows permuted to that dimension; "
        "what is of a whole batch, such as counts or anchors, with a dimension of size 1 there; and several entries "
        "for each row on a dimension of their own. This is said once.",
        path, shape, num_replicas, dim,
    )  # fmt: skip


@functools.cache
def _warn_of_number(path: str) -> None:
    logger.warning(
        "gather: %s is the number that each replica returned, the same in all. One device counts the whole batch: "
        "return what depends on rows as a tensor, whose sum() or mean() is that of all replicas. This is said once.",
        path,
    )  # fmt: skip


@functools.cache
def _warn_of_flags(path: str) -> None:
    logger.warning(
        "gather: %s is True in some replicas and False in others: a list of what each returned, which counts as true. "
        "Take any() or all() of it, or return a tensor for each row. This is said once.",
        path,
    )  # fmt: skip


def gather_outputs(outputs: list[Any], joiner: Joiner) -> Any:
    """Join the replicas' outputs; see ``gather``."""
    if not outputs:
        raise GatherError("gather: needs the output of at least one replica, got none.")
    joined = _join(outputs, joiner, "out")
    if joiner.odd and joiner.has_rows:
        _warn_of_no_rows(*joiner.odd[0], joiner.dim, len(outputs))
    return joined


def _join(values: list[Any], joiner: Joiner, path: str) -> Any:
    first = values[0]
    known = batch_type(first)
    if known is not None:
        return _join_batches_of(known, values, joiner, path)
    if all(isinstance(v, Tensor) and not v.is_nested for v in values):
        return joiner.join(values, path)
    if _are_listed_rows(values, joiner):
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
        kind = type(first).__name__
        found = [f"{kind} of {len(place)} ({', '.join(list(place)[:8])})" for place in places]
        raise _structure_error(path, found, advice)
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
    """Move a row's tensors to a device, except CPU tensors."""
    return tree.map_leaves(lambda leaf: leaf if _is_on_cpu(leaf) else move_tree(leaf, device), item, open_known)


def _is_on_cpu(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "cpu"


def _are_listed_rows(lists: list[Any], joiner: Joiner) -> bool:
    """Whether lists have a dict, text or object for each row, as detections do, rather than an item per output.

    ``torch.nn.DataParallel`` joins either item by item, which would mix rows.
    """
    rows = joiner.rows
    if not rows or len(lists) < 2 or any(type(x) is not list or len(x) != n for x, n in zip(lists, rows)):
        return False
    pairs = [(item, n) for items, n in zip(lists, rows) for item in items]
    if not pairs or any(isinstance(i, (Tensor, list, tuple, *_NUMBERS)) or tree.is_array(i) for i, _ in pairs):
        return False
    if len(set(rows)) > 1:
        return True
    leaves = ((x, n) for item, n in pairs for _, x in tree.leaves(item, ""))
    tensors = [(x, n) for x, n in leaves if isinstance(x, Tensor) or tree.is_array(x)]
    if not tensors:
        return not all(_is_equal(items, lists[0]) for items in lists[1:])
    dims = ((x, n, -x.ndim <= joiner.dim < x.ndim) for x, n in tensors if x.ndim and x.shape != (1,))
    return any(not is_deep or x.shape[joiner.dim] != n for x, n, is_deep in dims)


def _join_leaves(values: list[Any], joiner: Joiner, path: str) -> Any:
    arrays = [v for v in values if tree.is_array(v)]
    if any(isinstance(v, Tensor) for v in values) or (arrays and len(arrays) < len(values)):
        raise _structure_error(path, [_describe(v) for v in values])
    if arrays:
        return joiner.join_arrays(arrays, path)
    if any(_holds_tensors(v) for v in values):
        raise GatherError(
            f"gather: {path} is a {type(values[0]).__name__} with tensors in it, which has no order to join by. "
            f"Return a list or a dict."
        )
    none = [v is None for v in values]
    if any(none) and not all(none):
        raise _structure_error(path, [_describe(v) for v in values])
    if all(_is_equal(v, values[0]) for v in values[1:]):
        if len(values) > 1 and joiner.rows is not None and type(values[0]) in (int, float, complex):
            _warn_of_number(path)
        return values[0]
    if type(values[0]) is bool:
        _warn_of_flags(path)
    return values if joiner.rows is None or tree.find_tensor(values[0]) is None else ReplicaObjects(values, joiner.rows)


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
