"""What to do about the largest share of time in which nothing is computed."""

from collections.abc import Sequence
from statistics import fmean

from everygpu.tracing.events import Trace
from everygpu.tracing.shares import DeviceShares, HostShares

SMALL_PCT = 5.0
"""A loss below this is not worth a change."""

_DATA = (
    "Load ahead: `everygpu.tune_workers(loader)` measures how many workers the DataLoader needs, and "
    "everygpu.Feeder has batches on the devices before the model asks."
)
_DATA_OF_FEEDER = (
    "`everygpu.tune_workers(loader)` measures how many workers the DataLoader needs; a larger prefetch helps where "
    "batches come unevenly."
)
_EXCHANGE = (
    "Send less often or beside the backward: everygpu.TrainStep does the latter; accumulate=2 or more rows a batch "
    "mean fewer exchanges."
)
_HOST_COPIES = (
    "Copy ahead: everygpu.Feeder copies batches from pinned memory beside the computation; read losses less often."
)
_WAITING = (
    "Work is queued that waits for another GPU or stream: the trace shows for which; split='auto' gives slower GPUs "
    "fewer rows."
)
_BETWEEN = (
    "Kernels are so short that beginning them takes long: torch.compile makes fewer, and more rows a batch make each "
    "longer."
)
_LAUNCHING = (
    "The CPU doesn't launch fast enough: everygpu.TrainStep launches a step as one CUDA graph, torch.compile launches "
    "fewer kernels, and more rows a batch make each longer."
)
_NOT_RECORDED = (
    "The CPU doesn't launch fast enough, and TrainStep launches no CUDA graph here: its log line says why; "
    "compile=True launches fewer kernels, and more rows a batch make each longer."
)
_AROUND_GRAPHS = (
    "The CPU is late though CUDA graphs are launched: look in the trace for what runs between them, such as logging or "
    "work on batches."
)


def advise_gpus(shares: Sequence[DeviceShares], trace: Trace, *, by_train_step: bool) -> str:
    """Name the largest loss over all GPUs, and the first thing to do about it.

    Args:
        shares: Of each GPU.
        trace: What they were summed from.
        by_train_step: Whether the steps were calls of a ``TrainStep``.
    """
    losses = {
        "exchange between GPUs": (fmean([s.exchange for s in shares]), _EXCHANGE),
        "copies from and to the host": (fmean([s.host_copies for s in shares]), _HOST_COPIES),
        "waiting for data": (fmean([s.data for s in shares]), _advise_loading(trace)),
        "waiting for launches": (fmean([s.launching for s in shares]), _advise_launching(trace, by_train_step)),
        "waiting for other GPUs or streams": (fmean([s.waiting for s in shares]), _WAITING),
        "time between kernels": (fmean([s.between for s in shares]), _BETWEEN),
    }
    name, (pct, advice) = max(losses.items(), key=lambda item: item[1][0])
    if pct < SMALL_PCT:
        return (
            "The GPUs compute nearly all the time: what is left is less work a step, as by precision='bf16' or "
            "torch.compile."
        )
    return f"The largest loss is {name}, {pct:.0f}%. {advice}"


def advise_host(shares: HostShares, trace: Trace) -> str:
    """Name what to do where everything runs on the CPU; as ``advise_gpus``."""
    if shares.data >= max(SMALL_PCT, shares.python):
        return f"The largest loss is waiting for data, {shares.data:.0f}%. {_advise_loading(trace)}"
    if shares.python >= SMALL_PCT:
        return (
            f"The largest loss is Python between the operators, {shares.python:.0f}%. More rows a batch make operators "
            "longer, and torch.compile joins them."
        )
    return "The CPU is in operators nearly all the time: what is left is less work a step, or a GPU."


def _advise_loading(trace: Trace) -> str:
    return _DATA_OF_FEEDER if trace.has_feeder else _DATA


def _advise_launching(trace: Trace, by_train_step: bool) -> str:
    num_syncs = trace.num_syncs / max(1, trace.num_steps)
    waits = (
        f" The script waits for a GPU {num_syncs:.0f} times a step, as .item(), .cpu() and printing a loss do: do so "
        "less often."
        if num_syncs >= 1
        else ""
    )
    if trace.launches_graphs:
        return _AROUND_GRAPHS + waits
    return (_NOT_RECORDED if by_train_step else _LAUNCHING) + waits
