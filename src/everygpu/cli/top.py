"""``everygpu top``: each GPU's present load, the processes on it, and the speed of everygpu's runs."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from everygpu.cli.live import interval_option, make_console, show_live
from everygpu.cli.text import harmless
from everygpu.devices import nvml
from everygpu.devices.figures import Figures, Run, read_runs
from everygpu.devices.nvml import DeviceSample
from everygpu.devices.reserve import Holder, find_holders
from everygpu.units import format_size

_BAR_WIDTH = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that is shown at one moment."""

    samples: Sequence[DeviceSample]
    """GPUs, and MIG instances after theirs."""
    names: Mapping[int, str]
    """Programs by pid."""
    holders: Mapping[str, Holder]
    runs: Sequence[Run]


@click.command("top")
@click.option("--once", is_flag=True, help="Show it once.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, once.")
@interval_option
def watch_gpus(once: bool, as_json: bool, interval_s: float) -> None:
    """Watch the GPUs, and the runs that use them.

    Runs of everygpu show their steps a second, how much of the time they wait for data, how much they spend on
    communication alone, and the replica the others wait for. Ctrl-C ends it.
    """
    console = make_console()
    if as_json:
        console.out(json.dumps(describe(look()), indent=2), highlight=False)
    elif once:
        console.print(build_view(look()))
    else:
        show_live(lambda: build_view(look()), interval_s)


def look() -> View:
    """Ask the driver and read what runs have published."""
    gpus = nvml.sample_devices() or []
    samples = [part for gpu in gpus for part in (gpu, *(gpu.mig_instances or ()))]
    pids = sorted({pid for sample in samples for pid, _ in sample.processes})
    names = nvml.name_processes(pids) if pids else {}
    return View(samples=samples, names=names, holders=find_holders({}), runs=read_runs())


def describe(view: View) -> dict[str, object]:
    """Make a record for JSON."""
    return {
        "time_s": round(time.time(), 3),
        "devices": [_describe_device(sample, view) for sample in view.samples],
        "runs": [asdict(run) for run in view.runs],
    }


def _describe_device(sample: DeviceSample, view: View) -> dict[str, object]:
    shown = asdict(sample)
    del shown["mig_instances"]
    holder = view.holders.get(sample.uuid)
    processes = [{"pid": pid, "name": view.names.get(pid), "used_memory_bytes": used} for pid, used in sample.processes]
    return shown | {"processes": processes, "reserved_by": None if holder is None else asdict(holder)}


def build_view(view: View) -> RenderableType:
    """Lay it out for a terminal."""
    if not view.samples:
        gpus: RenderableType = Text("No NVIDIA GPU on this machine that its driver tells of.")
    else:
        gpus = build_devices(view)
    return Group(gpus, build_runs(view)) if view.runs else Group(gpus)


def build_devices(view: View) -> Table:
    """Lay out the GPUs."""
    table = Table("GPU", "name", "busy", "memory", "power", "temp", "processes", highlight=False)
    for sample in view.samples:
        holder = view.holders.get(sample.uuid)
        used_by = [_name_process(pid, used, view) for pid, used in sample.processes]
        table.add_row(
            sample.label.removeprefix("GPU "),
            harmless(sample.name),
            _bar(sample.utilization_pct),
            _memory(sample),
            _power(sample),
            "-" if sample.temperature_c is None else f"{sample.temperature_c:g} °C",
            "\n".join([*used_by, *([harmless(holder.reason)] if holder is not None and not used_by else [])]) or "-",
        )
    return table


def build_runs(view: View) -> Table:
    """Lay out the runs."""
    labels = {sample.uuid: sample.label for sample in view.samples}
    table = Table("run", "pid", "GPUs", "steps", "steps/s", "data wait", "comm.", "slowest", "seen", highlight=False)
    for pids, run in merge_ranks(view.runs):
        figures, slowest = run.figures, run.figures.slowest_replica
        names = [harmless(labels.get(uuid, uuid)).removeprefix("GPU ") for uuid in figures.devices]
        table.add_row(
            harmless(run.command),
            ",".join(map(str, pids)),
            ",".join(names),
            str(figures.num_steps),
            "-" if figures.steps_per_s is None else f"{figures.steps_per_s:.3g}",
            _percent(figures.data_wait_pct),
            _percent(figures.communication_pct),
            names[slowest] if slowest is not None and 0 <= slowest < len(names) else "-",
            f"{run.age_s:.0f} s ago",
        )
    return table


def merge_ranks(runs: Sequence[Run]) -> list[tuple[list[int], Run]]:
    """Make one run of the processes of this box that train together, with the ids of all.

    It is as far and as fast as the last of them, and waits for data as long as the one that waits most.
    """
    together: dict[str, list[Run]] = {}
    for run in runs:
        together.setdefault(run.meets_at or f"process {run.pid}", []).append(run)
    return [([run.pid for run in ranks], _merge(ranks)) for ranks in together.values()]


def _merge(ranks: list[Run]) -> Run:
    if len(ranks) == 1:
        return ranks[0]
    found = [run.figures for run in ranks]
    figures = Figures(
        devices=tuple(device for f in found for device in f.devices),
        num_steps=min(f.num_steps for f in found),
        steps_per_s=min((f.steps_per_s for f in found if f.steps_per_s is not None), default=None),
        data_wait_pct=max((f.data_wait_pct for f in found if f.data_wait_pct is not None), default=None),
        communication_pct=max((f.communication_pct for f in found if f.communication_pct is not None), default=None),
    )
    return replace(ranks[0], figures=figures, age_s=max(run.age_s for run in ranks))


def _name_process(pid: int, used_bytes: int | None, view: View) -> str:
    used = "" if used_bytes is None else f" {format_size(used_bytes)}"
    return f"{pid} {harmless(os.path.basename(view.names.get(pid, '?')))}{used}"


def _bar(pct: float | None) -> str:
    if pct is None:
        return "-"
    filled = round(pct / 100 * _BAR_WIDTH)
    return f"{'#' * filled}{'.' * (_BAR_WIDTH - filled)} {pct:3.0f}%"


def _memory(sample: DeviceSample) -> str:
    if sample.used_memory_bytes is None or sample.total_memory_bytes is None:
        return "-"
    pct = 100 * sample.used_memory_bytes / sample.total_memory_bytes
    return f"{_bar(pct)} {format_size(sample.used_memory_bytes)} / {format_size(sample.total_memory_bytes)}"


def _power(sample: DeviceSample) -> str:
    if sample.power_w is None:
        return "-"
    limit = "" if sample.power_limit_w is None else f" / {sample.power_limit_w:.0f}"
    return f"{sample.power_w:.0f}{limit} W"


def _percent(pct: float | None) -> str:
    return "-" if pct is None else f"{pct:.1f}%"
