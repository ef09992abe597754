"""Read a trace that torch's profiler has exported: which device did what, and what the training thread did."""

import gzip
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from everygpu.tracing.intervals import Interval, Intervals, union

WAITING = "everygpu: waiting for data"
"""Annotation of the time in which a ``Feeder``'s consumer waits."""
ENDING = "everygpu: end of the trace"
"""Annotation of the time in which the trace itself waits for the devices."""

_STEP = "ProfilerStep#"  # torch.profiler's own name of a step
_WAITS = (WAITING, "enumerate(DataLoader)#")  # torch's own name of a DataLoader's __next__
_EXCHANGE = re.compile(r"nccl|rccl|^Memcpy PtoP", re.IGNORECASE)
# Of comm/kernels.py and step/kernels: the updates, too, read the gradients of all GPUs and write the parameters to all.
_OWN_EXCHANGE = re.compile(r"^_(send|add|copy|reduce|adam|adagrad|sgd)(_\w*)?$")
_HOST_COPY = re.compile(r"^Memcpy (HtoD|DtoH)")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Work(NamedTuple):
    """Something that a device did."""

    name: str
    kind: str
    """``"compute"``, ``"exchange"`` between devices, or ``"host copy"``."""
    time: Interval
    launched: Interval | None
    """When the CPU was in the call that queued it; None where the trace doesn't tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Whole steps of a training loop; times in microseconds."""

    window: Interval
    """From the first step's begin to the last one's end."""
    num_steps: int
    devices: Mapping[int, list[Work]]
    """By CUDA's index, each sorted by when it began; only what lies in the window."""
    operators: Intervals
    """When the CPU was in operators of torch, in the threads that the profiler sees."""
    waiting: Intervals
    """When the training thread waited for data."""
    num_syncs: int = 0
    """How often the CPU waited for a device, besides the trace's own waiting."""
    launches_graphs: bool = False
    """Whether CUDA graphs were launched."""
    has_loader: bool = False
    """Whether a DataLoader or a Feeder was seen in the training thread."""
    has_feeder: bool = False
    """Whether a Feeder was."""


def read_trace(path: Path, num_steps: int) -> Trace:
    """Read a file that ``torch.profiler.profile.export_chrome_trace`` has written.

    Args:
        path: JSON, compressed where its name ends with ``.gz``.
        num_steps: Steps that ended while the profiler ran; a further one is left out.
    """
    with gzip.open(path, "rt", errors="replace") if path.suffix == ".gz" else path.open(errors="replace") as file:
        return parse_trace(json.load(file, strict=False)["traceEvents"], num_steps)


def parse_trace(events: Iterable[Mapping[str, Any]], num_steps: int) -> Trace:
    """Sort out the events of a trace.

    Args:
        events: As in the ``traceEvents`` of Chrome's trace format; complete ones (``"ph": "X"``) count.
        num_steps: As for ``read_trace``.
    """
    whole = [e for e in events if e.get("ph") == "X" and "dur" in e]
    steps = sorted((e for e in whole if e["name"].startswith(_STEP) and _category(e) == "user_annotation"), key=_begin)
    steps = steps[:num_steps]
    window = (_begin(steps[0]), _end(steps[-1])) if steps else (0.0, 0.0)
    thread = steps[0].get("tid") if steps else None
    waits = [e for e in whole if e["name"].startswith(_WAITS) and e.get("tid") == thread]
    calls = [e for e in whole if _category(e).endswith(("_runtime", "_driver"))]
    inside = [e for e in calls if window[0] <= _begin(e) < window[1]]
    ending = union(_time(e) for e in whole if e["name"] == ENDING)
    return Trace(
        window=window,
        num_steps=len(steps),
        devices=_parse_devices(whole, calls, window),
        operators=_within(union(_time(e) for e in whole if _category(e) == "cpu_op"), window),
        waiting=_within(union(map(_time, waits)), window),
        num_syncs=sum(_is_sync(e) and not _is_in(_begin(e), ending) for e in inside),
        launches_graphs=any("GraphLaunch" in e["name"] for e in inside),
        has_loader=bool(waits),
        has_feeder=any(e["name"] == WAITING for e in waits),
    )


def _parse_devices(
    whole: Iterable[Mapping[str, Any]], calls: Iterable[Mapping[str, Any]], window: Interval
) -> dict[int, list[Work]]:
    launches = {e["args"]["correlation"]: _time(e) for e in calls if "correlation" in e.get("args", {})}
    found: dict[int, list[Mapping[str, Any]]] = {}
    for e in whole:
        if _category(e) in _ON_DEVICE and "device" in e.get("args", {}):
            found.setdefault(int(e["args"]["device"]), []).append(e)
    devices: dict[int, list[Work]] = {}
    for device, its in sorted(found.items()):
        works = [
            Work(e["name"], _kind(e, len(found)), clipped, launches.get(e["args"].get("correlation")))
            for e in sorted(its, key=_begin)
            if (clipped := _clip(_time(e), window)) is not None
        ]
        if works:
            devices[device] = works
    return devices


def _kind(event: Mapping[str, Any], num_devices: int) -> str:
    name = event["name"]
    if _HOST_COPY.search(name):
        return "host copy"
    is_exchange = _EXCHANGE.search(name) or (num_devices > 1 and _OWN_EXCHANGE.search(name))
    return "exchange" if is_exchange else "compute"


def _is_sync(event: Mapping[str, Any]) -> bool:
    return bool(re.search("(Stream|Device|Event|Ctx)Synchronize", event["name"]))


def _is_in(moment: float, intervals: Intervals) -> bool:
    return any(begin <= moment < end for begin, end in intervals)


def _category(event: Mapping[str, Any]) -> str:
    return str(event.get("cat", ""))


def _begin(event: Mapping[str, Any]) -> float:
    return float(event["ts"])


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _time(event: Mapping[str, Any]) -> Interval:
    return _begin(event), _end(event)


def _clip(time: Interval, window: Interval) -> Interval | None:
    begin, end = max(time[0], window[0]), min(time[1], window[1])
    return (begin, end) if begin < end else None


def _within(intervals: Intervals, window: Interval) -> Intervals:
    return [clipped for i in intervals if (clipped := _clip(i, window)) is not None]
