"""``everygpu devices``: which GPUs there are, and which of them torch sees under which name."""

import json
import os
from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table

from everygpu.devices import nvml
from everygpu.devices.nvml import DeviceSample
from everygpu.devices.visible import VisibleDevice, visible_devices
from everygpu.units import format_size

_PIPED_WIDTH = 200  # rich takes 80 columns for a pipe, and would fold the UUIDs


@click.command("devices")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: sizes in bytes, hidden devices too.")
def list_devices(as_json: bool) -> None:
    """List the GPUs and torch's names for them."""
    visible = visible_devices()
    hidden = find_hidden(visible, nvml.sample_devices() or [])
    rows: list[VisibleDevice | DeviceSample] = [*visible, *hidden]
    console = Console(markup=False, emoji=False)
    if as_json:
        console.out(json.dumps({"devices": [describe(row) for row in rows]}, indent=2), highlight=False)
    elif not rows:
        console.out(f"No GPU on this machine that torch or an NVIDIA driver sees{_cpu_only_hint()}.")
        console.out("Everything runs on the CPU: device 'cpu'.")
    else:
        if not console.is_terminal:
            console.width = _PIPED_WIDTH
        console.print(build_table(rows))
        if hidden:
            console.out(explain_hidden(len(hidden)), highlight=False)


def find_hidden(visible: Sequence[VisibleDevice], samples: Sequence[DeviceSample]) -> list[DeviceSample]:
    """List the physical GPUs that torch can't use, in PCI order."""
    seen = {device.index for device in visible}
    return [sample for sample in samples if sample.index not in seen]


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


def describe(device: VisibleDevice | DeviceSample) -> dict[str, object]:
    """Make a record for JSON; ``device`` is null where torch can't use it."""
    return {
        "device": str(device.device) if isinstance(device, VisibleDevice) else None,
        "index": device.index,
        "name": device.name,
        "uuid": device.uuid,
        "total_memory_bytes": device.total_memory_bytes,
        "free_memory_bytes": device.free_memory_bytes,
        "utilization_pct": device.utilization_pct,
        "processes": [{"pid": pid, "used_memory_bytes": used} for pid, used in device.processes],
    }


def build_table(rows: Sequence[VisibleDevice | DeviceSample]) -> Table:
    """Lay the devices out for a terminal."""
    table = Table("torch", "GPU", "name", "UUID", "free / total", "busy", "processes", highlight=False)
    table.columns[3].overflow = "fold"
    for device in rows:
        table.add_row(
            str(device.device) if isinstance(device, VisibleDevice) else "-",
            "-" if device.index is None else str(device.index),
            device.name,
            device.uuid or "-",
            f"{_size(device.free_memory_bytes)} / {_size(device.total_memory_bytes)}",
            "-" if device.utilization_pct is None else f"{device.utilization_pct:g}%",
            "\n".join(f"{pid} ({_size(used)})" for pid, used in device.processes) or "-",
        )
    return table


def _size(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else format_size(num_bytes)
