"""The largest batch that fits, and the number of workers that load fastest: measured on the user's own program."""

import copy
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from everygpu import tree
from everygpu.child import count_cores
from everygpu.devices.seed import rng_states_kept
from everygpu.errors import DeviceError, OptionError, RankError
from everygpu.feed.feeder import Target, data_parallel_in, find_route
from everygpu.feed.feeder_iterator import WARN_AFTER_STEPS, FeederIterator, FeedReport
from everygpu.feed.order import ResumableOrder
from everygpu.parallel.scatter.batch_types import batch_type, open_batch, split_batch
from everygpu.parallel.scatter.row_count import find_rows
from everygpu.ranks.group import current_group

STEPS_PER_TRIAL = 2
"""The first step makes the optimizer's state, the second holds it together with its activations."""
PRECISION = 0.05
"""The search stops when the largest size that fits and the smallest that doesn't are this close."""
GAIN = 0.05
"""More workers are worth their memory when they are faster by this part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeReport:
    """What ``find_batch_size`` found."""

    num_rows: int
    """The largest batch that fits, for all devices together."""
    trials: tuple[tuple[int, bool], ...]
    """The sizes that were tried, and whether they fit."""


def find_batch_size(
    step: Callable[[Any], object],
    batch: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    max_rows: int = 2**16,
    headroom_pct: float = 5.0,
) -> BatchSizeReport:
    """Find the largest batch that a training step has memory for, on every GPU.

    The step runs on batches made by repeating the rows of ``batch``. Afterwards the model, the optimizer and all random
    generators are as they were, and the memory is returned::

        def step(batch):
            x, y = batch
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

        if torch.cuda.is_available():
            report = everygpu.find_batch_size(step, next(iter(loader)), model, optimizer)
            loader = DataLoader(dataset, batch_size=report.num_rows)

    Args:
        step: Does everything that a training step does. Whatever else it changes or saves stays changed.
        batch: An example, as the loader gives it: tensors of shape (..., rows, ...) in any nesting of containers.
        model: A ``DataParallel``, or a module on one device; on GPUs.
        optimizer: Of the step.
        max_rows: The largest size to try.
        headroom_pct: Share of each GPU's memory that stays free: 0 to less than 100.
    Returns:
        The size, and what was tried.
    Raises:
        OptionError: an option has no such value, or ``batch`` has no rows.
        DeviceError: ``model`` is on no GPU.
        RankError: several ranks train. Search in a process of its own, and multiply by the ranks.
        torch.OutOfMemoryError: not even a row for each device fits.
        Exception: what the step raises.
    Source:
        ``torch.cuda.set_per_process_memory_fraction`` keeps the headroom free; ``torch.OutOfMemoryError`` ends a trial.
    """
    if (group := current_group()) is not None and group.size > 1:
        raise RankError("find_batch_size: Several ranks can't search. Search in a run of one process, and multiply.")
    route = find_route(model)
    count, gpus, wrapper = len(route.devices), require_gpus(route.devices), data_parallel_in(model)
    if type(max_rows) is not int or max_rows < 1:
        raise OptionError(f"find_batch_size: max_rows is a whole number from 1, got {max_rows!r}.")
    if not 0 <= headroom_pct < 100:
        raise OptionError(f"find_batch_size: headroom_pct is from 0 to below 100, got {headroom_pct!r}.")
    num_rows = find_rows([("batch", batch)], route.dim, count)
    if not num_rows:
        raise OptionError("find_batch_size: The batch has no tensor with rows. Pass one batch of the loader.")
    trials: list[tuple[int, bool]] = []

    def fits(rows_each: int) -> bool:
        size, is_fit = min(rows_each * count, max_rows), True
        example = resize(batch, size, route.dim, count)
        try:
            for _ in range(STEPS_PER_TRIAL):
                step(example)
                # Before memory runs out nothing may be under way: what torch frees, another GPU could be writing.
                for gpu in gpus:
                    torch.cuda.synchronize(gpu)
        except torch.OutOfMemoryError:
            is_fit = False
        trials.append((size, is_fit))
        if wrapper is not None:
            wrapper.release()  # of each size, compiled replicas keep memory
        _return_memory(gpus)
        return is_fit

    with _limited_memory(gpus, headroom_pct), _restored(model, optimizer):
        found = min(count * _find_size(fits, max(1, num_rows // count), -(-max_rows // count)), max_rows)
    if found == 0:
        few = min(count, max_rows)
        raise torch.OutOfMemoryError(f"find_batch_size: not even {few} rows fit. Use bf16, or recompute activations.")
    return BatchSizeReport(num_rows=found, trials=tuple(trials))


def require_gpus(devices: Sequence[torch.device]) -> list[torch.device]:
    """Return the GPUs among the devices of a model, each once."""
    if gpus := [d for d in dict.fromkeys(devices) if d.type == "cuda"]:
        return gpus
    raise DeviceError("find_batch_size: the model is on no GPU, and a full host ends programs. Choose a size yourself.")


def resize(batch: Any, num_rows: int, dim: int, num_devices: int = 0) -> Any:
    """Make a batch of another size by repeating the rows that its tensors have along a dimension."""
    num_own = find_rows([("batch", batch)], dim, num_devices) or 0

    def repeat(leaf: Any) -> Any:
        kind = batch_type(leaf)
        if kind is not None:
            rows = split_batch(leaf, kind, [1] * num_own)
            return kind.join([rows[i % len(rows)] for i in range(num_rows)])
        if not tree.has_dims(leaf) or leaf.shape[dim] != num_own:
            return leaf
        # Indexing keeps channels_last, index_select doesn't.
        found = leaf[(slice(None),) * (dim % leaf.ndim) + ([i % num_own for i in range(num_rows)],)]
        return found.requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else found

    with torch.no_grad():
        return tree.map_leaves(repeat, batch, open_batch)


def _find_size(fits: Callable[[int], bool], start: int, highest: int) -> int:
    """Double or halve until a smaller size fits and a larger doesn't, then bisect; 0 where not even 1 does."""
    low, high, size = 0, highest + 1, min(start, highest)
    while low < highest and high - low > max(1, PRECISION * low * (high <= highest)):
        low, high = (size, high) if fits(size) else (low, size)
        size = min(2 * low, highest) if high > highest else (low + high) // 2
    return low


@contextmanager
def _restored(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Put back what a step changes, in the same tensors, from copies on the CPU: the GPUs' memory is the steps' own."""

    def on_host(leaf: Any) -> Any:
        return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf

    grads = [(p, p.grad) for p in model.parameters()]
    tensors = [*model.parameters(), *model.buffers(), *(grad for _, grad in grads if grad is not None)]
    values = [(t, on_host(t)) for t in tensors]
    modules = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    state = None if optimizer is None else tree.map_leaves(on_host, optimizer.state_dict())
    with rng_states_kept():
        try:
            yield
        finally:
            with torch.no_grad():
                for p, grad in grads:
                    p.grad = grad
                for t, value in values:
                    t.copy_(value)
            for module, is_training, buffers in modules:
                module.training = is_training
                module._buffers.update(buffers)
            if optimizer is not None and state is not None:
                getattr(optimizer, "module", optimizer).state.clear()  # frees memory for the old one
                optimizer.load_state_dict(state)


@contextmanager
def _limited_memory(gpus: Sequence[torch.device], headroom_pct: float) -> Iterator[None]:
    """Let torch take only so much of each GPU that the headroom stays free of it."""
    _return_memory(gpus)
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
        _return_memory(gpus)


def _return_memory(gpus: Sequence[torch.device]) -> None:
    """Return unreferenced memory of the caching allocator to the GPUs."""
    gc.collect()
    for gpu in gpus:
        with torch.cuda.device(gpu):
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What ``tune_workers`` found."""

    num_workers: int
    """The smallest number that is as fast as any, within 5%."""
    batches_per_s: dict[int, float]
    """By number of workers, in the order they were tried; after the first batch."""


def tune_workers(
    loader: DataLoader[Any],
    model_or_devices: Target = None,
    *,
    candidates: Iterable[int] | None = None,
    seconds: float = 3.0,
) -> WorkerReport:
    """Measure how many worker processes a DataLoader needs.

    Load batches and send them to the devices as ``Feeder`` does, with 0, 1, 2, 4, … workers, up to the CPU cores that
    this process may use, until more don't help. The random generators of this process stay as they are::

        report = everygpu.tune_workers(loader, model)
        loader = DataLoader(dataset, num_workers=report.num_workers)

    Args:
        loader: A DataLoader of torch.
        model_or_devices: As for ``Feeder``.
        candidates: Numbers of workers to try, all of them, in this order.
        seconds: How long to measure each number of workers.
    Returns:
        The number, and what was measured.
    Raises:
        OptionError: ``loader`` is no DataLoader or gives no batch, or an option has no such value.
        Exception: what the loader raises.
    Source:
        ``os.sched_getaffinity`` for the cores; the numbers are measured, not derived from them.
    """
    if not isinstance(loader, DataLoader):
        raise OptionError(f"tune_workers: {type(loader).__qualname__} is no DataLoader, which has workers to tune.")
    if not 0 < seconds < math.inf:
        raise OptionError(f"tune_workers: seconds must be more than 0, got {seconds!r}.")
    most = count_cores()
    numbers = [0, *(2**i for i in range(most.bit_length()) if 2**i < most), most]
    if candidates is not None:
        numbers = list(candidates) if isinstance(candidates, Iterable) else []
    if not numbers or any(type(n) is not int or n < 0 for n in numbers):
        raise OptionError(f"tune_workers: candidates are whole numbers from 0, got {candidates!r}, such as [0, 2, 4].")
    rates: dict[int, float] = {}
    for num_workers in numbers:
        with rng_states_kept(with_cuda=False):
            rates[num_workers] = _measure(with_workers(loader, num_workers), model_or_devices, seconds)
        found = list(rates.values())
        # The last two, beyond the first ones, brought nothing over the best before.
        if candidates is None and len(found) > 4 and max(found[-2:]) < (1 + GAIN) * max(found[:-2]):
            break
    chosen = min(number for number, rate in rates.items() if rate * (1 + GAIN) >= max(rates.values()))
    return WorkerReport(num_workers=chosen, batches_per_s=rates)


def with_workers(loader: DataLoader[Any], num_workers: int) -> DataLoader[Any]:
    """Copy a DataLoader, of whatever subclass, with another number of workers."""
    twin = copy.copy(loader)
    own = vars(twin)  # DataLoader refuses to set some of these after its constructor
    own |= {"num_workers": num_workers, "persistent_workers": False, "_iterator": None}
    own["prefetch_factor"] = (loader.prefetch_factor or 2) if num_workers else None
    own["timeout"] = loader.timeout if num_workers else 0
    return twin


def _measure(loader: DataLoader[Any], target: Target, seconds: float) -> float:
    """Return the batches a second."""
    order = ResumableOrder(loader, 0, sharded=False, is_alone=True)  # ranks measure for different numbers of batches
    report = FeedReport(num_steps=WARN_AFTER_STEPS)  # there is nothing else to do than to wait
    start = time.perf_counter()
    with FeederIterator(order, find_route(target), 2, None, report) as feed:
        if next(feed, feed) is feed:
            raise OptionError("tune_workers: the loader gives no batch. Check its dataset and sampler.")
        begin = now = time.perf_counter()
        num_batches = 0
        for _ in feed:
            num_batches, now = num_batches + 1, time.perf_counter()
            if now - begin >= seconds:
                break
    return num_batches / (now - begin) if num_batches else 1 / (begin - start)
