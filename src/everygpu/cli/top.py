"""``everygpu top``: each GPU's present load, the processes on it, and the speed of everygpu's runs."""

import json
import time
from dataclasses import asdict

import click

from everygpu.cli.live import interval_option, make_console, show_live
from everygpu.cli.top_view import View, build_view
from everygpu.devices import nvml
from everygpu.devices.figures import read_runs
from everygpu.devices.nvml import DeviceSample
from everygpu.devices.reserve import find_holders


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
