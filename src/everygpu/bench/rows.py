"""The rows of a benchmark: six ways of training, each measured in a process of its own, or several.

To add one, write a function from ``Work`` to a step and name it in ``ROWS``.
"""

import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import everygpu
from everygpu.bench.timing import time_rounds
from everygpu.bench.training import (
    Training,
    compute_loss,
    count_rows,
    find_training,
    list_batches,
    move_batch,
    repeat_rows,
    split_batch,
)
from everygpu.errors import BenchmarkError, EveryGPUError, OptionError
from everygpu.feed.tune import resize

NUM_WARM_UPS = 5
"""Steps with each batch that aren't timed: recordings are made at the fourth."""
Outcome = dict[str, Any]
"""What becomes JSON: figures, or ``error``, or ``refused`` when it would go wrong in every row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Queues one training step when called, each on the next batch; the first comes after the last."""

    run: Callable[[Any], Any]
    """Called with a batch."""
    batches: Iterator[Any]
    """Endless."""
    net: Any
    """What trains; it may tell by which engine."""

    def __call__(self) -> Any:
        return self.run(next(self.batches))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The parts of a training step."""

    training: Training
    devices: list[torch.device]
    """Those to train on, the first for what is not spread."""
    precision: str = "fp32"
    """``"fp32"`` or ``"bf16"``, by autocast."""
    compiled: bool = False
    """Whether the model goes through ``torch.compile``."""

    @property
    def home(self) -> torch.device:
        return self.devices[0]

    def place_model(self) -> nn.Module:
        """Move the model to the first device."""
        return self.training.model.to(self.home)

    def place_batches(self, num_devices: int) -> list[Any]:
        """Make the batches of some devices, on the first one."""
        return [repeat_rows(move_batch(batch, self.home), num_devices) for batch in list_batches(self.training.batch)]

    def compile(self, net: Any) -> Any:
        return torch.compile(net) if self.compiled else net


def usual_loop(work: Work, net: Callable[..., Any], batches: Sequence[Any]) -> Step:
    """The loop that every PyTorch script has, around a model however it is wrapped."""
    optimizer = work.training.optimizer

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        with torch.autocast(work.home.type, torch.bfloat16, enabled=work.precision == "bf16"):
            loss = compute_loss(net, work.training.loss, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return Step(run=step, batches=itertools.cycle(batches), net=net)


def single(work: Work) -> Step:
    return usual_loop(work, work.compile(work.place_model()), work.place_batches(1))


def data_parallel(work: Work) -> Step:
    if work.home.type != "cuda":
        raise BenchmarkError("torch.nn.DataParallel needs a GPU. Leave out --peer dp.")
    net = nn.DataParallel(work.compile(work.place_model()), [d.index for d in work.devices])
    return usual_loop(work, net, work.place_batches(len(work.devices)))


def distributed(work: Work) -> Step:
    """What each process of DistributedDataParallel does, on its own device."""
    ids = [work.home] if work.home.type == "cuda" else None
    net = nn.parallel.DistributedDataParallel(work.place_model(), ids, gradient_as_bucket_view=True)
    return usual_loop(work, work.compile(net), work.place_batches(1))


def ours(work: Work) -> Step:
    """One process with all devices; or, in each process under torchrun, what it does on its own one."""
    net = everygpu.DataParallel(work.compile(work.training.model), work.devices)
    return usual_loop(work, net, spread(work, net) if len(work.devices) > 1 else work.place_batches(1))


def train_step(work: Work) -> Step:
    model, loss, optimizer, _ = work.training
    net = everygpu.DataParallel(model, work.devices)
    step = everygpu.TrainStep(net, loss, optimizer, precision=work.precision, compile=work.compiled)

    def run(batch: Any) -> Any:
        inputs, targets = split_batch(batch)
        return step(inputs, *targets)

    return Step(run=run, batches=itertools.cycle(spread(work, net)), net=step)


def spread(work: Work, net: everygpu.DataParallel) -> list[Any]:
    """Put each device's rows on it already, as in DistributedDataParallel's row."""
    return list(everygpu.Feeder(work.place_batches(len(work.devices)), net))


ROWS: dict[str, Callable[[Work], Step]] = {
    "single": single,
    "dp": data_parallel,
    "ddp": distributed,
    "ours": ours,
    "ours_ranks": ours,
    "step": train_step,
}
IN_RANKS = ("ddp", "ours_ranks")
"""Rows that run in a process for each device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How a row is measured; goes to its process as JSON."""

    model: str
    """As ``find_training`` takes it."""
    peer: str
    """A name of ``ROWS``."""
    device_type: str
    """``"cuda"`` or ``"cpu"``."""
    num_devices: int
    """To be had; rows on a single GPU use the first."""
    rows: int | None
    """Rows for each device; None for the batch as it is."""
    precision: str
    compiled: bool
    num_rounds: int
    num_steps: int
    """In each round, rounded up to whole cycles through the model's batches."""
    started_s: float
    """``time.time()`` when the process was asked for: the start-up is counted from there."""

    @property
    def num_used(self) -> int:
        """How many devices the row trains on."""
        return 1 if self.peer == "single" else self.num_devices

    def device(self, position: int) -> torch.device:
        return torch.device("cuda", position) if self.device_type == "cuda" else torch.device("cpu")


def measure_row(conditions: Conditions) -> Outcome:
    """Measure one row: the figures of ``_measure`` and ``peak_gib``, one per GPU; or ``error`` or ``refused``."""
    try:
        if conditions.peer in IN_RANKS:
            return _measure_distributed(conditions)
        devices = [conditions.device(i) for i in range(conditions.num_used)]
        figures = _measure(conditions, _prepare(conditions, devices), lambda: _synchronize(devices))
        return figures | {"peak_gib": [_peak_gib(d) for d in devices if d.type == "cuda"]}
    except OptionError as error:
        return {"refused": str(error)}
    except BenchmarkError as error:
        return {"error": str(error)}
    except torch.OutOfMemoryError as error:
        return {"error": f"out of memory; fewer rows for each GPU (--rows) need less. {error}"}


def _measure_distributed(conditions: Conditions) -> Outcome:
    """Start the processes; the first one's figures, and the memory of all."""
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
    return Work(training=training, devices=devices, precision=conditions.precision, compiled=conditions.compiled)


def _measure(conditions: Conditions, work: Work, wait: Callable[[], None]) -> Outcome:
    """Time rounds of steps; the start-up ends with the third step.

    Every batch is trained on as often as it takes to be recorded before anything is timed, and all rounds train on the
    same ones: otherwise the spread would be that of the batches.
    """
    step = ROWS[conditions.peer](work)
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


def engine_in_use(net: Any) -> str:
    """Name the engine that ran last: ``"threads"``, ``"capture"``, …; ``""`` for what has none."""
    if isinstance(net, everygpu.TrainStep):
        return net.stats().engine
    return net.engine_in_use if isinstance(net, everygpu.DataParallel) else ""


def _synchronize(devices: list[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 2**30
