"""One row of a benchmark, measured in this process, or for DistributedDataParallel in children of it."""

import itertools
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from everygpu.bench.batches import list_batches
from everygpu.bench.peers import PEERS, Peer, Step, Work, engine_in_use
from everygpu.bench.timing import time_rounds
from everygpu.bench.training import count_rows, find_training
from everygpu.errors import BenchmarkError, EveryGPUError, OptionError
from everygpu.feed.batch_size import resize

NUM_WARM_UPS = 5
"""Steps with each batch that aren't timed: recordings are made at the fourth."""

Outcome = dict[str, Any]
"""What becomes JSON: figures, or ``error``, or ``refused`` when it would go wrong in every row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How a row is measured; goes to its process as JSON."""

    model: str
    """As ``find_training`` takes it."""
    peer: str
    device_type: str
    """``"cuda"`` or ``"cpu"``."""
    num_devices: int
    """To be had; rows on a single GPU use the first."""
    rows: int | None
    """Rows for each device; None for the batch as it is."""
    precision: str
    num_rounds: int
    num_steps: int
    """In each round, rounded up to whole cycles through the model's batches."""
    started_s: float
    """``time.time()`` when the process was asked for: the start-up is counted from there."""

    @property
    def num_used(self) -> int:
        """How many devices the row trains on."""
        return 1 if PEERS[self.peer].is_single else self.num_devices

    def device(self, position: int) -> torch.device:
        return torch.device("cuda", position) if self.device_type == "cuda" else torch.device("cpu")


def measure_row(conditions: Conditions) -> Outcome:
    """Measure one row.

    Returns:
        ``ms`` (the median step), ``ms_min``, ``ms_max``, ``steps_per_s``, ``samples_per_s``, ``rows_per_device``
        (the mean over the batches), ``num_batches``, ``num_steps`` (in each round), ``num_devices``, ``engine``
        (``""`` where there is none), ``peak_gib`` (one per GPU), ``startup_s``; or ``error`` or ``refused`` with a
        message.
    Raises:
        Exception: what the model, or the way to train it, raises by itself.
    """
    peer = PEERS[conditions.peer]
    try:
        return _measure_distributed(conditions) if peer.is_distributed else _measure_here(conditions, peer)
    except OptionError as error:
        return {"refused": str(error)}
    except BenchmarkError as error:
        return {"error": str(error)}
    except torch.OutOfMemoryError as error:
        return {"error": f"out of memory; fewer rows for each GPU (--rows) need less. {error}"}


def _measure_here(conditions: Conditions, peer: Peer) -> Outcome:
    devices = [conditions.device(i) for i in range(conditions.num_used)]
    work = _prepare(conditions, devices)

    figures = _measure(peer.make(work), lambda: _synchronize(devices), conditions, work)
    return figures | {"peak_gib": [_peak_gib(d) for d in devices if d.type == "cuda"]}


def _measure_distributed(conditions: Conditions) -> Outcome:
    """Start the processes; the first one's figures, and the memory of all."""
    from torch.multiprocessing.spawn import ProcessRaisedException, spawn

    results = multiprocessing.get_context("spawn").SimpleQueue()
    try:
        with tempfile.TemporaryDirectory() as folder:
            spawn(_measure_rank, (conditions, str(Path(folder) / "meet"), results), _count_ranks(conditions))  # type: ignore[no-untyped-call]
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


def _synchronize(devices: list[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _count_ranks(conditions: Conditions) -> int:
    per_rank = PEERS[conditions.peer].devices_per_process
    if conditions.num_devices % per_rank:
        raise BenchmarkError(
            f"bench: processes of {per_rank} devices each need a multiple of {per_rank}, got {conditions.num_devices}. "
            f"Leave this row out."
        )
    return conditions.num_devices // per_rank


def _measure_rank(rank: int, conditions: Conditions, meeting: str, results: Any) -> None:
    import torch.distributed as dist

    num_ranks, per_rank = _count_ranks(conditions), PEERS[conditions.peer].devices_per_process
    devices = [conditions.device(rank * per_rank + i) for i in range(per_rank)]
    device, on_gpus = devices[0], devices[0].type == "cuda"
    if on_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
    try:
        work = _prepare(conditions, devices)
    except (BenchmarkError, OptionError) as error:  # the same on every rank
        if rank == 0:
            results.put(error)
        return
    backend, own = ("nccl", device) if on_gpus else ("gloo", None)
    dist.init_process_group(
        backend,
        init_method=Path(meeting).as_uri(),  # a file: no port that another run could have
        rank=rank,
        world_size=num_ranks,
        device_id=own,
    )

    def wait() -> None:
        _synchronize(devices)
        dist.barrier()
        _synchronize(devices)

    figures = _measure(PEERS[conditions.peer].make(work), wait, conditions, work)
    peaks: list[Any] = [None] * num_ranks
    dist.all_gather_object(peaks, [_peak_gib(d) for d in devices if on_gpus])
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
    return Work(training=training, devices=devices, precision=conditions.precision)


def _measure(step: Step, wait: Any, conditions: Conditions, work: Work) -> Outcome:
    """Time rounds of steps; the start-up ends with the third step.

    Every batch is trained on as often as it takes to be recorded before anything is timed, and all rounds train on the
    same ones: otherwise the spread would be that of the batches.
    """
    rows = [count_rows(batch) for batch in list_batches(work.training.batch)]
    for _ in range(3):
        step()
    wait()
    startup = time.time() - conditions.started_s
    num_steps = -(-conditions.num_steps // len(rows)) * len(rows)
    times = time_rounds(step, wait, conditions.num_rounds, num_steps, NUM_WARM_UPS * len(rows))
    return times | {
        "steps_per_s": 1e3 / times["ms"],
        "samples_per_s": 1e3 * sum(rows) / len(rows) * conditions.num_used / times["ms"],
        "rows_per_device": rows[0] if len(set(rows)) == 1 else sum(rows) / len(rows),
        "num_batches": len(rows),
        "num_steps": num_steps,
        "num_devices": conditions.num_used,
        "engine": engine_in_use(step.net),
        "startup_s": startup,
    }


def _peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 2**30
