"""``everygpu devices``: the GPUs, torch's name for each, and a choice among them."""

import json
import os
from collections.abc import Mapping, Sequence

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from everygpu.cli.filters import Filters, filter_options
from everygpu.cli.live import interval_option, make_console, show_live
from everygpu.cli.plan import Request, choose_gpus, read_request
from everygpu.cli.text import harmless
from everygpu.devices import nvml
from everygpu.devices.nvml import DeviceSample
from everygpu.devices.reserve import Holder, find_holders
from everygpu.devices.visible import VisibleDevice, visible_devices
from everygpu.units import format_size

Row = VisibleDevice | DeviceSample


@click.command("devices")
@click.option("--select", callback=read_request, metavar="N|auto|0,2", help="Only the GPUs that `run` would take.")
@filter_options
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "visible"]),
    default="table",
    show_default=True,
    help="'visible' is a value for CUDA_VISIBLE_DEVICES.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option("--watch", is_flag=True, help="Renew the table until Ctrl-C.")
@interval_option
def list_devices(
    select: Request | None, filters: Filters, form: str, as_json: bool, watch: bool, interval_s: float
) -> None:
    """List the GPUs and torch's names for them, or choose among them.

    JSON has sizes in bytes. `CUDA_VISIBLE_DEVICES=$(everygpu devices --select 2 --format visible)` chooses for
    a program that isn't run by `everygpu run`; nothing is reserved.
    """
    form = "json" if as_json else form
    if watch and form != "table":
        raise click.UsageError("--watch renews the table: leave out the format.")
    if filters.are_given and select is None:
        select = Request()
    console = make_console()
    if form == "visible":
        console.out(",".join(gpu.uuid for gpu in choose_now(select or Request(), filters)), highlight=False)
    elif form == "json":
        records = [describe(row, holders) for rows, holders in [find_rows(select, filters)] for row in rows]
        console.out(json.dumps({"devices": records}, indent=2), highlight=False)
    elif watch:
        show_live(lambda: build_view(select, filters), interval_s)
    else:
        console.print(build_view(select, filters))


def choose_now(select: Request, filters: Filters) -> list[DeviceSample]:
    """Take the GPUs that ``everygpu run`` would take now, without loading torch.

    Raises:
        DeviceError: too few fit.
    """
    demand = filters.demand(select.num_asked)
    return choose_gpus(nvml.sample_devices() or [], select, demand, os.environ, find_holders())


def find_rows(select: Request | None, filters: Filters) -> tuple[list[Row], dict[str, Holder]]:
    """List what torch sees, then what it doesn't; or what is selected, in the order of the choice."""
    samples = nvml.sample_devices() or []
    visible = visible_devices()
    holders = find_holders()
    if select is None:
        return [*visible, *find_hidden(visible, samples)], holders
    by_uuid = {device.uuid: device for device in visible}
    demand = filters.demand(select.num_asked)
    chosen = choose_gpus(samples, select, demand, os.environ, holders)
    return [by_uuid.get(sample.uuid, sample) for sample in chosen], holders


def build_view(select: Request | None, filters: Filters) -> RenderableType:
    """Make the table and what has to be said about it."""
    rows, holders = find_rows(select, filters)
    if not rows:
        none = f"No GPU on this machine that torch or an NVIDIA driver sees{_cpu_only_hint()}."
        return Text(f"{none}\nEverything runs on the CPU: device 'cpu'.")
    # Of the instances of a GPU, CUDA uses one: the others are no cause for concern.
    seen = {row.index for row in rows if isinstance(row, VisibleDevice)}
    num_hidden = len({row.index for row in rows} - seen)
    notes = [Text(explain_hidden(num_hidden))] if num_hidden and select is None else []
    return Group(build_table(rows, holders), *notes)


def find_hidden(visible: Sequence[VisibleDevice], samples: Sequence[DeviceSample]) -> list[DeviceSample]:
    """List the physical GPUs, and MIG instances, that torch can't use, in PCI order."""
    seen = {device.uuid for device in visible}
    parts = [part for sample in samples for part in sample.mig_instances or (sample,)]
    return [part for part in parts if part.uuid not in seen]


def explain_hidden(num_hidden: int) -> str:
    """Say why torch doesn't use some GPUs."""
    them = "1 GPU is" if num_hidden == 1 else f"{num_hidden} GPUs are"
    if _cpu_only_hint():
        return f"{them} out of torch's reach{_cpu_only_hint()}: install a CUDA build."
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return f"{them} out of torch's reach: check that the driver fits torch's CUDA."
    return f"{them} hidden by CUDA_VISIBLE_DEVICES={text!r}."


def _cpu_only_hint() -> str:
    import torch

    built_for_gpus = torch.version.cuda or torch.version.hip
    return "" if built_for_gpus else f" (torch {torch.__version__} is built without CUDA)"


def describe(device: Row, holders: Mapping[str, Holder]) -> dict[str, object]:
    """Make a record for JSON; ``device`` is null where torch can't use it."""
    holder = holders.get(device.uuid or "")
    return {
        "device": str(device.device) if isinstance(device, VisibleDevice) else None,
        "index": device.index,
        "name": device.name,
        "uuid": device.uuid,
        "total_memory_bytes": device.total_memory_bytes,
        "free_memory_bytes": device.free_memory_bytes,
        "utilization_pct": device.utilization_pct,
        "processes": [{"pid": pid, "used_memory_bytes": used} for pid, used in device.processes],
        "reserved_by": None if holder is None else {"pid": holder.pid, "command": holder.command},
    }


def build_table(rows: Sequence[Row], holders: Mapping[str, Holder]) -> Table:
    """Lay the devices out for a terminal."""
    table = Table("torch", "GPU", "name", "UUID", "free / total", "busy", "processes", highlight=False)
    table.columns[3].overflow = "fold"
    for device in rows:
        holder = holders.get(device.uuid or "")
        used_by = [f"{pid} ({format_size(used)})" for pid, used in device.processes]
        table.add_row(
            str(device.device) if isinstance(device, VisibleDevice) else "-",
            _number(device),
            harmless(device.name),
            harmless(device.uuid or "-"),
            f"{format_size(device.free_memory_bytes)} / {format_size(device.total_memory_bytes)}",
            "-" if device.utilization_pct is None else f"{device.utilization_pct:g}%",
            "\n".join([*used_by, *([] if holder is None else [harmless(holder.reason)])]) or "-",
        )
    return table


def _number(device: Row) -> str:
    if isinstance(device, DeviceSample):
        return device.label.removeprefix("GPU ")
    return "-" if device.index is None else str(device.index)
