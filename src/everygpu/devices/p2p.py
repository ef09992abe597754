"""Test once per boot of a machine whether copies between two GPUs arrive.

On some boards (IOMMU, ACS, some drivers) the driver says that one GPU can reach another's memory, and the
bytes then arrive wrong, or never. A hanging copy can't be stopped, so ``peer_test`` runs in a process of its own.
"""

import functools
import itertools
import json
import logging
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from everygpu.child import python_command
from everygpu.devices import nvml
from everygpu.errors import OptionError
from everygpu.folders import cache_folder, read_json, write_whole

logger = logging.getLogger("everygpu")
MODULE = "everygpu.devices.peer_test"
VARIABLE = "EVERYGPU_P2P"
"""``test`` (the default), ``trust`` or ``staged``: what is believed of copies between GPUs."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FORMAT = 2
_END_S = 10.0
"""For a killed process to be gone: on a busy machine the driver takes seconds to clean up after it."""
# The verdict is a fact about the machine; two threads that need it first must not both start the test.
_one_at_a_time = threading.Lock()

Verdict = Literal["right", "wrong", "hangs", "untested"]
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReport:
    """What came of copying from one GPU to another."""

    verdict: Verdict
    detail: str = ""
    """The fault."""
    gigabytes_per_s: float | None = None
    """10**9 bytes a second; None when not measured."""


UNTESTED = PairReport(verdict="untested")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a whole test."""

    pairs: Mapping[Pair, PairReport]
    """By positions of source and target."""
    collective: PairReport = UNTESTED
    """Of NCCL's sum over all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the test may take, in seconds."""

    start_s: float = 60.0
    """To load torch and to find the devices: a slow disk is no broken GPU."""
    step_s: float = 4.0
    """For a single pair, which takes milliseconds: a hanging one is found within this time."""
    total_s: float = 30.0
    """For all pairs."""


def trusted_peers(devices: Iterable[torch.device]) -> bool:
    """Tell whether copies among these devices arrive; finds it out when it is asked first.

    Args:
        devices: Of any type; what isn't a CUDA device is trusted.
    Returns:
        False when one of them must not be copied to another directly. At the first use of two GPUs after a
        boot this takes seconds, and tests all that are visible; later it is looked up.
    Raises:
        OptionError: the variable ``EVERYGPU_P2P`` has no such value.
    """
    indices = {device.index for device in devices if device.type == "cuda"}
    if len(indices) < 2:
        return True
    with _one_at_a_time:
        broken = _broken_pairs()
    return not broken or not any(pair in broken for pair in itertools.permutations(indices, 2))


def reach_each_other(devices: Sequence[torch.device]) -> bool:
    """Tell whether these are GPUs that read and write each other's memory, and what arrives there is right."""
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
    reports = look_up(uuids) or examine_and_keep(uuids).pairs
    # A pair that couldn't be tested is as good as before the test.
    broken = {pair: report for pair, report in reports.items() if report.verdict in ("wrong", "hangs")}
    if broken:
        (source, target), report = next(iter(broken.items()))
        logger.warning(
            "Direct copies from cuda:%d to cuda:%d %s%s: copies between GPUs go through host memory, which is slower. "
            "`everygpu doctor` tests again and says what to do.",
            source,
            target,
            "never arrive" if report.verdict == "hangs" else f"arrive wrong ({report.detail})",
            f", as between {len(broken) - 1} more pair(s)" if len(broken) > 1 else "",
        )
    return frozenset(broken)


def list_uuids() -> list[str]:
    """List the UUIDs of all visible devices, without ``GPU-``; initialises CUDA, but makes no context."""
    every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [str(getattr(properties, "uuid", i)) for i, properties in enumerate(every)]


def examine_and_keep(
    uuids: Sequence[str], *, full: bool = False, on_pair: Callable[[int], object] = lambda num_pairs: None
) -> Outcome:
    """Run the test on the visible GPUs and remember what came of it.

    Args:
        uuids: Of all visible devices, in torch's order, without ``GPU-``.
        full: Measure the speed of each pair, and try NCCL; takes longer.
        on_pair: Called after each pair, with the number of pairs so far.
    """
    patience = Patience(total_s=120.0, step_s=15.0) if full else Patience()
    flags = ["--measure", "--collective"] if full else []
    logger.info("Testing copies between %d GPUs, once after a boot.", len(uuids))
    command = python_command(MODULE, str(len(uuids)), *flags)
    report = examine(command, child_environ(uuids, os.environ), len(uuids), patience, on_pair)
    keep(uuids, report.pairs)
    return report


def child_environ(uuids: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Make the environment in which another process sees the same devices in the same order."""
    if torch.version.hip is not None:  # HIP takes no UUIDs of this kind
        return dict(environ)
    return {**environ, "CUDA_VISIBLE_DEVICES": ",".join(f"GPU-{uuid}" for uuid in uuids)}


def examine(
    command: Sequence[str],
    environ: Mapping[str, str],
    num_devices: int,
    patience: Patience,
    on_pair: Callable[[int], object] = lambda num_pairs: None,
) -> Outcome:
    """Run the test in a process of its own, and end it when it hangs.

    Returns:
        A report for each ordered pair. Once a pair hangs, or ends the process, those after it count for no
        better: the GPUs are left alone.
    """
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        process = subprocess.Popen(command, env=dict(environ), **pipes)
    except OSError as error:
        logger.info("Copies between GPUs are not tested: %s.", error)
        return Outcome(pairs=dict.fromkeys(itertools.permutations(range(num_devices), 2), UNTESTED))
    ready: list[int] | None = None
    pairs: dict[Pair, PairReport] = {}
    collective = rest = UNTESTED
    now: Any = None
    is_done = False
    fault: PairReport | None = None
    try:
        for said in _records(process, patience):
            ready = said.get("ready", ready)
            now, is_done = said.get("begin"), "done" in said
            if "pair" in said:
                pairs[said["pair"][0], said["pair"][1]] = _report(said)
                on_pair(len(pairs))
            elif "collective" in said:
                collective = _report(said)
            if is_done:
                break
        else:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1.0)  # its output has ended: so does it, with a code that says why
    except TimeoutError as silence:
        fault = PairReport(verdict="hangs", detail=str(silence))
    finally:
        _end(process)
    if ready is None:
        logger.info("Copies between GPUs are not tested: the test did not start (exit code %s).", process.returncode)
    if fault is None and not is_done:
        fault = PairReport(verdict="wrong", detail=f"the test ended with exit code {process.returncode}")
    if fault is not None and now == "collective":
        collective = fault
    elif fault is not None and now is not None:
        pairs[now[0], now[1]] = fault
        rest = PairReport(verdict=fault.verdict, detail="not tried any more")
    every = itertools.permutations(range(num_devices), 2)
    known = {pair: pairs.get(pair, rest if set(pair) <= set(ready or ()) else UNTESTED) for pair in every}
    return Outcome(pairs=known, collective=collective)


def _records(process: "subprocess.Popen[bytes]", patience: Patience) -> Iterator[dict[str, Any]]:
    """Give the records that the test writes, until it ends; raise ``TimeoutError`` with what it has exceeded."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        with process.stdout as pipe:  # type: ignore[union-attr]
            for line in pipe:
                lines.put(line)
        lines.put(b"")

    # A daemon: a process that is stuck in the driver doesn't die, and keeps its end of the pipe.
    threading.Thread(target=read, name="everygpu-p2p", daemon=True).start()
    began, limit_s, is_ready = time.monotonic(), patience.start_s, False
    while True:
        left_s = began + patience.total_s - time.monotonic() if is_ready else limit_s
        try:
            line = lines.get(timeout=max(0.0, min(limit_s, left_s)))
        except queue.Empty:
            if not is_ready:
                raise TimeoutError("did not start") from None
            late = f"not done in {patience.total_s:g} s" if left_s < limit_s else f"no answer in {limit_s:g} s"
            raise TimeoutError(late) from None
        if not line:
            return
        try:
            said = json.loads(line)
        except ValueError:
            continue  # what others write to the same stream is none of ours
        if isinstance(said, dict):
            if "ready" in said:
                began, limit_s, is_ready = time.monotonic(), patience.step_s, True
            yield said


def _report(said: Mapping[str, Any]) -> PairReport:
    if said.get("wrong") is not None:
        return PairReport(verdict="wrong", detail=str(said["wrong"]))
    return PairReport(verdict="right", gigabytes_per_s=said.get("gigabytes_per_s"))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill it. One that is stuck in the driver doesn't die, and isn't waited for."""
    process.kill()
    try:
        process.wait(timeout=_END_S)
    except subprocess.TimeoutExpired:
        logger.warning("The test of copies between GPUs (process %d) can't be ended.", process.pid)


def look_up(uuids: Sequence[str]) -> dict[Pair, PairReport] | None:
    """Find what an earlier test said of these devices; None unless it is known of every pair."""
    known = _read_cache()
    pairs = list(itertools.permutations(range(len(uuids)), 2))
    names = {(i, j): f"{uuids[i]} {uuids[j]}" for i, j in pairs}
    return {pair: known[names[pair]] for pair in pairs} if all(name in known for name in names.values()) else None


def keep(uuids: Sequence[str], reports: Mapping[Pair, PairReport]) -> None:
    """Remember what was found out; a folder that can't be written is no harm."""
    sure = {pair: report for pair, report in reports.items() if report.verdict != "untested"}
    if not sure:
        return
    pairs = _read_cache() | {f"{uuids[i]} {uuids[j]}": report for (i, j), report in sure.items()}
    entries = {names: {"verdict": report.verdict, "detail": report.detail} for names, report in pairs.items()}
    try:
        text = json.dumps({"format": _FORMAT, "machine": _machine(), "pairs": entries}, indent=1)
        write_whole(_cache_path(), text)
    except OSError as error:
        logger.debug("The test of copies between GPUs can't be remembered: %s.", error)


def _read_cache() -> dict[str, PairReport]:
    try:
        kept = read_json(_cache_path())
        if (kept["format"], kept["machine"]) != (_FORMAT, _machine()):
            return {}
        return {
            str(names): PairReport(verdict=entry["verdict"], detail=str(entry["detail"]))
            for names, entry in kept["pairs"].items()
            if entry["verdict"] in ("right", "wrong", "hangs")
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _cache_path() -> Path:
    return cache_folder() / "p2p.json"


def _machine() -> list[str]:
    """Name what a verdict holds for: another driver, or a boot with other settings of IOMMU and ACS, may differ."""
    driver = nvml.sample_driver()
    version = driver.version if isinstance(driver, nvml.DriverSample) else f"hip {torch.version.hip}"
    try:
        return [version, BOOT_ID.read_text().strip()]
    except OSError:  # not Linux
        return [version, ""]
