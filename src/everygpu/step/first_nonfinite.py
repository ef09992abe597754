"""Where a forward first has a value that isn't finite."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from everygpu import tree
from everygpu.parallel.data_parallel import DataParallel
from everygpu.parallel.engines.thread_state import fresh_casts
from everygpu.parallel.engines.threads import parallel_apply
from everygpu.parallel.replicas.replica_set import ReplicaSet
from everygpu.parallel.scatter.row_count import find_rows, name_arguments
from everygpu.parallel.scatter.scatter import scatter_call
from everygpu.step.finite_check import NO_ROWS

logger = logging.getLogger("everygpu")


def name_first(
    model: DataParallel,
    replicas: Callable[[], ReplicaSet],
    args: Any,
    kwargs: Any,
    *,
    roots: Sequence[nn.Module],
    is_whole: bool,
) -> str | None:
    """Return what ``find_first`` finds on each rank, one after another; None where it finds nothing, or fails.

    ``NO_ROWS`` where there are none on any rank.

    Args:
        model: What ran.
        replicas: Returns its replicas.
        args: Positional arguments of the whole batch.
        kwargs: Keyword arguments.
        roots: All modules of the step: what is found is followed by a buffer of theirs that is nan.
        is_whole: Whether the batch is all of the update: among others, one without rows counts nothing.
    """
    group = None if model.rank_model is None else model.rank_model.group
    try:
        # Layers that wait for other ranks would wait for ever for one that fails here.
        waits = group is not None and any("SyncBatchNorm" in type(m).__name__ for m in model.module.modules())
        is_empty = is_whole and find_rows(name_arguments(args, kwargs), model.dim, len(model.device_ids)) == 0
        found = NO_ROWS if is_empty else None if waits else find_first(model, replicas(), args, kwargs)
        if found != NO_ROWS:
            found = "; ".join(filter(None, (found, _nan_buffer(roots)))) or None
    except Exception as error:  # noqa: BLE001 - the message that this is for counts more
        found = None
        logger.debug("TrainStep: no second forward: %r", error)
    if group is None:
        return found
    all_found = group.gather(found)
    if all(what == NO_ROWS for what in all_found):
        return NO_ROWS
    return "; ".join(f"{what}, rank {i}" for i, what in enumerate(all_found) if what and what != NO_ROWS) or None


@torch.no_grad()
def find_first(model: DataParallel, replicas: ReplicaSet, args: Any, kwargs: Any) -> str | None:
    """Run a forward once more, in Python threads, and name the first parameter, input or module with such a value.

    What is nan comes before what is infinite, as a mask may be. Random numbers and buffers are put back;
    what else a forward counts or collects is counted once more.

    Args:
        model: What ran.
        replicas: Its replicas.
        args: Positional arguments of the whole batch.
        kwargs: Keyword arguments.
    Returns:
        What to call it; None where all are finite.
    """
    module = model.module
    bad = next((name for name, p in module.named_parameters() if not _is_finite(p)), None)
    if bad is not None:
        return f"parameter {bad}, so that every batch is; load a checkpoint from before"
    notes: list[tuple[bool, str]] = []
    with _put_back(model):
        shards = scatter_call(args, kwargs, model.replica_devices, model.dim, model.split)
        for shard in shards:
            if any(t.is_floating_point() and bool(t.isnan().any()) for t in _tensors((shard.args, shard.kwargs))):
                notes.append((True, f"the batch itself, on {_place(model, shard.position)}"))
        positions = [shard.position for shard in shards]
        modules = replicas.refresh(positions)
        devices = [model.replica_devices[position] for position in positions]
        with _noting(model, dict(zip(positions, modules)), notes), fresh_casts():
            parallel_apply(modules, [s.args for s in shards], [s.kwargs for s in shards], devices)
    return next((what for is_nan, what in sorted(notes, key=lambda note: not note[0])), None)


@contextmanager
def _noting(model: DataParallel, roots: Mapping[int, nn.Module], notes: list[tuple[bool, str]]) -> Iterator[None]:
    names = {id(m): (position, name) for position, root in roots.items() for name, m in root.named_modules()}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        found = names.get(id(module))
        if found is not None and not all(map(_is_finite, _tensors(output))):
            position, name = found
            is_nan = any(bool(t.isnan().any()) for t in _tensors(output))
            what = f"module {name}" if name else "the model's output"
            notes.append((is_nan, f"{what} ({type(module).__name__}) on {_place(model, position)}"))

    handle = register_module_forward_hook(note)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _put_back(model: DataParallel) -> Iterator[None]:
    tables = [m._buffers for m in model.module.modules()]
    buffers = [(table, name, b, b.clone()) for table in tables for name, b in table.items() if b is not None]
    gpus = [d.index for d in model.replica_devices if d.type == "cuda"]
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        for table, name, buffer, before in buffers:
            table[name] = buffer  # forward may have put another one there
            buffer.data.copy_(before)


def _nan_buffer(roots: Sequence[nn.Module]) -> str | None:
    """Name a buffer that stays nan; infinities are what masks are made of."""
    for root in roots:
        for name, b in root.named_buffers():
            if b.is_floating_point() and bool(b.isnan().any()):
                return f"buffer {name} of {type(root).__name__} stays nan; load a checkpoint from before"
    return None


def _place(model: DataParallel, position: int) -> str:
    return f"{model.replica_devices[position]} (replica {position})"


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in tree.leaves(value, "") if isinstance(leaf, Tensor)]


def _is_finite(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex()) or bool(t.isfinite().all())
