"""``everygpu bench``: everygpu and its peers on this machine's GPUs, measured side by side."""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from everygpu.bench.workloads import MODELS
from everygpu.child import python_command
from everygpu.cli.options import Seconds
from everygpu.cli.output import UserPath, make_console, plain, show_bar
from everygpu.errors import BenchmarkError, DeviceError, OptionError

_DEFAULT = ("gpt2", "resnet50", "resnet18")
PEERS = ("single", "dp", "ddp", "ours", "ours_ranks", "step")
_ON_CPU = ("single", "ddp", "ours", "step")
_NUM_CPU_REPLICAS = 2


@click.command("bench")
@click.option("--model", "models", multiple=True, metavar="NAME|MODULE:FUNCTION", help="Built-in or yours; repeatable.")
@click.option("--peer", "peers", multiple=True, type=click.Choice(PEERS), help="Row to measure; repeatable.")
@click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="Number of GPUs; all by default.")
@click.option("--cpu", is_flag=True, help="Use replicas on the CPU, to see everything run.")
@click.option("--rows", type=click.IntRange(min=1), metavar="N", help="Batch size per GPU; the model's by default.")
@click.option("--precision", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True, help="Autocast.")
@click.option("--compile", "compiled", is_flag=True, help="Compile the model in every row.")
@click.option("--rounds", "num_rounds", type=click.IntRange(min=3), default=3, show_default=True, help="Timed rounds.")
@click.option("--steps", "num_steps", type=click.IntRange(min=1), default=20, show_default=True, help="Steps a round.")
@click.option(
    "--timeout",
    type=Seconds(min=0, min_open=True, max=1e6),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit for a row.",
)
@click.option("--json", "json_file", type=UserPath(path_type=Path, dir_okay=False), help="Write all figures here.")
@click.option("--apart", hidden=True)
def bench(
    models: tuple[str, ...],
    peers: tuple[str, ...],
    gpus: int | None,
    cpu: bool,
    timeout: float,
    json_file: Path | None,
    apart: str | None,
    **conditions: Any,
) -> None:
    """Compare the speed of everygpu, DDP and others.

    \b
    Rows
      single      one GPU
      dp          torch.nn.DataParallel
      ddp         DistributedDataParallel, a process for each GPU
      ours        everygpu.DataParallel, one process
      ours_ranks  everygpu.DataParallel, a process for each GPU
      step        everygpu.TrainStep, one process

    Models: gpt2, resnet50, resnet18, bert, tiny; or MODULE:FUNCTION, a function without arguments that returns
    (model, loss, optimizer, batch), the batch as your DataLoader gives it to one GPU, or everygpu.bench.Batches([...])
    of several.
    """
    if apart is not None:
        _measure_apart(apart)
    for name in models:
        if ":" not in name and name not in MODELS:
            raise OptionError(f"No model {name!r}. Pass one of {', '.join(MODELS)}, or module:function: train:bench.")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise OptionError(f"No directory for {json_file}. Make it first.")
    device_type, num_devices = find_devices(gpus, cpu)
    on_cpu = device_type == "cpu"
    names, rows_of = models or (("tiny",) if on_cpu else _DEFAULT), peers or (_ON_CPU if on_cpu else PEERS)
    conditions |= {"device_type": device_type, "num_devices": num_devices}
    _measure_all(names, rows_of, timeout, conditions, json_file)


def _measure_all(
    models: tuple[str, ...],
    peers: tuple[str, ...],
    timeout: float,
    conditions: Mapping[str, Any],
    json_file: Path | None,
) -> None:
    """Measure a row for each model and way to train, and print it when it comes."""
    from everygpu.bench import report

    console, machine = make_console(10_000), report.describe_machine()
    on_cpu = conditions["device_type"] == "cpu"
    console.print(plain(report.describe_where(machine, conditions["num_devices"], on_cpu)))
    rows: list[dict[str, Any]] = []
    try:
        for model in models:
            earlier: list[dict[str, Any]] = []
            for peer in peers:
                with show_bar(f"measuring {model}: {peer}, row {len(rows) + 1} of {len(models) * len(peers)}"):
                    row = run_row(model, peer, timeout, conditions)
                earlier.append(row | {"efficiency": report.find_efficiency(row, earlier)})
                rows.append(earlier[-1])
                if len(earlier) == 1:
                    console.out(f"\n{model}\n{report.table_line([head for head, _ in report.COLUMNS])}")
                console.print(plain(report.describe_row(earlier[-1])))
    finally:
        if rows and json_file is not None:  # what was measured is kept, however it ends
            json_file.write_text(report.write_json(machine, rows), encoding="utf-8")
    if not any("ms" in row for row in rows):
        raise BenchmarkError("No row could be measured. The lines above say why.")


def _measure_apart(text: str) -> None:
    """Measure one row in this process, print it, and end though threads of a failed peer go on."""
    from everygpu.bench.rows import Conditions, measure_row

    conditions = Conditions(**json.loads(text))
    if ":" in conditions.model:
        sys.path.insert(0, os.getcwd())  # where the user's module is
    outcome = measure_row(conditions)
    click.echo(f"\n{json.dumps(outcome)}")  # the model may have printed something without an end of line
    os._exit(0)


def find_devices(num_gpus: int | None, cpu: bool) -> tuple[str, int]:
    """Decide on what to train: ``"cuda"`` or ``"cpu"``, and how many devices or replicas."""
    import torch

    there = torch.cuda.device_count() if not cpu and torch.cuda.is_available() else 0
    if not there:
        return "cpu", num_gpus or _NUM_CPU_REPLICAS
    if num_gpus is not None and num_gpus > there:
        raise DeviceError(f"Found {there} of {num_gpus} requested GPUs. `everygpu devices` lists them.")
    return "cuda", num_gpus or there


def run_row(model: str, peer: str, timeout: float, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a row in a process of its own; a hang or a failure is its result, but for a model that can't be made."""
    from everygpu.bench.timing import run_command

    row = {"model": model, "peer": peer, **conditions}
    record = json.dumps({**row, "started_s": time.time()})
    outcome = run_command(python_command("everygpu", "bench", "--apart", record), timeout)
    if "refused" in outcome:
        raise OptionError(outcome["refused"])
    return row | outcome
