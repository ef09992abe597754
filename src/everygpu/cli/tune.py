"""``everygpu tune``: how many workers a script's DataLoader needs, and how large its batches can be."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from everygpu.child import python_command
from everygpu.cli.misplaced import note_misplaced
from everygpu.cli.numbers import FiniteRange
from everygpu.cli.output import Output
from everygpu.cli.progress_bar import show_bar
from everygpu.cli.script import require_script
from everygpu.cli.text import harmless
from everygpu.exit_codes import INTERRUPTED
from everygpu.units import format_size

MAX_ROWS = 2**16
_NO_ROWS = (
    "tune: --batch-size needs batches of tensors with rows, got one without. Leave it out to measure the workers alone."
)
_NO_BATCH = "tune: the loader must give a batch, got none. Check its dataset and sampler."


@click.command("tune", context_settings={"allow_interspersed_args": False})
@click.option("--batch-size", is_flag=True, help="Search for the largest batch that fits, too.")
@click.option(
    "--loader",
    "which",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Which DataLoader, in the order they are used.",
)
@click.option(
    "--seconds",
    type=FiniteRange(min=0, min_open=True),
    default=3.0,
    show_default=True,
    help="How long to load data with each number of workers.",
)
@click.option(
    "--headroom",
    type=FiniteRange(min=0, max=100, max_open=True),
    default=5.0,
    show_default=True,
    help="Percent of each GPU's memory that stays free.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: everything that was tried.")
@click.option("--trial", nargs=2, type=(int, click.Path(path_type=Path)), hidden=True)
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is a module's name, as for `python -m`.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def tune_script(
    batch_size: bool,
    which: int,
    seconds: float,
    headroom: float,
    as_json: bool,
    trial: tuple[int, Path] | None,
    is_module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Measure what a training script needs.

    The script is run, unchanged, up to the point where it first iterates its DataLoader; what it does before that
    happens as usual. That DataLoader is measured with 0, 1, 2, 4, … workers.

    With --batch-size the script is run once more for every size that is tried, for two steps on batches made by
    repeating rows of its own first batch. What it saves there to a path, by everygpu, torch.save or safetensors, is
    left out; other files are written.
    """
    from everygpu.cli import observe

    require_script(script, is_module)
    if trial is not None:
        sys.exit(observe.run_trial(script, args, which, trial[0], headroom, trial[1], is_module))
    note_misplaced(script, args)
    console = Output(stderr=as_json, markup=False, emoji=False, highlight=False)
    found: dict[str, Any] = {}
    # The script's output goes to the tables' stream, so that stdout holds the JSON alone.
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        if batch_size:
            found["batch_size"] = _tune_batch_size(console, as_json, script, args, which, headroom, is_module)
        found["workers"] = _tune_workers(console, as_json, script, args, which, seconds, is_module)
    if as_json:
        Output(markup=False, emoji=False).out(json.dumps(found, indent=2), highlight=False)


def _tune_workers(
    console: Console, quiet: bool, script: str, args: Sequence[str], which: int, seconds: float, is_module: bool
) -> dict[str, Any]:
    from dataclasses import asdict

    from everygpu.cli import observe
    from everygpu.devices import parse_devices
    from everygpu.feed.workers import numbers_to_try, tune_workers

    loader, code = observe.find_loader(script, args, which, is_module)
    if loader is None:
        raise _explain_end(script, which, code)
    with show_bar("loading data", len(numbers_to_try()), unit="trials", quiet=quiet) as bar:
        report = tune_workers(
            loader,
            parse_devices(None)[:1],  # what is asked is the loading: one device takes any batch
            seconds=seconds,
            on_trial=lambda trial: bar.advance(),
        )
    table = Table("workers", "batches/s", "first batch", highlight=False)
    for t in report.trials:
        mark = " *" if t.num_workers == report.num_workers else ""
        table.add_row(str(t.num_workers), f"{t.batches_per_s:.1f}{mark}", f"{t.first_batch_s:.2f} s")
    console.print(table)
    console.out(
        f"num_workers={report.num_workers} is the smallest number that is as fast as any; now {loader.num_workers}."
    )
    return {
        "num_workers": report.num_workers,
        "num_workers_now": loader.num_workers,
        "trials": [asdict(t) for t in report.trials],
    }


def _explain_end(script: str, which: int, code: str | int | None, last: str = "") -> BaseException:
    """Say that a script ended too early; of one that Ctrl-C ended, only that."""
    if code == INTERRUPTED:
        return KeyboardInterrupt()
    loader = "a DataLoader" if which == 1 else f"{which} DataLoaders"
    advice = "" if which == 1 else f" Pass a --loader below {which}."
    return click.ClickException(
        f"{script} must iterate {loader}, but ended before, with exit code {code}.{advice}{last}"
    )


def _tune_batch_size(
    console: Console, quiet: bool, script: str, args: Sequence[str], which: int, headroom: float, is_module: bool
) -> dict[str, Any]:
    from everygpu.feed.size_search import find_size

    table = Table("rows", "fits", "peak on one GPU", highlight=False)
    trials: list[dict[str, Any]] = []
    with show_bar("running the script as it is", unit="trials", quiet=quiet) as bar:

        def fits(num_rows: int) -> bool:
            if num_rows == now:
                return bool(first["fits"])
            bar.advance()
            bar.update(f"running the script with {num_rows} rows")
            trials.append(try_rows(num_rows, script, args, which, headroom, is_module))
            return bool(trials[-1]["fits"])

        first = try_rows(0, script, args, which, headroom, is_module)
        now = first["num_rows"]
        if not now:
            raise click.ClickException(_NO_ROWS)
        found = find_size(fits, now, 1, max(now, MAX_ROWS), grain=1)
    for t in sorted([first, *trials], key=lambda t: int(t["num_rows"])):
        peak = t.get("peak_bytes")
        table.add_row(str(t["num_rows"]), "yes" if t["fits"] else "no", "-" if peak is None else format_size(peak))
    console.print(table)
    console.out(f"batches of {found} rows fit; now {now}." if found else "not even one row fits.")
    if any(t.get("saves_left_out") for t in (first, *trials)):
        console.out("tune: the script's saves are left out.")
    return {"num_rows": found, "num_rows_now": now, "trials": [first, *trials]}


def try_rows(
    num_rows: int, script: str, args: Sequence[str], which: int, headroom: float, is_module: bool = False
) -> dict[str, Any]:
    """Run a script for a few steps on batches of another size, in a process of its own.

    Args:
        num_rows: Rows of a batch; 0 for as many as the script has.
    Returns:
        ``num_rows``, ``fits``, where it fits ``peak_bytes``, and ``saves_left_out`` where it saves.
    Raises:
        click.ClickException: the loader is empty, or the script failed by itself; its last lines are in the message.
        KeyboardInterrupt: it was interrupted.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        options = ["--trial", str(num_rows), str(result), "--loader", str(which), "--headroom", str(headroom)]
        command = python_command("everygpu", "tune", *options, *["-m"] * is_module, script, *args)
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if not result.exists():
            last = harmless("\n".join((done.stderr or done.stdout).splitlines()[-12:]), keep="\n\t")
            raise _explain_end(script, which, done.returncode, f"\n{last}")
        record: dict[str, Any] = json.loads(result.read_text())
        if record.get("is_empty"):
            raise click.ClickException(_NO_BATCH)
        return record
