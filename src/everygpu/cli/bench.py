"""``everygpu bench``: everygpu and its peers on this machine's GPUs, measured side by side."""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from everygpu.child import python_command
from everygpu.cli.options import FiniteRange
from everygpu.cli.output import make_console
from everygpu.cli.paths import UserPath
from everygpu.cli.progress_bar import Bar, show_bar
from everygpu.cli.text import harmless
from everygpu.errors import BenchmarkError, DeviceError, OptionError

_OURS = ("gpt2", "resnet50", "resnet18")
_NUM_CPU_REPLICAS = 2
MAX_TIMEOUT_S = 1_000_000
"""Eleven days; the system counts milliseconds in 32 bits."""

_ON_CPU = (
    "No GPU: replicas on the CPU, which share its cores. This shows that everything runs, and says nothing about speed."
)


@click.command("bench")
@click.option(
    "--model", "models", multiple=True, metavar="NAME|MODULE:FUNCTION", help="Ours or yours; again for more models."
)
@click.option("--peer", "peers", multiple=True, metavar="ROW", help="Only this way to train; again for more.")
@click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="How many, from the first; all by default.")
@click.option("--cpu", is_flag=True, help="Replicas on the CPU, to try things.")
@click.option("--rows", type=click.IntRange(min=1), metavar="N", help="Rows for each GPU; the model's own by default.")
@click.option("--precision", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True)
@click.option(
    "--rounds", "num_rounds", type=click.IntRange(min=3), default=3, show_default=True, help="Rounds that are timed."
)
@click.option(
    "--steps",
    "num_steps",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Steps in each round, rounded up to whole cycles through the batches.",
)
@click.option(
    "--timeout",
    type=FiniteRange(min=0, min_open=True, max=MAX_TIMEOUT_S),
    default=300.0,
    show_default=True,
    help="Seconds that a row may take.",
)
@click.option("--json", "json_file", type=UserPath(path_type=Path, dir_okay=False), help="Write all figures here.")
@click.option(
    "--report",
    "report_file",
    type=UserPath(path_type=Path, dir_okay=False),
    help="Write tables here: .html, with plots, or Markdown.",
)
@click.option("--plot", "plot_file", type=UserPath(path_type=Path, dir_okay=False), help="Draw here: .png, .svg, .pdf.")
@click.option(
    "--from-json",
    "measured",
    type=UserPath(path_type=Path, exists=True, dir_okay=False),
    help="Measure nothing: write the report or plot of a file that --json has written.",
)
@click.option("--commit", hidden=True)
@click.option("--apart", hidden=True)
def compare_ways(
    models: tuple[str, ...],
    peers: tuple[str, ...],
    gpus: int | None,
    cpu: bool,
    timeout: float,
    json_file: Path | None,
    report_file: Path | None,
    plot_file: Path | None,
    measured: Path | None,
    commit: str | None,
    apart: str | None,
    **conditions: Any,
) -> None:
    """Train a model in all the ways there are, side by side, and print how fast each is.

    Rows: single, single_compiled, single_graph (one GPU: eager, compiled, one CUDA graph a step), dp
    (torch.nn.DataParallel), ddp, ddp_compiled (DistributedDataParallel), ours, ours_compiled, ours_graphs,
    ours_graphs_compiled, ours_ranks (everygpu.DataParallel), step, step_compiled, step_uncaptured,
    step_ranks, step_ranks_of_2 (everygpu.TrainStep). Each runs in a process of its own, those of ranks
    in one for each GPU, or for every two.

    Models: gpt2, gpt2-xl, resnet50, resnet18, efficientnet, vit, unet, bert, llama, lstm, moe, tiny; or
    MODULE:FUNCTION of your own: a function without arguments that returns (model, loss, optimizer, batch), the batch
    as your DataLoader gives it to one GPU. Instead of one batch it may return everygpu.bench.Batches([...]), which all
    rows cycle through in this order: each five times before anything is timed, then whole cycles in every round.
    """
    if apart is not None:
        _measure_apart(apart)
    from everygpu.bench import report
    from everygpu.bench.peers import PEERS, WITHOUT_GPUS

    _check_files(json_file, report_file, plot_file)
    if measured is not None:
        _write_again(measured, report_file, plot_file)
        return
    device_type, num_devices = find_devices(gpus, cpu)
    _check_names("--peer", peers, list(PEERS))
    on_cpu = device_type == "cpu"
    fitting = tuple(name for name, peer in PEERS.items() if num_devices % peer.devices_per_process == 0)
    names = models or (("tiny",) if on_cpu else _OURS), peers or (WITHOUT_GPUS if on_cpu else fitting)
    conditions |= {"device_type": device_type, "num_devices": num_devices}
    console, machine = make_console(), report.describe_machine(commit)
    console.out(describe(machine, num_devices, on_cpu), highlight=False)
    rows: list[dict[str, Any]] = []
    try:
        with show_bar("measuring", len(names[0]) * len(names[1]), unit="rows") as bar:
            _measure_all(console, bar, *names, timeout, conditions, rows)
    finally:
        if rows:  # what was measured is kept, however it ends
            _write(machine, report.add_efficiency(rows), json_file, report_file, plot_file)
    if not any("ms" in row for row in rows):
        raise BenchmarkError("bench: at least one row must be measured, got none. The lines above say why.")


def _write(
    machine: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    json_file: Path | None,
    report_file: Path | None,
    plot_file: Path | None,
) -> None:
    from everygpu.bench import page, plot, report

    if json_file is not None:
        json_file.write_text(report.write_json(machine, rows), encoding="utf-8")
    if report_file is not None:
        write = page.write_page if report_file.suffix in (".html", ".htm") else report.write_markdown
        report_file.write_text(write(machine, rows), encoding="utf-8")
    if plot_file is not None:
        plot.draw(rows, plot_file)


def _write_again(measured: Path, report_file: Path | None, plot_file: Path | None) -> None:
    """Write the report of rows that were measured before, perhaps on another machine."""
    from everygpu.bench.report import read_json

    if report_file is None and plot_file is None:
        raise OptionError("bench: --from-json measures nothing and needs --report or --plot, got neither.")
    machine, rows = read_json(measured)
    _write(machine, rows, None, report_file, plot_file)


def _check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise OptionError(f"bench: {option} must be one of {', '.join(known)}, got {name!r}.")


def _check_files(json_file: Path | None, report_file: Path | None, plot_file: Path | None) -> None:
    """Tell before anything is measured what could not be written after it."""
    from everygpu.bench.plot import check_plot

    for path in (json_file, report_file, plot_file):
        if path is not None and not path.absolute().parent.is_dir():
            raise OptionError(f"bench: files can be written to folders that exist, got {path}. Make the folder first.")
    if plot_file is not None:
        check_plot(plot_file)


def _measure_all(
    console: Console,
    bar: Bar,
    models: Sequence[str],
    peers: Sequence[str],
    timeout: float,
    conditions: Mapping[str, Any],
    rows: list[dict[str, Any]],
) -> None:
    """Add a row for each model and way to train, and print it when it comes."""
    from everygpu.bench.report import add_efficiency, describe_row

    for model in models:
        with bar.paused():
            console.out(f"\n{model}", highlight=False)
        for peer in peers:
            bar.update(f"{model}: {peer}")
            rows.append(run_row(model, peer, timeout, conditions))
            bar.advance()
            with bar.paused():
                console.out(harmless(describe_row(rows[-1])), highlight=False)
        with bar.paused():
            print_table(console, add_efficiency(rows[-len(peers) :]))


def _measure_apart(text: str) -> None:
    """Measure one row in this process, print it, and end though threads of a failed peer go on."""
    from everygpu.bench.measure import Conditions, measure_row

    conditions = Conditions(**json.loads(text))
    if ":" in conditions.model:
        sys.path.insert(0, os.getcwd())  # where the user's module is
    outcome = measure_row(conditions)
    click.echo(f"\n{json.dumps(outcome)}")  # the model may have printed something without an end of line
    os._exit(0)


def find_devices(num_gpus: int | None, cpu: bool) -> tuple[str, int]:
    """Decide on what to train.

    Args:
        num_gpus: How many are asked for; None for all, and two replicas on the CPU.
        cpu: Whether only the CPU is asked for.
    Returns:
        ``"cuda"`` or ``"cpu"``, and how many devices or replicas.
    Raises:
        DeviceError: there are GPUs, but fewer.
    """
    import torch

    there = 0 if cpu or torch.version.cuda is None else torch.cuda.device_count()
    if not there:
        return "cpu", num_gpus or _NUM_CPU_REPLICAS
    if num_gpus is not None and num_gpus > there:
        raise DeviceError(f"bench: --gpus {num_gpus} needs as many, got {there}. `everygpu devices` lists them.")
    return "cuda", num_gpus or there


def run_row(model: str, peer: str, timeout: float, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a row in a process of its own; a hang or a failure is its result.

    Args:
        model: As ``find_training`` takes it.
        peer: Name of the row.
        timeout: Seconds that it may take.
        conditions: The rest of ``Conditions``.
    Raises:
        OptionError: the model can't be found or made, which would go wrong in every row.
    """
    from everygpu.bench.timing import run_command

    row = {"model": model, "peer": peer, **conditions}
    record = json.dumps({**row, "started_s": time.time()})
    outcome = run_command(python_command("everygpu", "bench", "--apart", record), timeout)
    if "refused" in outcome:
        raise OptionError(outcome["refused"])
    return row | outcome


def describe(machine: dict[str, Any], num_devices: int, on_cpu: bool) -> str:
    """Write what a benchmark is run on."""
    versions = f"everygpu {machine['everygpu']}, torch {machine['torch']}, Python {machine['python']}"
    if on_cpu:
        return f"{_ON_CPU}\n{num_devices} replicas, {machine['cpu_threads']} threads; {versions}"
    return f"{num_devices} of {len(machine['gpus'])} x {machine['gpus'][0]}; {versions}, CUDA {machine['cuda']}"


def print_table(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Lay out what was measured for a terminal."""
    from everygpu.bench.report import COLUMNS, fill_columns

    table = Table(*COLUMNS, highlight=False)
    for row in rows:
        if "ms" in row:
            table.add_row(*fill_columns(row))
    if table.row_count:
        console.print(table)
