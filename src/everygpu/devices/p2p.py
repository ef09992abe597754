"""Test once per boot of a machine whether copies between two GPUs arrive.

On some boards (IOMMU, ACS, some drivers) one GPU is said to reach another's memory, and bytes arrive wrong, or never.
A hanging copy can't be stopped, so ``peer_test`` runs in a process of its own.
"""

import functools
import itertools
import json
import logging
import os
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from everygpu.child import python_command
from everygpu.devices import nvml
from everygpu.errors import OptionError
from everygpu.folders import cache_folder, write_whole

logger = logging.getLogger("everygpu")
MODULE = "everygpu.devices.peer_test"
VARIABLE = "EVERYGPU_P2P"
"""``test`` (the default), ``trust`` or ``staged``: what is believed of copies between GPUs."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
HANGING = "Timeout ("
"""How ``faulthandler`` begins what it writes of a process that it ends."""
_END_S = 10.0
"""For a killed process to be gone: on a busy machine the driver takes seconds to clean up after it."""
# The verdict is a fact about the machine; two threads that need it first must not both start the test.
_one_at_a_time = threading.Lock()

Verdict = Literal["right", "wrong", "hangs", "untested"]
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReport:
    """What came of copying from one GPU to another; ``detail`` is the fault."""

    verdict: Verdict
    detail: str = ""


UNTESTED = PairReport(verdict="untested")


def trusted_peers(devices: Iterable[torch.device]) -> bool:
    """Whether copies among these devices arrive: after a boot all visible pairs are tested once, in seconds."""
    indices = {device.index for device in devices if device.type == "cuda"}
    if len(indices) < 2:
        return True
    with _one_at_a_time:
        broken = _broken_pairs()
    return not broken or not any(pair in broken for pair in itertools.permutations(indices, 2))


def reach_each_other(devices: Sequence[torch.device]) -> bool:
    """Whether these are GPUs that read and write each other's memory, and what arrives there is right."""
    return (
        all(d.type == "cuda" for d in devices)
        and all(torch.cuda.can_device_access_peer(a, b) for a in devices for b in devices if a != b)
        and trusted_peers(devices)
    )


@functools.cache
def _broken_pairs() -> frozenset[Pair]:
    """Decide for this process, by indices of ``torch.cuda``; says so once if any pair is broken."""
    policy = os.environ.get(VARIABLE) or "test"
    everyone = frozenset(itertools.permutations(range(torch.cuda.device_count()), 2))
    if policy not in ("test", "trust", "staged"):
        raise OptionError(f"{VARIABLE}={policy!r} is unknown. Set 'test', 'trust' or 'staged', or unset it.")
    if policy != "test":
        return everyone if policy == "staged" else frozenset()
    if not any(torch.cuda.can_device_access_peer(*pair) for pair in everyone):
        return frozenset()  # the driver stages copies itself
    uuids = list_uuids()
    reports = look_up(uuids) or examine_and_keep(uuids)
    # A pair that couldn't be tested is as good as before the test.
    broken = {pair: report for pair, report in reports.items() if report.verdict in ("wrong", "hangs")}
    if broken:
        (source, target), report = next(iter(broken.items()))
        what = "never arrive" if report.verdict == "hangs" else f"arrive wrong ({report.detail})"
        what += f", as between {len(broken) - 1} more pair(s)" if len(broken) > 1 else ""
        logger.warning(
            "Direct copies from cuda:%d to cuda:%d %s: copies between GPUs go through host memory, which is slower. "
            "`everygpu doctor` tests again and says what to do.",
            *(source, target, what),
        )
    return frozenset(broken)


def list_uuids() -> list[str]:
    """List the UUIDs of all visible devices, without ``GPU-``; initialises CUDA, but makes no context."""
    every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [str(getattr(properties, "uuid", i)) for i, properties in enumerate(every)]


def examine_and_keep(uuids: Sequence[str]) -> dict[Pair, PairReport]:
    """Run the test on the visible GPUs and remember what came of it."""
    logger.info("Testing copies between %d GPUs, once after a boot.", len(uuids))
    command = python_command(MODULE, str(len(uuids)), "4")
    # Not short, for one that can't end itself: a slow disk on which torch lies is no broken GPU.
    reports = examine(command, child_environ(uuids, os.environ), len(uuids), limit_s=90.0)
    keep(uuids, reports)
    return reports


def child_environ(uuids: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Make the environment in which another process sees the same devices in the same order."""
    if torch.version.hip is not None:  # HIP takes no UUIDs of this kind
        return dict(environ)
    return {**environ, "CUDA_VISIBLE_DEVICES": ",".join(f"GPU-{uuid}" for uuid in uuids)}


def examine(
    command: Sequence[str], environ: Mapping[str, str], num_devices: int, limit_s: float
) -> dict[Pair, PairReport]:
    """Run the test in a process of its own, which ends by itself where a pair hangs."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        process: subprocess.Popen[bytes] = subprocess.Popen(command, env=dict(environ), **pipes)
    except OSError as error:
        logger.info("Copies between GPUs are not tested: %s.", error)
        return judge("", "", num_devices)
    try:
        output, _ = process.communicate(timeout=limit_s)
        ending = f"exit code {process.returncode}"
    except subprocess.TimeoutExpired as late:
        output, ending = late.output or b"", HANGING
    finally:  # one that is stuck in the driver doesn't die, and isn't waited for
        process.kill()
        if process.stdout is not None:
            process.stdout.close()
        try:
            process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            logger.warning("The test of copies between GPUs (process %d) can't be ended.", process.pid)
    return judge(output.decode(errors="replace"), ending, num_devices)


def judge(output: str, ending: str, num_devices: int) -> dict[Pair, PairReport]:
    """Make a report for each ordered pair; once one hangs, or ends the test, those after it count for no better."""
    said: dict[str, Any] = {"ready": [], "now": None, "pairs": []}
    for line in output.splitlines():
        with suppress(ValueError):  # others may write to the same stream
            state = json.loads(line)
            said = state if isinstance(state, dict) and "ready" in state else said
    if not said["ready"]:
        logger.info("Copies between GPUs are not tested: the test did not start (%s).", ending)
    fault, now = PairReport(verdict="wrong", detail=f"the test ended with {ending}"), said["now"]
    if ending == HANGING or HANGING in output:
        fault = PairReport(verdict="hangs", detail="no answer")
    rest = UNTESTED if now is None else replace(fault, detail="not tried any more")
    every = itertools.permutations(range(num_devices), 2)
    pairs = {pair: rest if set(pair) <= set(said["ready"]) else UNTESTED for pair in every}
    for i, j, wrong in said["pairs"]:
        pairs[i, j] = PairReport(verdict="right") if wrong is None else PairReport(verdict="wrong", detail=wrong)
    if now is not None:
        pairs[now[0], now[1]] = fault
    return pairs


def look_up(uuids: Sequence[str]) -> dict[Pair, PairReport] | None:
    """Find what an earlier test said of these devices since the machine started; None unless it is known of all."""
    kept, machine, pairs = _read_cache(), _machine(), itertools.permutations(range(len(uuids)), 2)
    try:
        known = {(i, j): kept[f"{uuids[i]} {uuids[j]}"] for i, j in pairs}
        reports = {pair: PairReport(verdict=own["verdict"], detail=own["detail"]) for pair, own in known.items()}
        return reports if all(own["machine"] == machine for own in known.values()) else None
    except (KeyError, TypeError):
        return None


def keep(uuids: Sequence[str], reports: Mapping[Pair, PairReport]) -> None:
    """Cache the results next to those of other machines' GPUs; a folder that can't be written is no harm."""
    machine = _machine()
    sure = {
        f"{uuids[i]} {uuids[j]}": {"machine": machine, "verdict": report.verdict, "detail": report.detail}
        for (i, j), report in reports.items()
        if report.verdict != "untested"
    }
    try:
        write_whole(cache_folder() / "p2p.json", json.dumps({"pairs": _read_cache() | sure}, indent=1))
    except OSError as error:
        logger.debug("The test of copies between GPUs can't be remembered: %s.", error)


def _read_cache() -> dict[str, Any]:
    try:
        return dict(json.loads((cache_folder() / "p2p.json").read_text())["pairs"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _machine() -> list[str]:
    """Name what a verdict holds for: another driver, or a boot with other settings of IOMMU and ACS, may differ."""
    driver = nvml.sample_driver()
    version = driver.version if isinstance(driver, nvml.DriverSample) else f"hip {torch.version.hip}"
    try:
        return [version, BOOT_ID.read_text().strip()]
    except OSError:  # not Linux
        return [version, ""]
