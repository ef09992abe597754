"""What each device's time went to, as shares of the traced steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from everygpu.tracing.events import Trace, Work
from everygpu.tracing.intervals import Interval, Intervals, gaps, intersect, subtract, total, union

NEAR_US = 20.0
"""A kernel that begins so soon after the call that queued it has waited for nothing but that call."""
BETWEEN_US = 5.0
"""A GPU may take so long to begin the next kernel of those that are queued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShares:
    """Percent of the traced time of a GPU; all but ``exchange_hidden`` add up to 100."""

    device: str
    computing: float
    """Kernels, and copies within the device."""
    exchange: float
    """Sending and receiving while nothing is computed: NCCL, copies between GPUs, everygpu's own kernels for it."""
    exchange_hidden: float
    """The same beside computing."""
    host_copies: float
    """Copies from or to the host's memory while nothing is computed or exchanged."""
    data: float
    """Idle while the training thread waits for data."""
    launching: float
    """Idle until the CPU has queued the next work."""
    waiting: float
    """Idle although work is queued: it waits for another GPU or stream."""
    between: float
    """Idle for some microseconds between two kernels, of which the second is queued: the GPU begins it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShares:
    """Percent of the traced time of the training thread, where no GPU works; they add up to 100."""

    operators: float
    """In operators of torch."""
    data: float
    """Waiting for data."""
    python: float
    """All else: Python between the operators."""


def device_shares(trace: Trace) -> list[DeviceShares]:
    """Sum up each GPU of a trace, in the order of CUDA's indices."""
    busy = {device: union(work.time for work in its) for device, its in trace.devices.items()}
    found = []
    for device, works in trace.devices.items():
        others = union(i for other, its in busy.items() if other != device for i in its)
        found.append(_sum_device(f"cuda:{device}", works, others, trace))
    return found


def host_shares(trace: Trace) -> HostShares:
    """Sum up the training thread of a trace without GPUs; operators that make a batch count as waiting for data."""
    whole = trace.window[1] - trace.window[0]
    data, operators = total(trace.waiting), total(subtract(trace.operators, trace.waiting))
    shares = [_percent(time, whole) for time in (operators, data)]
    return HostShares(operators=shares[0], data=shares[1], python=max(0.0, 100 - sum(shares)))


def _sum_device(name: str, works: Sequence[Work], others: Intervals, trace: Trace) -> DeviceShares:
    times = {kind: union(w.time for w in works if w.kind == kind) for kind in ("compute", "exchange", "host copy")}
    computing = times["compute"]
    exposed = subtract(times["exchange"], computing)
    copies = subtract(subtract(times["host copy"], computing), exposed)
    late, queued = _split_idle(works, others, trace.window)
    data = intersect(late, trace.waiting)
    between = [i for i in queued if i[1] - i[0] <= BETWEEN_US]
    whole = trace.window[1] - trace.window[0]
    return DeviceShares(
        device=name,
        computing=_percent(total(computing), whole),
        exchange=_percent(total(exposed), whole),
        exchange_hidden=_percent(total(intersect(times["exchange"], computing)), whole),
        host_copies=_percent(total(copies), whole),
        data=_percent(total(data), whole),
        launching=_percent(total(late) - total(data), whole),
        waiting=_percent(total(queued) - total(between), whole),
        between=_percent(total(between), whole),
    )


def _split_idle(works: Sequence[Work], others: Intervals, window: Interval) -> tuple[Intervals, Intervals]:
    """Tell idle time before the next work was queued from that after it.

    After the last work there is none that could tell: a GPU waits for the others while they work.

    Args:
        works: Of one device, sorted by begin.
        others: When other devices work.
        window: The traced time.
    """
    idle = gaps(union(work.time for work in works), window)
    first_at = {work.time[0]: work for work in reversed(works)}
    late: Intervals = []
    queued: Intervals = []
    for gap in idle:
        if (following := first_at.get(gap[1])) is None:
            late += subtract([gap], others)
            queued += intersect([gap], others)
            continue
        moment = _queued_at(gap, following)
        late += [(gap[0], moment)] if gap[0] < moment else []
        queued += [(moment, gap[1])] if moment < gap[1] else []
    return late, queued


def _queued_at(gap: Interval, following: Work) -> float:
    """Return the moment of a gap from which on the work after it was queued."""
    begin, end = gap
    if following.launched is None:
        return end
    called, returned = following.launched
    if called <= begin:
        return begin
    return end if end - returned <= NEAR_US else min(end, returned)


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole > 0 else 0.0
