"""``everygpu devices``: the GPUs, torch's name for each, and a choice among them."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import click
from rich.table import Table
from rich.text import Text

from everygpu.cli.choose import choose_gpus
from everygpu.cli.options import Filters, filter_options, read_request
from everygpu.cli.output import harmless, make_console
from everygpu.devices import nvml
from everygpu.devices.nvml import DeviceSample
from everygpu.devices.reserve import Holder, find_holders
from everygpu.devices.select import Demand
from everygpu.devices.visible import predict_names, visible_devices
from everygpu.units import format_size

INTERVAL_S = 2.0
Row = tuple[str | None, DeviceSample]
"""torch's name for a device, None where it can't use it; and the device."""


@click.command("devices")
@click.option("--select", "request", callback=read_request, metavar="N|auto|0,2", help="Only what `run` would take.")
@filter_options
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "visible"]),
    default="table",
    show_default=True,
    help="'visible' is a value for CUDA_VISIBLE_DEVICES.",
)
@click.option("--json", "form", flag_value="json", help="The same as --format json.")
@click.option("--torch", "ask_torch", is_flag=True, help="Ask torch, for GPUs of other makers too; takes seconds.")
@click.option("--watch", is_flag=True, help="Show use and memory until Ctrl-C. nvitop shows more.")
def list_devices(request: Demand | None, filters: Filters, form: str, ask_torch: bool, watch: bool) -> None:
    """List the GPUs and torch's names for them, or choose among them.

    JSON has sizes in bytes. `CUDA_VISIBLE_DEVICES=$(everygpu devices --select 2 --format visible)` chooses GPUs for
    another program, and reserves none.
    """
    if watch and form != "table":
        raise click.UsageError("--watch shows a table. Leave out the format.")
    if request is None and (filters or form == "visible"):
        request = Demand()

    console = make_console()
    rows, holders = find_rows(request, filters, ask_torch)
    if form == "json":
        console.out(json.dumps({"devices": [describe(row, holders) for row in rows]}, indent=2))
    elif form == "visible":
        console.out(",".join(gpu.uuid or "" for _, gpu in rows))
    elif not rows:
        console.print("No GPU found." if ask_torch else "No NVIDIA GPU found. For other accelerators pass --torch.")
    elif not watch:
        console.print(build_table(rows, holders))
        for note in () if request else explain_hidden(rows):
            console.print(Text(note))
    with suppress(KeyboardInterrupt):  # Ctrl-C is how one leaves it
        while watch and rows:
            table = build_table(*find_rows(request, filters, ask_torch), with_uuids=False)
            console.clear()  # on a terminal
            console.print(table)
            time.sleep(INTERVAL_S)


def find_rows(request: Demand | None, filters: Filters, ask_torch: bool) -> tuple[list[Row], dict[str, Holder]]:
    """List what torch sees, then what it doesn't; or what is selected, in the order of the choice."""
    samples, holders = nvml.sample_devices() or [], find_holders()
    visible = visible_devices() if ask_torch else []
    predicted = {} if ask_torch else predict_names(os.environ, samples)
    names = {gpu.uuid: str(gpu.device) for gpu in visible} or predicted
    if request is not None:
        chosen = choose_gpus(samples, replace(request, **filters), os.environ, holders)
        return [(names.get(gpu.uuid or ""), gpu) for gpu in chosen], holders
    by_uuid = {gpu.uuid: gpu for gpu in samples}
    seen: list[Row] = [(str(gpu.device), gpu) for gpu in visible]
    seen += [(name, by_uuid[uuid]) for uuid, name in predicted.items()]
    return [*seen, *((None, gpu) for gpu in samples if gpu.uuid is None or gpu.uuid not in names)], holders


def explain_hidden(rows: Sequence[Row]) -> list[str]:
    """Say why torch doesn't use some GPUs."""
    lost = nvml.explain_lost(gpu for _, gpu in rows)
    num_hidden = sum(name is None and gpu.fault is None for name, gpu in rows)
    notes = list(map(harmless, lost))
    if any(name == "cuda:?" for name, _ in rows):
        unlike = "CUDA numbers unlike GPUs fastest first: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or pass --torch."
        notes.append("Where a GPU is lost, only torch knows CUDA's numbers: pass --torch." if lost else unlike)
    if num_hidden:
        them = "1 GPU is" if num_hidden == 1 else f"{num_hidden} GPUs are"
        text = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f"{them} hidden by CUDA_VISIBLE_DEVICES={text!r}."
        notes.append(f"{them} out of torch's reach. `everygpu doctor` says why." if text is None else hidden)
    return notes


def describe(row: Row, holders: Mapping[str, Holder]) -> dict[str, object]:
    """Make a record for JSON; ``device`` is null where torch can't use it."""
    name, device = row
    holder = holders.get(device.uuid or "")
    keys = ("index", "name", "uuid", "total_memory_bytes", "free_memory_bytes", "utilization_pct", "fault")
    return {
        "device": name,
        **{key: getattr(device, key) for key in keys},
        "processes": [{"pid": pid, "used_memory_bytes": used} for pid, used in device.processes],
        "reserved_by": None if holder is None else {"pid": holder.pid, "command": holder.command},
    }


def build_table(rows: Sequence[Row], holders: Mapping[str, Holder], *, with_uuids: bool = True) -> Table:
    """Lay the devices out for a terminal: use, memory, and the runs and programs on each."""
    names = nvml.name_processes(sorted({pid for _, device in rows for pid, _ in device.processes}))
    table = Table("torch", "GPU", "name", "free / total", "busy", "used by", highlight=False)
    if with_uuids:
        table.add_column("UUID", overflow="fold")
    for name, device in rows:
        holder = holders.get(device.uuid or "")
        used_by = [harmless(text) for text in (device.fault, holder and holder.reason) if text]
        for pid, used in device.processes:
            used_by.append(harmless(f"{os.path.basename(names.get(pid, '?'))} {pid} ({format_size(used)})"))
        table.add_row(
            name or "-",
            "-" if device.index is None else str(device.index),
            harmless(f"{device.name} (MIG mode)" if device.is_mig else device.name),
            f"{format_size(device.free_memory_bytes)} / {format_size(device.total_memory_bytes)}",
            "-" if device.utilization_pct is None else f"{device.utilization_pct:g}%",
            ("\n" if with_uuids else ", ").join(used_by) or "-",
            *([harmless(device.uuid or "-")] if with_uuids else []),
        )
    return table
