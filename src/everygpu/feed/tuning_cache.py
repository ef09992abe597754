"""Results of searches that take minutes, kept in the user's cache directory.

A result holds for a model, a step, a batch, devices and versions: all of them are in its key. Nothing here is
needed: what can't be read or written is measured again.
"""

import contextlib
import hashlib
import json
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from everygpu import tree
from everygpu.folders import cache_folder, read_json, write_whole
from everygpu.keys import unwrap
from everygpu.parallel.scatter.batch_types import open_batch
from everygpu.parallel.scatter.split import ScatterSpec

_VERSION = 1
"""To be raised when the search, or what a replica needs memory for, changes."""


def describe_run(
    step: Any,
    batch: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    route: ScatterSpec,
    options: tuple[float, ...],
) -> str:
    """Make a key of everything that decides how large a batch fits.

    Returns:
        A hash, as hexadecimal digits.
    """
    named = [*unwrap(model).named_parameters(), *unwrap(model).named_buffers()]
    parts = [
        [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in named],
        [(path, *_describe_leaf(leaf, route.dim)) for path, leaf in tree.leaves(batch, "batch", open_batch)],
        [_describe_device(d) for d in route.devices],
        [route.dim, route.split, *options],
        [type(model).__qualname__, getattr(model, "engine", None), model.training, _describe_step(step)],
        [type(optimizer).__qualname__, torch.__version__, _VERSION],
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def read_result(key: str) -> int | None:
    """Return a remembered number of rows, or None."""
    try:
        record = read_json(_path_of(key))
        num_rows = record["num_rows"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return num_rows if isinstance(num_rows, int) and num_rows > 0 else None


def write_result(key: str, num_rows: int) -> None:
    """Remember a number of rows; a cache that can't be written is left as it is."""
    with contextlib.suppress(OSError):
        path = _path_of(key)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_whole(path, json.dumps({"num_rows": num_rows}))


def _path_of(key: str) -> Path:
    return cache_folder() / "batch_size" / f"{key}.json"


def _describe_leaf(leaf: Any, dim: int) -> tuple[Any, ...]:
    """Describe a tensor but for its number of rows."""
    if not isinstance(leaf, Tensor) or leaf.is_nested:
        return (type(leaf).__qualname__,)
    shape = [n for i, n in enumerate(leaf.shape) if leaf.ndim and i != dim % leaf.ndim]
    return (*shape, str(leaf.dtype))


def _describe_device(device: torch.device) -> tuple[Any, ...]:
    if device.type != "cuda":
        return (device.type,)
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.total_memory


def _describe_step(step: Any) -> tuple[Any, ...]:
    code = getattr(step, "__code__", None)
    name = getattr(step, "__qualname__", type(step).__qualname__)
    return (name,) if code is None else (name, *_describe_code(code))


def _describe_code(code: CodeType) -> tuple[Any, ...]:
    """Describe what a function does; its instructions alone only count the names and numbers that they use."""
    return (code.co_code.hex(), code.co_names, *map(_describe_constant, code.co_consts))


def _describe_constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _describe_code(value)
    # In another process a set has another order.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value
