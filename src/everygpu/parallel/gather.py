"""Join the replicas' outputs into what one device would have returned."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everygpu import comm, tree
from everygpu.devices.parse import DeviceLike, parse_device
from everygpu.errors import GatherError, OptionError
from everygpu.parallel.sharded.batch import ShardedBatch, join, shard_batch


def gather(outputs: Any, target_device: DeviceLike | None = None, dim: int = 0) -> Any:
    """Join the replicas' outputs, or a batch whose rows are still on their devices.

    ::

        outputs = [torch.zeros(3, 10), torch.zeros(2, 10)]  # from two replicas
        everygpu.gather(outputs, "cpu").shape  # (5, 10)
        everygpu.gather(model(x))  # the plain tensor of a DataParallel's output

    Tensors of shape (..., rows, ...) are concatenated along ``dim``; 0-dim tensors become a vector with one
    entry per replica; tensors that are on the CPU in all replicas stay there; NumPy arrays are concatenated.
    Other values that are equal in all replicas pass through, differing ones come back as a list. Containers
    are rebuilt.

    Args:
        outputs: A list with one output per replica, alike in structure; or the output of a ``DataParallel``.
        target_device: Device of the joined tensors. Required for a list of outputs; else that of each batch.
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
    device = None if target_device is None else parse_device(target_device)
    if device is None or isinstance(outputs, ShardedBatch):
        return _join_batches(outputs, device)
    if not outputs:
        raise GatherError("gather: needs the output of at least one replica, got none.")
    return gather_outputs(list(outputs), Joiner(device=device, dim=dim))


def _join_batches(output: Any, device: torch.device | None) -> Any:
    """Join the output of a ``DataParallel``; plain tensors stay as they are."""
    found = any(isinstance(leaf, ShardedBatch) for _, leaf in tree.leaves(output, ""))
    if device is None and isinstance(output, list) and not found:
        raise OptionError("gather: a list of outputs needs a target_device to be joined on, got None.")

    def join_leaf(leaf: Any) -> Any:
        joined = join(leaf) if isinstance(leaf, ShardedBatch) else leaf
        return joined if device is None or not isinstance(joined, Tensor) else comm.copy(joined, device)

    return tree.map_leaves(join_leaf, output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """How tensors are joined."""

    device: torch.device
    """Device of the joined tensors, unless all of them are on the CPU."""
    dim: int
    rows: tuple[int, ...] | None = None
    """Rows of the batch behind each replica: tensors are kept on their devices, as a ``ShardedBatch``."""

    def join(self, tensors: list[Tensor], path: str) -> Tensor:
        """Join one tensor of the output."""
        _check_layouts(tensors, path)
        target = torch.device("cpu") if all(t.device.type == "cpu" for t in tensors) else self.device
        stays_sharded = self.rows is not None and len(tensors) > 1 and _can_stay_sharded(tensors)
        entries, dim, rows = [_copy_if_shared(t) for t in tensors] if stays_sharded else tensors, self.dim, None
        if all(t.ndim == 0 for t in tensors):
            entries, dim, rows = [t.unsqueeze(0) for t in entries], 0, self.rows
        else:
            _check_shapes([tuple(t.shape) for t in tensors], self.dim, path)
            rows = self.rows if _are_results_per_replica(tensors, self.rows) else None
        if stays_sharded:
            return shard_batch(entries, target, dim, rows)
        return torch.cat([comm.copy(t, target) for t in entries], dim)


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


def _copy_if_shared(t: Tensor) -> Tensor:
    """Copy a tensor that forward may not have made: an input, a parameter or a buffer, which is written later."""
    root = t if t._base is None else t._base
    return t.clone() if root.is_leaf else t


def gather_outputs(outputs: list[Any], joiner: Joiner) -> Any:
    """Join the outputs of at least one replica; see ``gather``."""
    return _join(outputs, joiner, "out")


def _join(values: list[Any], joiner: Joiner, path: str) -> Any:
    first = values[0]
    opened = [tree.open_container(v) for v in values]
    if all(isinstance(v, Tensor) for v in values):
        return joiner.join(values, path)
    if all(node is None for node in opened):
        return _join_leaves(values, joiner.dim, path)
    containers = [node for node in opened if node is not None]
    if len(containers) < len(values) or any(type(v) is not type(first) for v in values):
        raise _structure_error(path, [_describe(v) for v in values])
    places = [dict(zip(node.accessors, node.children)) for node in containers]
    if any(place.keys() != places[0].keys() for place in places):
        raise _structure_error(path, [_describe_places(first, list(place)) for place in places])
    joined = [_join([place[a] for place in places], joiner, path + a) for a in containers[0].accessors]
    return containers[0].rebuild(joined)


def _check_shapes(shapes: list[tuple[int, ...]], dim: int, path: str) -> None:
    ndim = len(shapes[0])
    if any(len(shape) != ndim for shape in shapes):
        raise _structure_error(path, [f"shape {shape}" for shape in shapes], _KEEP_ROWS)
    if not -ndim <= dim < ndim:
        raise GatherError(
            f"gather: {path} must have the batch on dim {dim}, got shape {shapes[0]}. "
            f"Return it with that dimension, or as a 0-dim tensor for one entry per replica."
        )
    others = [shape[: dim % ndim] + shape[dim % ndim + 1 :] for shape in shapes]
    if any(other != others[0] for other in others):
        raise GatherError(
            f"gather: {path} must have equal shapes except on dim {dim}, got {_list(shapes)} from the replicas. "
            f"Pad to a common length inside forward."
        )


def _join_leaves(values: list[Any], dim: int, path: str) -> Any:
    arrays = [v for v in values if tree.is_array(v)]
    if any(isinstance(v, Tensor) for v in values) or (arrays and len(arrays) < len(values)):
        raise _structure_error(path, [_describe(v) for v in values])
    if arrays:
        return _join_arrays(arrays, dim, path)
    if any(_holds_tensors(v) for v in values):
        raise GatherError(
            f"gather: {path} is a {type(values[0]).__name__} with tensors in it, which has no order to join by. "
            f"Return a list or a dict."
        )
    none = [v is None for v in values]
    if any(none) and not all(none):
        raise _structure_error(path, [_describe(v) for v in values])
    return values[0] if all(_is_equal(v, values[0]) for v in values[1:]) else values


def _join_arrays(arrays: list[Any], dim: int, path: str) -> Any:
    numpy = sys.modules["numpy"]  # an array is here, so NumPy is loaded; torch works without it
    if all(a.ndim == 0 for a in arrays):
        return numpy.stack(arrays)
    _check_shapes([a.shape for a in arrays], dim, path)
    return numpy.concatenate(arrays, dim)


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
