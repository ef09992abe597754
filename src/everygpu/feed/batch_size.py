"""The largest batch that fits: found by running the user's own step on larger and larger ones."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from everygpu import tree
from everygpu.checkpoint.left_out import saves_left_out
from everygpu.errors import ModuleError, OptimizerError, OptionError, RankError
from everygpu.feed.arguments import as_whole, check_callback, describe, is_number
from everygpu.feed.feeder import data_parallel_in, find_route
from everygpu.feed.restore import restored
from everygpu.feed.size_search import find_size
from everygpu.feed.tuning_cache import describe_run, read_result, write_result
from everygpu.parallel.scatter.batch_types import batch_type, open_batch, split_batch
from everygpu.parallel.scatter.row_count import find_rows
from everygpu.parallel.scatter.split import ScatterSpec
from everygpu.ranks.group import Group, joined

STEPS_PER_TRIAL = 2
"""The first step makes the optimizer's state, the second has it beside its activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTrial:
    """One size that was tried."""

    num_rows: int
    fits: bool
    peak_bytes: int | None
    """Most memory that torch held on any one GPU; None without GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeReport:
    """What ``find_batch_size`` found."""

    num_rows: int
    """The largest batch that fits, for all devices of all ranks together."""
    trials: tuple[BatchTrial, ...]
    """In the order they were run; those of this rank, with rows for its devices."""
    is_cached: bool
    """Whether an earlier search had found it, and one trial has confirmed it."""
    is_limit: bool
    """Whether ``max_rows`` ended the search, not the memory."""


def find_batch_size(
    step: Callable[[Any], object],
    batch: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    min_rows: int | None = None,
    max_rows: int = 2**16,
    headroom_pct: float = 5.0,
    cache: bool = True,
    on_trial: Callable[[BatchTrial], object] | None = None,
) -> BatchSizeReport:
    """Find the largest batch that a training step has memory for, on every device.

    The step runs on batches made by repeating the rows of ``batch``: from its own size on, sizes are doubled until
    one doesn't fit, then bisected. Afterwards the model, the optimizer and all random generators are as they were,
    and the memory is returned::

        def step(batch):
            x, y = batch
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

        report = everygpu.find_batch_size(step, next(iter(loader)), model, optimizer)
        loader = DataLoader(dataset, batch_size=report.num_rows)

    Under torchrun each rank searches by itself, without the others, from the batch it is given on; the smallest that
    was found counts for all, times the ranks.

    Args:
        step: Does everything that a training step does. Whatever it changes beside ``model`` and ``optimizer``
            stays changed. Saves in it, by everygpu or as ``torch.save(…, path)``, are left out; a line says so.
        batch: An example, as the loader gives it: tensors of shape (..., rows, ...), 1 row or more, in any
            nesting of containers.
        model: A ``DataParallel``, or a module on one device.
        optimizer: Of the step.
        min_rows: The smallest size to try; one row per device when left out.
        max_rows: The largest size to try; under torchrun, both are for each rank.
        headroom_pct: Share of each GPU's memory that stays free: 0 to less than 100.
        cache: Remember the result for this model, step, batch, devices and versions, in the user's cache
            directory; a remembered result is tried once before it is returned.
        on_trial: Called after each trial.
    Returns:
        The size, and what was tried.
    Raises:
        OptionError: an option has no such value, ``batch`` has no rows, or ``step`` can't be called.
        ModuleError: ``model`` is no module.
        OptimizerError: ``optimizer`` is none of torch's.
        torch.OutOfMemoryError: not even ``min_rows`` fit.
        Exception: what the step raises.
    Source:
        ``torch.cuda.set_per_process_memory_fraction`` keeps the headroom free; ``torch.OutOfMemoryError`` ends a trial.
    """
    _check_arguments(step, model, optimizer, on_trial)
    route = find_route(model, None, None)
    max_rows = as_whole(max_rows, "max_rows")
    lowest = min(len(route.devices), max_rows) if min_rows is None else as_whole(min_rows, "min_rows")
    start = _check_options(batch, route, lowest, max_rows, headroom_pct)
    search = _Search(step, batch, model, route, on_trial)
    key = describe_run(step, batch, model, optimizer, route, (lowest, max_rows, headroom_pct)) if cache else None
    group = joined()
    with (
        limited_memory(route.devices, headroom_pct),
        restored(model, optimizer),
        _apart(group),
        saves_left_out("find_batch_size"),
    ):
        known = read_result(key) if key is not None else None
        is_cached = known is not None and search.fits(known)
        found = known if is_cached else find_size(search.fits, start, lowest, max_rows, grain=len(route.devices))
    everywhere = [found] if group is None else group.gather(found)
    if None in everywhere:
        raise torch.OutOfMemoryError(
            f"find_batch_size: {lowest} rows must fit, got out of memory. Pass a smaller min_rows, or make the "
            f"model's memory smaller: lower precision, activation checkpointing."
        )
    if key is not None and found is not None and not is_cached:
        write_result(key, found)
    return search.report(min(size for size in everywhere if size), len(everywhere), max_rows, is_cached=is_cached)


def _check_arguments(step: Any, model: Any, optimizer: Any, on_trial: Any) -> None:
    if not callable(step):
        raise OptionError(
            f"find_batch_size: step must be callable as step(batch), got {describe(step)}. "
            f"Pass a function that trains on one batch."
        )
    if not isinstance(model, nn.Module):
        raise ModuleError(
            f"find_batch_size: model must be a torch.nn.Module, got {describe(model)}. Pass the model that step trains."
        )
    if optimizer is not None and not isinstance(getattr(optimizer, "module", optimizer), torch.optim.Optimizer):
        raise OptimizerError(
            f"find_batch_size: optimizer must be a torch optimizer, got {describe(optimizer)}. "
            f"Pass the one that step uses, or leave it out."
        )
    check_callback(on_trial, "find_batch_size")


def _check_options(batch: Any, route: ScatterSpec, min_rows: int, max_rows: int, headroom_pct: float) -> int:
    """Return the size to start with: the batch's own, within the limits."""
    num_rows = find_rows([("batch", batch)], route.dim, len(route.devices))
    if not num_rows:
        raise OptionError(
            "find_batch_size: batch must have a tensor with rows, got none. Pass one batch of the loader."
        )
    if not 1 <= min_rows <= max_rows:
        raise OptionError(f"find_batch_size: needs 1 <= min_rows <= max_rows, got {min_rows} and {max_rows}.")
    if not is_number(headroom_pct) or not 0 <= headroom_pct < 100:
        raise OptionError(f"find_batch_size: headroom_pct must be from 0 to below 100, got {headroom_pct!r}.")
    return min(max(num_rows, min_rows), max_rows)


class _Search:
    """Tries sizes and keeps what came out."""

    def __init__(
        self,
        step: Callable[[Any], object],
        batch: Any,
        model: nn.Module,
        route: ScatterSpec,
        on_trial: Callable[[BatchTrial], object] | None,
    ) -> None:
        self._step, self._batch, self._route = step, batch, route
        self._wrapper = data_parallel_in(model)
        self._gpus = [d for d in dict.fromkeys(route.devices) if d.type == "cuda"]
        self._on_trial = on_trial
        self._trials: list[BatchTrial] = []

    def fits(self, num_rows: int) -> bool:
        """Run a trial."""
        for gpu in self._gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        error = _attempt(self._step, resize(self._batch, num_rows, self._route.dim, len(self._route.devices)))
        peak = max((torch.cuda.max_memory_reserved(gpu) for gpu in self._gpus), default=None)
        trial = BatchTrial(num_rows=num_rows, fits=error is None, peak_bytes=peak)
        self._trials.append(trial)
        if self._wrapper is not None:
            self._wrapper.release()  # of each size, compiled replicas keep memory
        return_memory()
        if self._on_trial is not None:
            self._on_trial(trial)
        return error is None

    def report(self, num_rows: int, num_ranks: int, max_rows: int, *, is_cached: bool) -> BatchSizeReport:
        return BatchSizeReport(
            num_rows=num_rows * num_ranks,
            trials=tuple(self._trials),
            is_cached=is_cached,
            is_limit=num_rows == max_rows,
        )


@contextmanager
def _apart(group: Group | None) -> Iterator[None]:
    """Have a rank try sizes by itself; an error that ends the search reaches the others."""
    if group is None:
        yield
        return
    error: Exception | None = None
    with group.apart():
        try:
            yield
        except Exception as raised:  # noqa: BLE001 - raised below
            error = raised
    failures = group.gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise RankError(f"find_batch_size: the step failed on rank {rank}: {failure}")


def _attempt(step: Callable[[Any], object], batch: Any) -> str | None:
    """Run a few steps; return what was said when memory ran out, without the frames that hold on to it."""
    try:
        for _ in range(STEPS_PER_TRIAL):
            step(batch)
            # Before memory runs out nothing may be under way: what torch then frees, another GPU could be writing.
            for device in _devices_in_use():
                torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        return str(error) or "out of memory"
    return None


def _devices_in_use() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def resize(batch: Any, num_rows: int, dim: int, num_devices: int = 0) -> Any:
    """Make a batch of another size by repeating rows.

    Args:
        batch: Any nesting of containers with tensors of shape (..., rows, ...), 1 row or more.
        num_rows: Rows of the result.
        dim: Where they are.
        num_devices: As for ``find_rows``.
    """
    num_own = find_rows([("batch", batch)], dim, num_devices)

    def repeat(leaf: Any) -> Any:
        kind = batch_type(leaf)
        if kind is not None:
            rows = split_batch(leaf, kind, [1] * (num_own or 0))
            return kind.join([rows[i % len(rows)] for i in range(num_rows)])
        if not tree.has_dims(leaf) or leaf.shape[dim] != num_own:
            return leaf
        if not isinstance(leaf, torch.Tensor):
            return leaf.take(range(num_rows), axis=dim, mode="wrap")
        index = torch.arange(num_rows, device=leaf.device) % leaf.shape[dim]
        # Indexing keeps channels_last, index_select doesn't.
        before: list[Any] = [slice(None)] * (dim % leaf.ndim)
        repeated = leaf[(*before, index)]
        return repeated.requires_grad_(leaf.requires_grad)

    with torch.no_grad():
        return tree.map_leaves(repeat, batch, open_batch)


def return_memory() -> None:
    """Return unreferenced memory of the caching allocator to the GPUs."""
    if _devices_in_use():
        gc.collect()
    for device in _devices_in_use():
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


@contextmanager
def limited_memory(devices: Sequence[torch.device], headroom_pct: float) -> Iterator[None]:
    """Let torch take only so much of each GPU that the headroom stays free of it."""
    gpus = [d for d in dict.fromkeys(devices) if d.type == "cuda"]
    return_memory()
    before = [torch.cuda.get_per_process_memory_fraction(gpu) for gpu in gpus]
    try:
        for gpu, fraction in zip(gpus, before):
            free, total = torch.cuda.mem_get_info(gpu)
            most = (free + torch.cuda.memory_reserved(gpu)) / total - headroom_pct / 100
            torch.cuda.set_per_process_memory_fraction(min(fraction, max(0.0, most)), gpu)
        yield
    finally:
        for gpu, fraction in zip(gpus, before):
            torch.cuda.set_per_process_memory_fraction(fraction, gpu)
        return_memory()
