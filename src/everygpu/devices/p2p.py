"""Test once per machine whether copies between two GPUs arrive.

On some boards (IOMMU, ACS, some drivers) the driver says that one GPU can reach another's memory, and the
bytes then arrive wrong, or never. A hanging copy can't be stopped, so the test runs in a process of its own.
"""

import functools
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from everygpu.child import python_command
from everygpu.devices import nvml
from everygpu.devices.peer_run import Outcome, Pair, PairReport, Patience, examine
from everygpu.errors import OptionError
from everygpu.folders import cache_folder, read_json, write_whole

logger = logging.getLogger("everygpu")
MODULE = "everygpu.devices.peer_test"
VARIABLE = "EVERYGPU_P2P"
"""``test`` (the default), ``trust`` or ``staged``: what is believed of copies between GPUs."""
_FORMAT = 1
# The verdict is a fact about the machine; two threads that need it first must not both start the test.
_one_at_a_time = threading.Lock()


def trusted_peers(devices: Iterable[torch.device]) -> bool:
    """Tell whether copies among these devices arrive; finds it out when it is asked first.

    Args:
        devices: Of any type; what isn't a CUDA device is trusted.
    Returns:
        False when one of them must not be copied to another directly. At the first use of two GPUs on a
        machine this takes seconds, and tests all that are visible; later it is looked up.
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
        raise OptionError(f"{VARIABLE}: must be 'test', 'trust' or 'staged', got {policy!r}.")
    if policy != "test":
        return everyone if policy == "staged" else frozenset()
    if not any(torch.cuda.can_device_access_peer(*pair) for pair in everyone):
        return frozenset()  # the driver stages copies itself
    uuids = list_uuids()
    reports = look_up(uuids) or examine_and_keep(uuids).pairs
    return _explain(find_broken(reports))


def list_uuids() -> list[str]:
    """List the UUIDs of all visible devices, without ``GPU-``; initialises CUDA, but makes no context."""
    every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [str(getattr(properties, "uuid", i)) for i, properties in enumerate(every)]


def find_broken(reports: Mapping[Pair, PairReport]) -> dict[Pair, PairReport]:
    """Pick the pairs that must not be used. One that couldn't be tested is as good as before the test."""
    return {pair: report for pair, report in reports.items() if report.verdict in ("wrong", "hangs")}


def _explain(broken: Mapping[Pair, PairReport]) -> frozenset[Pair]:
    for (source, target), report in itertools.islice(broken.items(), 1):
        what = "never arrive" if report.verdict == "hangs" else f"arrive wrong ({report.detail})"
        others = f", as between {len(broken) - 1} more pair(s)" if len(broken) > 1 else ""
        logger.warning(
            "Direct copies from cuda:%d to cuda:%d %s%s: copies between GPUs go through host memory, which is "
            "slower. `everygpu doctor` tests again and says what to do.",
            source,
            target,
            what,
            others,
        )
    return frozenset(broken)


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
    logger.info("Testing copies between %d GPUs, once for this driver.", len(uuids))
    command = python_command(MODULE, str(len(uuids)), *flags)
    report = examine(command, child_environ(uuids, os.environ), len(uuids), patience, on_pair)
    keep(uuids, report.pairs)
    return report


def child_environ(uuids: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Make the environment in which another process sees the same devices in the same order."""
    if torch.version.hip is not None:  # HIP takes no UUIDs of this kind
        return dict(environ)
    return {**environ, "CUDA_VISIBLE_DEVICES": ",".join(f"GPU-{uuid}" for uuid in uuids)}


def look_up(uuids: Sequence[str]) -> dict[Pair, PairReport] | None:
    """Find what an earlier test said of these devices; None unless it is known of every pair."""
    known = _read_cache()
    found = {(i, j): known.get(f"{uuids[i]} {uuids[j]}") for i, j in itertools.permutations(range(len(uuids)), 2)}
    reports = {pair: report for pair, report in found.items() if report is not None}
    return reports if len(reports) == len(found) else None


def keep(uuids: Sequence[str], reports: Mapping[Pair, PairReport]) -> None:
    """Remember what was found out, under the driver's version; a folder that can't be written is no harm."""
    sure = {pair: report for pair, report in reports.items() if report.verdict != "untested"}
    if not sure:
        return
    pairs = _read_cache() | {f"{uuids[i]} {uuids[j]}": report for (i, j), report in sure.items()}
    entries = {names: {"verdict": report.verdict, "detail": report.detail} for names, report in pairs.items()}
    try:
        write_whole(_cache_path(), json.dumps({"format": _FORMAT, "driver": _driver(), "pairs": entries}, indent=1))
    except OSError as error:
        logger.debug("The test of copies between GPUs can't be remembered: %s.", error)


def _read_cache() -> dict[str, PairReport]:
    try:
        kept = read_json(_cache_path())
        if (kept["format"], kept["driver"]) != (_FORMAT, _driver()):
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


def _driver() -> str:
    """Name what a verdict holds for: another driver may do better, or worse."""
    driver = nvml.sample_driver()
    return driver.version if isinstance(driver, nvml.DriverSample) else f"hip {torch.version.hip}"
