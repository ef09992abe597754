"""How ``everygpu top`` lays out what it shows, in terminals of any width."""

import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from everygpu.cli.text import harmless
from everygpu.devices.figures import Figures, Run
from everygpu.devices.nvml import DeviceSample
from everygpu.devices.reserve import Holder
from everygpu.units import format_size

_BAR_WIDTH = 10
_GIB = 2**30
_PROCESS_WIDTH = 20
_VENDORS = ("NVIDIA ", "GeForce ")
_RUN_COLUMNS = {name: name for name in
                ("run", "pid", "GPUs", "steps", "steps/s", "data wait", "comm.", "slowest", "seen")}  # fmt: skip
_SHORT_RUN_COLUMNS = _RUN_COLUMNS | {"steps/s": "per s", "data wait": "data", "slowest": "slow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that is shown at one moment."""

    samples: Sequence[DeviceSample]
    """GPUs, and MIG instances after theirs."""
    names: Mapping[int, str]
    """Programs by pid."""
    holders: Mapping[str, Holder]
    runs: Sequence[Run]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a table leaves out to be narrower."""

    name_width: int | None = None
    """Longer names are cut; None for none. Tables with cut names have no bars and no vertical lines."""
    is_narrow: bool = False
    """Leave out columns: power and temperature of GPUs; process ids and ages of runs."""
    folds_processes: bool = False
    """Put what a process uses under its name."""


class Fitting:
    """The first of several layouts that fits the width it is shown in, else the last; chosen anew when that changes.

    Args:
        layouts: From the widest to the narrowest.
    """

    def __init__(self, layouts: Sequence[RenderableType]) -> None:
        self._layouts = layouts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        *_, last = self._layouts
        unlimited = options.update(width=10_000)
        width = options.max_width
        yield next((x for x in self._layouts if Measurement.get(console, unlimited, x).maximum <= width), last)


GPU_LAYOUTS = (
    Layout(),
    Layout(name_width=24),
    Layout(name_width=12),
    Layout(name_width=12, folds_processes=True),
    Layout(name_width=12, folds_processes=True, is_narrow=True),
)
RUN_LAYOUTS = (
    Layout(),
    Layout(name_width=24),
    Layout(name_width=16),
    Layout(name_width=12),
    Layout(name_width=24, is_narrow=True),
    Layout(name_width=14, is_narrow=True),
)


def build_view(view: View) -> RenderableType:
    """Lay it out for a terminal."""
    if not view.samples:
        gpus: RenderableType = Text("No NVIDIA GPU on this machine that its driver tells of.")
    else:
        gpus = Fitting([build_devices(view, layout) for layout in GPU_LAYOUTS])
    runs = Fitting([build_runs(view, layout) for layout in RUN_LAYOUTS])
    return Group(gpus, runs) if view.runs else Group(gpus)


def _make_table(columns: Sequence[str], layout: Layout) -> Table:
    is_wide = layout.name_width is None
    table = Table(highlight=False)
    if not is_wide:
        table = Table(highlight=False, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        is_cut = name in ("name", "run") and not is_wide
        table.add_column(name, no_wrap=is_cut, max_width=layout.name_width if is_cut else None)
    return table


def build_devices(view: View, layout: Layout) -> Table:
    """Lay out the GPUs."""
    figures = ("busy", "memory") if layout.is_narrow else ("busy", "memory", "power", "temp")
    table = _make_table(("GPU", "name", *figures, "processes"), layout)
    for sample in view.samples:
        cells = {
            "busy": _bar(sample.utilization_pct) if layout.name_width is None else _whole_percent(sample),
            "memory": _memory(sample, layout),
            "power": _power(sample, layout),
            "temp": "-" if sample.temperature_c is None else f"{sample.temperature_c:g} °C",
        }
        label, name = sample.label.removeprefix("GPU "), harmless(sample.name)
        shown = name if layout.name_width is None else _short_name(name)
        table.add_row(label, shown, *(cells[figure] for figure in figures), _processes(sample, view, layout))
    return table


def build_runs(view: View, layout: Layout) -> Table:
    """Lay out the runs."""
    is_wide = layout.name_width is None
    columns = _RUN_COLUMNS if is_wide else _SHORT_RUN_COLUMNS
    kept = {name: title for name, title in columns.items() if not (layout.is_narrow and name in ("pid", "seen"))}
    table = _make_table(list(kept.values()), layout)
    labels = {sample.uuid: sample.label for sample in view.samples}
    for pids, run in merge_ranks(view.runs):
        cells = _describe_run(pids, run, labels, is_wide)
        table.add_row(*(cells[name] for name in kept))
    return table


def _describe_run(pids: list[int], run: Run, labels: Mapping[str, str], is_wide: bool) -> dict[str, str]:
    figures, slowest = run.figures, run.figures.slowest_replica
    names = [harmless(labels.get(uuid, uuid)).removeprefix("GPU ") for uuid in figures.devices]
    return {
        "run": harmless(run.command),
        "pid": ",".join(map(str, pids)) if is_wide or len(pids) == 1 else f"{pids[0]}+{len(pids) - 1}",
        "GPUs": ",".join(names) if is_wide else _short_list(names),
        "steps": str(figures.num_steps),
        "steps/s": "-" if figures.steps_per_s is None else f"{figures.steps_per_s:.3g}",
        "data wait": _percent(figures.data_wait_pct),
        "comm.": _percent(figures.communication_pct),
        "slowest": names[slowest] if slowest is not None and 0 <= slowest < len(names) else "-",
        "seen": f"{run.age_s:.0f} s{' ago' if is_wide else ''}",
    }


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


def _processes(sample: DeviceSample, view: View, layout: Layout) -> str:
    holder = view.holders.get(sample.uuid)
    used_by = [_name_process(pid, used, view, layout) for pid, used in sample.processes]
    if holder is None or used_by:
        return "\n".join(used_by) or "-"
    reason = harmless(holder.reason)
    return textwrap.fill(reason, _PROCESS_WIDTH) if layout.folds_processes else reason


def _name_process(pid: int, used_bytes: int | None, view: View, layout: Layout) -> str:
    line = f"{pid} {harmless(os.path.basename(view.names.get(pid, '?')))}"
    used = "" if used_bytes is None else format_size(used_bytes)
    if layout.folds_processes:
        return "\n".join([_cut(line, _PROCESS_WIDTH), *([f"  {used}"] if used else [])])
    return f"{line} {used}".rstrip()


def _short_name(name: str) -> str:
    """Leave out what all have in common, and that a part is one: its number says so."""
    for vendor in _VENDORS:
        name = name.removeprefix(vendor)
    return name.replace(" MIG ", " ")


def _short_list(names: Sequence[str]) -> str:
    """Write 0-3 for 0,1,2,3, and 2 x cpu for cpu,cpu."""
    if len(names) > 1 and len(set(names)) == 1:
        return f"{len(names)} x {names[0]}"
    if len(names) > 2 and all(name.isdecimal() for name in names):
        numbers = sorted(map(int, names))
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(names)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _bar(pct: float | None) -> str:
    if pct is None:
        return "-"
    filled = round(pct / 100 * _BAR_WIDTH)
    return f"{'#' * filled}{'.' * (_BAR_WIDTH - filled)} {pct:3.0f}%"


def _whole_percent(sample: DeviceSample) -> str:
    return "-" if sample.utilization_pct is None else f"{sample.utilization_pct:.0f}%"


def _memory(sample: DeviceSample, layout: Layout) -> str:
    used, total = sample.used_memory_bytes, sample.total_memory_bytes
    if used is None or total is None:
        return "-"
    if layout.is_narrow:
        return f"{used / _GIB:.0f} / {total / _GIB:.0f} GiB"
    if layout.name_width is not None:
        return f"{used / _GIB:.1f} / {total / _GIB:.1f} GiB"
    return f"{_bar(100 * used / total)} {format_size(used)} / {format_size(total)}"


def _power(sample: DeviceSample, layout: Layout) -> str:
    if sample.power_w is None:
        return "-"
    has_limit = sample.power_limit_w is not None and layout.name_width is None
    return f"{sample.power_w:.0f}{f' / {sample.power_limit_w:.0f}' if has_limit else ''} W"


def _percent(pct: float | None) -> str:
    return "-" if pct is None else f"{pct:.1f}%"
