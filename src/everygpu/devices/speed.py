"""Measure each device's speed and free memory, and derive its share of the rows."""

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

NOISE = 0.05
"""Devices whose figures differ by less than this fraction, or by less than a figure itself varied, count as equal."""
_NUM_ROUNDS = 5
_ROUND_S = 0.01

logger = logging.getLogger("everygpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """What one device was measured to do."""

    rate: float
    """Runs per second, averaged over products of matrices in several types and copies within its memory: geometrically,
    so that a quick task has no larger weight."""
    spread: float
    """Part by which the rates varied from round to round; 0 for not at all."""
    available_bytes: int | None
    """Memory that is free, or held by this process; None on the CPU, where all replicas share it."""


def measure_shares(devices: Sequence[torch.device]) -> list[float] | None:
    """Measure each device's share of the rows by its speed, or memory where that is scarcer; None if all are equal."""
    known = {device: measure_speed(device) for device in dict.fromkeys(devices)}
    return share_out([known[device] for device in devices])


def share_out(speeds: Sequence[DeviceSpeed]) -> list[float] | None:
    """Turn measurements into weights with a sum of 1."""
    by_speed = _relative([s.rate for s in speeds], max(NOISE, *(s.spread for s in speeds)))
    memory = [s.available_bytes for s in speeds if s.available_bytes is not None]
    by_memory = _relative(memory, NOISE) if len(memory) == len(speeds) else [1.0] * len(speeds)
    weights = [min(pair) for pair in zip(by_speed, by_memory)]
    if all(w == weights[0] for w in weights):
        return None
    shares = [round(w / sum(weights), 3) for w in weights]
    logger.info("split='auto': shares %s, by relative speeds %s and memory %s", shares, by_speed, by_memory)
    return shares


def measure_speed(device: torch.device) -> DeviceSpeed:
    """Time a few tasks on one device. On CUDA the host waits for it."""
    available = None
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    with torch.inference_mode():
        rounds = [_time_rounds(task, device) for task in _tasks(device)]
    rate = statistics.geometric_mean(1 / statistics.median(times) for times in rounds)
    spread = statistics.median((max(times) - min(times)) / statistics.median(times) for times in rounds)
    return DeviceSpeed(rate=rate, spread=spread, available_bytes=available)


def _relative(figures: Sequence[float], noise: float) -> list[float]:
    """Divide by the largest; what comes within the noise of it is equal to it."""
    best = max(figures)
    ratios = [f / best if best else 1.0 for f in figures]
    return [1.0 if r >= 1 - noise else round(r, 3) for r in ratios]


def _tasks(device: torch.device) -> Iterator[Callable[[], Any]]:
    is_large = device.type == "cuda"
    for dtype in (torch.float32,) if device.type == "cpu" else (torch.float32, torch.float16):
        a = torch.ones([2048 if is_large else 256] * 2, dtype=dtype, device=device)
        yield partial(torch.mm, a, a, out=torch.empty_like(a))
    source = torch.ones((64 if is_large else 1) * 2**20, dtype=torch.uint8, device=device)
    yield partial(torch.empty_like(source).copy_, source)


def _time_rounds(task: Callable[[], Any], device: torch.device) -> list[float]:
    """Return seconds per run, of several rounds that each last long enough to be timed."""

    def run(num_runs: int) -> float:
        _wait(device)
        start = time.perf_counter()
        for _ in range(num_runs):
            task()
        _wait(device)
        return (time.perf_counter() - start) / num_runs

    run(2)  # loads kernels, and wakes the clocks up
    num_runs = max(1, math.ceil(_ROUND_S / max(1e-9, run(2))))
    return [run(num_runs) for _ in range(_NUM_ROUNDS)]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
