"""``everygpu bench``: everygpu and its peers on this machine's GPUs, measured side by side."""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from everygpu.bench.workloads import DEFAULT, MODELS
from everygpu.cli.options import Seconds
from everygpu.cli.output import UserPath, make_console, plain, show_bar
from everygpu.errors import BenchmarkError, DeviceError, OptionError

ONE_GPU = ("bare", "graph", "compiled", "loop", "step", "step_compiled")
WAYS = ("bare", "dp", "ddp", "ddp_compiled", "fsdp2", "loop", "step", "step_compiled", "loop_ranks", "step_ranks")
_ON_CPU = ("bare", "ddp", "loop", "step")
_NUM_CPU_REPLICAS = 2


@click.command("bench")
@click.option("--model", "models", multiple=True, metavar="NAME|MODULE:FUNCTION", help="Built-in or yours; repeatable.")
@click.option(
    "--way",
    "ways",
    multiple=True,
    type=click.Choice(tuple(dict.fromkeys((*ONE_GPU, *WAYS)))),
    metavar="WAY",
    help="Row to measure; repeatable.",
)
@click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="Number of GPUs; all by default.")
@click.option("--cpu", is_flag=True, help="Use replicas on the CPU, to see everything run.")
@click.option("--rows", type=click.IntRange(min=1), metavar="N", help="Batch size per GPU; the model's by default.")
@click.option("--precision", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True, help="Autocast.")
@click.option("--rounds", "num_rounds", type=click.IntRange(min=3), default=5, show_default=True, help="Timed rounds.")
@click.option(
    "--seconds",
    "round_s",
    type=Seconds(min=0, max=1e6),
    default=0.5,
    show_default=True,
    metavar="SECONDS",
    help="Time of a round.",
)
@click.option(
    "--timeout",
    type=Seconds(min=0, min_open=True, max=1e6),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit for a row.",
)
@click.option(
    "--limit",
    type=Seconds(min=0, min_open=True, max=1e9),
    metavar="SECONDS",
    help="End before so many have passed; the same command with --results goes on.",
)
@click.option("--results", type=UserPath(path_type=Path, dir_okay=False), help="File of rows, which are added to it.")
@click.option("--commit", metavar="NAME", help="The code's state in --results; git's commit or the version by default.")
@click.option("--row", hidden=True)
def bench(
    models: tuple[str, ...],
    ways: tuple[str, ...],
    gpus: int | None,
    cpu: bool,
    rows: int | None,
    precision: str,
    timeout: float,
    limit: float | None,
    results: Path | None,
    commit: str | None,
    row: str | None,
    **conditions: Any,
) -> None:
    """Compare the speed of everygpu, DDP and others.

    \b
    Ways
      bare           one GPU, eager
      graph          one GPU, a CUDA graph of the whole step, by hand
      compiled       one GPU, torch.compile(mode="reduce-overhead")
      dp             torch.nn.DataParallel
      ddp            DistributedDataParallel, a process for each GPU
      ddp_compiled   the same, compiled
      fsdp2          torch's fully_shard, a process for each GPU
      loop           everygpu.DataParallel, one process
      step           everygpu.TrainStep, one process
      step_compiled  the same, compiled
      loop_ranks     everygpu.DataParallel, a process for each GPU
      step_ranks     everygpu.TrainStep, a process for each GPU

    Models: gpt2, bert, unet, moe, tiny; with torchvision resnet50, resnet18, vit, convnext; with transformers llama.
    Or MODULE:FUNCTION, a function without arguments that returns (model, loss, optimizer, batch), the batch as your
    DataLoader gives it to one GPU, or everygpu.bench.Batches([...]) of several.

    Rows that --results has are printed, not measured again.
    """
    if row is not None:
        _measure_here(row)
    for name in models:
        if ":" not in name and name not in MODELS:
            raise OptionError(f"No model {name!r}. Pass one of {', '.join(MODELS)}, or module:function: train:bench.")
    if results is not None and not results.absolute().parent.is_dir():
        raise OptionError(f"No directory for {results}. Make it first.")
    device_type, num_devices = find_devices(gpus, cpu)
    on_cpu = device_type == "cpu"
    from everygpu.bench import report
    from everygpu.bench.runner import find_commit

    common: dict[str, Any] = {"commit": commit or find_commit(), "card": report.find_card(device_type), "rows": rows,
              "precision": precision, "versions": report.describe_versions()}  # fmt: skip
    make_console(10_000).print(plain(report.describe_where(common["card"], common["versions"], num_devices)))
    names = models or (("tiny",) if on_cpu else DEFAULT)
    chosen = ways or (_ON_CPU if on_cpu else ONE_GPU if num_devices == 1 else WAYS)
    keys = [{**common, "model": name, "way": way, "num_devices": count_devices(way, num_devices)}
            for name in names for way in chosen]  # fmt: skip
    _measure_all(
        keys, results, {"device_type": device_type, **conditions}, timeout, math.inf if limit is None else limit
    )


def _measure_all(
    keys: Sequence[dict[str, Any]], path: Path | None, conditions: Mapping[str, Any], timeout: float, limit_s: float
) -> None:
    """Measure a row for each model and way to train, and print it when it comes."""
    from everygpu.bench import report
    from everygpu.bench.runner import Results, measure_rows

    console, results, model = make_console(10_000), Results(path), ""
    rows = measure_rows(keys, results, conditions, timeout, limit_s)
    found: list[dict[str, Any]] = []
    for key in keys:
        with show_bar(f"measuring {key['model']}: {key['way']}, row {len(found) + 1} of {len(keys)}"):
            row = next(rows, None)
        if row is None:
            console.print(plain(f"The time is up after {len(found)} of {len(keys)} rows. The same command goes on."))
            return
        if row["model"] != model:
            model = row["model"]
            console.out(f"\n{model}\n{report.table_line([head for head, _ in report.COLUMNS])}")
        found.append(row)
        console.print(plain(report.describe_row(row, results.rows)))
    if not any("ms" in row for row in found):
        raise BenchmarkError("No row could be measured. The lines above say why.")


def _measure_here(text: str) -> None:
    """Measure one row in this process, print it, and end though threads of a failed peer go on."""
    from everygpu.bench.measure import Conditions, measure_row

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


def count_devices(way: str, num_there: int) -> int:
    """Count the devices that a way trains on.

    Raises:
        OptionError: it needs several.
    """
    from everygpu.bench.ways import WAYS

    num_devices = WAYS[way].num_devices(num_there)
    if not num_devices:
        raise OptionError(f"--way {way} trains on two GPUs or more. Leave it out, or pass --gpus 2.")
    return num_devices
