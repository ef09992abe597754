"""Measure one way to train: time, memory of each GPU, and losses; in this process, or in one for each GPU."""

import itertools
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from everygpu.bench.training import count_rows, find_training, list_batches
from everygpu.bench.ways import WAYS, Work, engine_in_use
from everygpu.bench.workloads import DYNAMIC, MODELS
from everygpu.errors import BenchmarkError, EveryGPUError, OptionError
from everygpu.feed.tune import resize

CYCLES, LEAST = 6, 15
"""How often each batch is trained on before anything is timed, and the least steps: captures are made by then."""
Outcome = dict[str, Any]
"""What becomes JSON: figures, or ``error``, or ``refused`` if it would go wrong in every row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How a row is measured; goes to its process as JSON."""

    model: str
    """As ``find_training`` takes it."""
    way: str
    """A name of ``WAYS``."""
    device_type: str
    """``"cuda"`` or ``"cpu"``."""
    num_devices: int
    """To train on."""
    rows: int | None
    """Rows for each device; None for the batch as it is."""
    precision: str
    num_rounds: int
    round_s: float
    """How long a round is to take; it has whole cycles through the model's batches."""
    started_s: float
    """``time.time()`` when the process was asked for: the start-up is counted from there."""

    def device(self, position: int) -> torch.device:
        return torch.device("cuda", position) if self.device_type == "cuda" else torch.device("cpu")


def measure_row(conditions: Conditions) -> Outcome:
    """Measure one row: the figures of ``_measure`` and ``peak_gib``, one per GPU; or ``error`` or ``refused``."""
    try:
        if WAYS[conditions.way].devices == "ranks":
            return _measure_ranks(conditions)
        devices = [conditions.device(i) for i in range(conditions.num_devices)]
        figures = _measure(conditions, _prepare(conditions, devices), lambda: _synchronize(devices))
        return figures | {"peak_gib": [_peak_gib(d) for d in devices if d.type == "cuda"]}
    except OptionError as error:
        return {"refused": str(error)}
    except BenchmarkError as error:
        return {"error": str(error)}
    except torch.OutOfMemoryError as error:
        return {"error": f"out of memory; fewer rows for each GPU (--rows) need less. {error}"}


def _measure_ranks(conditions: Conditions) -> Outcome:
    """Start the processes; return the first one's figures, and the memory of all."""
    from torch.multiprocessing.spawn import ProcessRaisedException, spawn

    results = multiprocessing.get_context("spawn").SimpleQueue()
    try:
        with tempfile.TemporaryDirectory() as folder:
            spawn(_measure_rank, (conditions, str(Path(folder) / "meet"), results), conditions.num_devices)  # type: ignore[no-untyped-call]
        outcome: Outcome | EveryGPUError = results.get()
    except ProcessRaisedException as error:
        if "OutOfMemoryError" in str(error):
            raise torch.OutOfMemoryError(str(error).strip().splitlines()[-1]) from error
        raise
    finally:
        results.close()
    if isinstance(outcome, EveryGPUError):
        raise outcome
    return outcome


def _measure_rank(rank: int, conditions: Conditions, meeting: str, results: Any) -> None:
    import torch.distributed as dist

    device, on_gpus = conditions.device(rank), conditions.device_type == "cuda"
    if on_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // conditions.num_devices))
    try:
        work = _prepare(conditions, [device])
    except (BenchmarkError, OptionError) as error:  # the same on every rank
        if rank == 0:
            results.put(error)
        return
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        init_method=Path(meeting).as_uri(),  # a file: no port that another run could have
        rank=rank,
        world_size=conditions.num_devices,
        device_id=device if on_gpus else None,
    )

    def wait() -> None:
        _synchronize([device])
        dist.barrier()
        _synchronize([device])

    figures = _measure(conditions, work, wait)
    peaks: list[Any] = [None] * conditions.num_devices
    dist.all_gather_object(peaks, [_peak_gib(device)] if on_gpus else [])
    if rank == 0:
        results.put(figures | {"peak_gib": list(itertools.chain.from_iterable(peaks))})
    dist.destroy_process_group()
    # Freeing the model joins gloo's threads while this one holds the interpreter's lock, which they may want.
    os._exit(0)


def _prepare(conditions: Conditions, devices: list[torch.device]) -> Work:
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    training = find_training(conditions.model)
    if conditions.rows is not None:
        training = training._replace(batch=resize(training.batch, conditions.rows, 0))
    static_graph = conditions.model not in DYNAMIC if conditions.model in MODELS else None
    return Work(training=training, devices=devices, precision=conditions.precision, static_graph=static_graph)


def _measure(conditions: Conditions, work: Work, wait: Callable[[], None]) -> Outcome:
    """Time rounds of steps; the start-up ends with the third step.

    All rounds train on the same batches: otherwise the spread would be that of the batches.
    """
    torch.manual_seed(1)
    step = WAYS[conditions.way].make(work)
    rows = [count_rows(batch) for batch in list_batches(work.training.batch)]
    losses = [float(step().mean()) for _ in range(3)]  # nn.DataParallel's are several
    wait()
    startup = time.time() - conditions.started_s
    num_warm_ups = -(-max(CYCLES * len(rows), LEAST) // len(rows)) * len(rows)
    num_timed = min(num_warm_ups - 4, max(3, len(rows)))
    for _ in range(num_warm_ups - 3 - num_timed):
        step()
    wait()
    begin = time.perf_counter()
    total = sum(step().mean() for _ in range(num_timed))  # read at once: a graph's next replay writes to the same loss
    wait()
    step_s = _same_on_all((time.perf_counter() - begin) / num_timed)
    losses.append(float(total) / num_timed)

    num_steps = max(1, math.ceil(conditions.round_s / step_s / len(rows))) * len(rows)
    times = time_rounds(step, wait, conditions.num_rounds, num_steps)
    return times | {
        "samples_per_s": 1e3 * sum(rows) / len(rows) * conditions.num_devices / times["ms"],
        "rows_per_device": rows[0] if len(set(rows)) == 1 else sum(rows) / len(rows),
        "num_batches": len(rows),
        "num_steps": num_steps,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "engine": engine_in_use(step.net),
        "startup_s": startup,
    }


def time_rounds(step: Callable[[], Any], wait: Callable[[], None], rounds: int, steps: int) -> Outcome:
    """Return the milliseconds of a step in each round, their median, the least and the most."""
    times = []
    for _ in range(rounds):
        wait()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        times.append(1e3 * (time.perf_counter() - begin) / steps)
    return {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}


def _same_on_all(value: float) -> float:
    """Give all ranks the first one's number: they train as many steps."""
    import torch.distributed as dist

    found = [value]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]


def _synchronize(devices: list[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 2**30
