"""How benchmarks take times: rounds of steps, each benchmarked way in a process of its own."""

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any


def time_rounds(step: Callable[[], Any], wait: Callable[[], None], rounds: int, steps: int) -> dict[str, float]:
    """Time rounds of steps, after five steps that don't count.

    Args:
        step: Queues one step.
        wait: Waits until all devices are done.
        rounds: How many times to measure.
        steps: How many steps a round has.
    Returns:
        Milliseconds of a step: median, least and most over the rounds.
    """
    for _ in range(5):
        step()
    wait()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        times.append(1e3 * (time.perf_counter() - begin) / steps)
    return {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}


def run_command(command: list[str], timeout: int) -> dict[str, Any]:
    """Run a command whose last line is a row as JSON; a hang or a failure is its result."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no result in {timeout} s"}
    if done.returncode:
        return {"error": done.stderr.strip()[-600:]}
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row
