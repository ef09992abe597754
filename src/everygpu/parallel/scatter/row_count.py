"""How many rows a batch has, and what in it has them."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from everygpu import tree
from everygpu.errors import SplitError
from everygpu.once import Once
from everygpu.parallel.scatter.batch_types import batch_type, open_batch
from everygpu.parallel.scatter.split import ScatterSpec, SplitPlan, plan_split
from everygpu.parallel.sharded.batch import ShardedBatch

logger = logging.getLogger("everygpu")

_NUMBERS = (int, float, complex, bool, type(None))
WITHOUT_ROWS = frozenset({*_NUMBERS, str, bytes, torch.dtype, torch.device, torch.Size})

Named = Sequence[tuple[str, Any]]
"""Values with their names, such as ``("args[0]", x)``."""


class Arguments:
    """A call's arguments, flattened into leaves once, and rebuilt around each replica's."""

    def __init__(self, named: Named) -> None:
        self.leaves: list[tuple[str, Any]] = []
        self.lists: list[tuple[str, Any]] = []
        """Lists and tuples of several items, which may be one for each row."""
        self._nodes = [self._take(path, value) for path, value in named]

    def _take(self, path: str, value: Any) -> Any:
        opened = None if type(value) is Tensor else open_batch(value)
        if opened is None:  # a leaf is replaced by its index
            self.leaves.append((path, value))
            return len(self.leaves) - 1
        if len(opened.children) > 1 and type(value) in (list, tuple):
            self.lists.append((path, value))
        return opened.rebuild, [self._take(path + a, child) for a, child in zip(opened.accessors, opened.children)]

    def around(self, leaves: Sequence[Any]) -> list[Any]:
        """Rebuild the arguments with other leaves, in the same order."""
        return [leaves[node] if type(node) is int else _make(node, leaves) for node in self._nodes]


def _make(node: Any, leaves: Sequence[Any]) -> Any:
    if type(node) is int:
        return leaves[node]
    rebuild, children = node
    return rebuild([_make(child, leaves) for child in children])


def name_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Name the arguments of a call."""
    return [(f"args[{i}]", a) for i, a in enumerate(args)] + [(f'kwargs["{k}"]', v) for k, v in kwargs.items()]


def find_rows(named: Named, dim: int, num_devices: int = 0) -> int | None:
    """Read the batch size off the tensors of a call and what else has rows; None when there is none to split.

    ``num_devices`` are those that the rows are for, 0 where that isn't known: see ``has_entry_per_device``.
    """
    return count_rows(Arguments(named).leaves, dim, num_devices)


def count_rows(leaves: Named, dim: int, num_devices: int) -> int | None:
    """Return the number of rows that all leaves agree on, except for one entry per device; see ``find_rows``."""
    counts = [(path, x, rows_of(path, x, dim)) for path, x in leaves if type(x) not in WITHOUT_ROWS]
    sized = [found for found in counts if found[2] is not None]
    if len({rows for _, _, rows in sized}) > 1:
        others = [x for x in sized if num_devices == 0 or not _is_entry_per_device(x[1], num_devices, dim)]
        sized = others or sized
        first_path, first, num_rows = sized[0]
        for path, leaf, rows in sized:
            if rows != num_rows:
                shape = f" {tree.shape_of(leaf)}" if tree.has_dims(leaf) else ""
                raise SplitError(
                    f"scatter: every tensor must have the same number of rows on dim {dim}, got {num_rows} in "
                    f"{first_path} and {rows} in {path}{shape}.{_advise_on_lists(path, first_path)} Wrap an input that "
                    f"every replica needs whole in everygpu.Replicated(...)."
                    f"{_advise((path, leaf, num_rows), (first_path, first, rows))}"
                    f"{_advise_on_stacks((path, leaf), (first_path, first), num_devices=num_devices, dim=dim)}"
                )
    return sized[0][2] if sized else None


def rows_of(path: str, leaf: Any, dim: int) -> int | None:
    """Count the rows of a leaf; None for one that has none."""
    known = None if type(leaf) is Tensor and not leaf.is_nested else batch_type(leaf)
    if known is not None:
        if known.is_on_dim_0 and dim != 0:
            raise SplitError(
                f"scatter: a {type(leaf).__qualname__} must have its rows on dim 0, got dim={dim} for {path}. "
                f"Pass a dict of its tensors."
            )
        return known.count(leaf)
    if not tree.has_dims(leaf):
        return None
    if not -leaf.ndim <= dim < leaf.ndim:
        raise SplitError(
            f"scatter: every tensor needs the batch on dim {dim}, got shape {tuple(leaf.shape)} in {path}. "
            f"Wrap it in everygpu.Replicated(...) if every replica needs it whole."
        )
    size: int = leaf.shape[dim]
    return size


def has_entry_per_device(leaf: Any, num_rows: int, num_devices: int, dim: int) -> bool:
    """Whether a tensor has one number per device, of which each replica gets its own, rather than rows of the batch.

    It is a whole number for each, all of them equal, as ``transformers`` passes ``num_items_in_batch``: integers of
    shape (devices,), (devices, 1) or the like, or floats of shape (devices, 1), which its newer versions make of them;
    in a batch with another number of rows.
    """
    return num_rows != num_devices and _is_entry_per_device(leaf, num_devices, dim)


def plan_batch(named: Named, route: ScatterSpec) -> SplitPlan | None:
    """Plan how the rows of a batch are split; None where it stays whole."""
    num_devices = len(route.devices)
    rows = find_rows(named, route.dim, num_devices) if num_devices > 1 else None
    return None if rows is None else plan_split(rows, num_devices, route.split)


def shares_of(x: Tensor, plan: SplitPlan | None, route: ScatterSpec) -> list[tuple[int, torch.device]] | None:
    """Return the size of each part of a tensor and the device it goes to; None for one that stays whole."""
    if plan is None or len(plan.active) == 1 or not -x.ndim <= route.dim < x.ndim:
        return None
    if x.shape[route.dim] == plan.num_rows:
        return [(plan.rows[i], route.devices[i]) for i in plan.active]
    has_entries = has_entry_per_device(x, plan.num_rows, len(route.devices), route.dim)
    return [(1, d) for d in route.devices] if has_entries else None


def _is_entry_per_device(leaf: Any, num_devices: int, dim: int) -> bool:
    if not tree.has_dims(leaf) or (isinstance(leaf, Tensor) and leaf.is_nested) or leaf.shape[dim] != num_devices:
        return False
    if not isinstance(leaf, Tensor):
        return bool(leaf.size == num_devices and leaf.dtype.kind in "iu" and (leaf == leaf.flat[0]).all())
    if num_devices == 1:  # it goes whole to the only one
        return leaf.numel() == 1
    is_float = leaf.is_floating_point()
    if leaf.numel() != num_devices or leaf.is_complex() or leaf.dtype is torch.bool or (is_float and leaf.ndim == 1):
        return False
    # Without waiting for a GPU where that isn't needed; the Feeder has looked at what it has spread.
    if isinstance(leaf, ShardedBatch) or (leaf.stride(dim) == 0 and not is_float):
        return True
    first = leaf.flatten()[0]
    return bool((leaf == (first.round() if is_float else first)).all())


def _advise_on_lists(*paths: str) -> str:
    in_list = any(re.search(r"\[\d+\]", re.sub(r"^(args|batch)\[", "", path)) for path in paths)
    return " A list whose items are each a row goes into everygpu.Rows(...)." if in_list else ""


def _advise(*found: tuple[str, Any, Any]) -> str:
    """Suggest a fix for two leaves that disagree about the number of rows."""
    advice = ""
    if all(isinstance(x, Tensor) and x.ndim == 1 and not x.is_floating_point() for _, x, _ in found):
        advice += (
            " For nn.EmbeddingBag, pass everygpu.Rows with a tensor for each bag in place of offsets, or bags of one "
            "length in two dimensions, with padding_idx."
        )
    for path, leaf, rows in found:
        shape = tree.shape_of(leaf) if tree.has_dims(leaf) else ()
        if len(shape) > 2 and rows > 1 and rows in shape:
            advice += (
                f" If the rows of {path} are on dim {shape.index(rows)}, as in the state of an nn.LSTM, permute it "
                f"inside forward, or have all rows there, and pass dim={shape.index(rows)}."
            )
    return advice


def _advise_on_stacks(*found: tuple[str, Any], num_devices: int, dim: int) -> str:
    """Say what else to pass for weights that are repeated for each device, which a state of two layers looks like."""
    path = next((p for p, x in found if tree.has_dims(x) and x.ndim > 1 and x.shape[dim] == num_devices > 1), None)
    return "" if path is None else (
        f" If {path} has the same weights once for each device, of which the module takes [0], as MAML++ passes them, "
        f"pass everygpu.Replicated(w.unsqueeze({dim})) without the repeat: gradients are summed."
    )  # fmt: skip


def warn_of_lists(found: Arguments, num_rows: int, dim: int) -> None:
    """Warn of lists whose items may be rows of the batch: they are taken as ``torch.nn.DataParallel`` takes them.

    No error, as the number of rows may be that of a list's items in one batch of many only.
    """
    for path, items in found.lists:
        kind = type(items[0])
        if issubclass(kind, Tensor):
            depths = {isinstance(x, Tensor) and not x.is_nested and x.ndim for x in items}
            is_same_kind = len(depths) == 1 and any(depths)
            others = {x.shape[: dim % x.ndim] + x.shape[dim % x.ndim + 1 :] for x in items} if is_same_kind else ()
            num_sized = sum(rows_of(name, leaf, dim) is not None for name, leaf in found.leaves)
            if len(others) > 1 and len(items) == num_sized:
                _warn_of_list(path, f"a list of tensors of several shapes, each of which is cut along dim {dim}")
        elif len(items) == num_rows and kind is not type(None):
            inside = f"{path}[0]"
            if not any(name.startswith(inside) and tree.has_dims(leaf) for name, leaf in found.leaves):
                what = f"a list of {num_rows} items ({kind.__qualname__}), as many as the batch has rows"
                _warn_of_list(path, f"{what}, and goes whole to every replica")


@Once
def _warn_of_list(path: str, what: str) -> None:
    logger.warning(
        "scatter: %s is %s. Wrap it in everygpu.Rows(...) if each item is a row, in everygpu.Replicated(...) if "
        "every replica needs all of them. This is said once.",
        path, what,
    )  # fmt: skip
