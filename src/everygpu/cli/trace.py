"""``everygpu trace``: a few steps of a script under torch's profiler, summed up in words."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from everygpu.cli.misplaced import note_misplaced
from everygpu.cli.output import Output
from everygpu.cli.paths import UserPath
from everygpu.cli.script import require_script, run_module, run_script
from everygpu.cli.text import harmless
from everygpu.errors import OptionError
from everygpu.exit_codes import INTERRUPTED
from everygpu.units import format_size


class Stop(BaseException):
    """Ends a script from within; no Exception, so that it is not caught on the way."""


if TYPE_CHECKING:
    from everygpu.tracing.events import Trace
    from everygpu.tracing.shares import DeviceShares, HostShares
    from everygpu.tracing.steps import StepTracer

# torch sets both where it knows of CUDA graphs: profiling that ends, or begins late, can crash those of CUDA 11 and 12.
_FOR_GRAPHS = {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
_HOW_TO_OPEN = "open it at https://ui.perfetto.dev (the file stays on your machine) or in chrome://tracing."
_SLOWED = 1.15
_LOSSES = {
    "launching": "waiting for launches",
    "data": "waiting for data",
    "exchange": "exchange between GPUs",
    "waiting": "waiting for other GPUs or streams",
    "between": "between kernels",
    "host_copies": "copies from and to the host",
}


@click.command("trace", context_settings={"allow_interspersed_args": False})
@click.option(
    "--steps", "num_steps", type=click.IntRange(min=1), default=10, show_default=True, help="Steps that are traced."
)
@click.option(
    "--warmup",
    type=click.IntRange(min=2),
    default=20,
    show_default=True,
    help="Steps before them, in which memory is allocated, and graphs are recorded or compiled.",
)
@click.option(
    "--output",
    type=UserPath(path_type=Path, dir_okay=False),
    default=Path("trace.json.gz"),
    show_default=True,
    help="Where the trace goes: .json, or .json.gz; a file that is there is replaced.",
)
@click.option("--keep-running", is_flag=True, help="Let the script go on after the traced steps, though slower.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the shares of each device.")
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is a module's name, as for `python -m`.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def trace_script(
    num_steps: int,
    warmup: int,
    output: Path,
    keep_running: bool,
    as_json: bool,
    is_module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Say what the time of a script's steps goes to.

    The script is run, unchanged, until the traced steps are done, and is ended there. It trains as in any run, and
    writes its checkpoints. A step is a call of everygpu.TrainStep, or an update by the script's first optimizer. For
    each GPU it says how much of the time it computes, waits for launches, for data, for other GPUs, and exchanges data
    while nothing is computed, and what to do about the largest loss. The trace is written for Perfetto, which shows
    each kernel.
    """
    _check(script, args, output, is_module)
    for name, value in _FOR_GRAPHS.items():
        os.environ.setdefault(name, value)
    from everygpu.tracing.steps import StepTracer, noticing

    path, is_main = _path_of_rank(output)

    def end() -> None:
        if not keep_running:
            raise Stop
        show()

    def show() -> None:
        if is_main:
            _show(tracer, as_json, console)

    console = Output(file=sys.stdout, markup=False, emoji=False)
    tracer = StepTracer(path=path, warmup=warmup, num_steps=num_steps, on_end=end)
    # The script's output goes to another stream than the JSON.
    with redirect_stdout(sys.stderr if as_json else sys.stdout), noticing(tracer):
        code = (run_module if is_module else run_script)(script, args, lambda error: isinstance(error, Stop))
    was_whole = tracer.is_done
    tracer.finish()
    if not tracer.num_traced or not tracer.is_done:
        _end_early(_explain_end(script, tracer, code), tracer)
    if not (was_whole and keep_running):  # shown already
        show()
    sys.exit(0 if was_whole and not keep_running else code)


def _check(script: str, args: Sequence[str], output: Path, is_module: bool) -> None:
    require_script(script, is_module)
    if not output.name.endswith((".json", ".json.gz")):
        raise OptionError(f"trace: --output must end with .json or .json.gz, got {output}.")
    if not output.absolute().parent.is_dir():
        raise OptionError(f"trace: --output needs a folder that exists, got {output}. Make the folder first.")
    if not os.access(output.absolute().parent, os.W_OK):
        raise OptionError(f"trace: --output needs a folder that can be written to, got {output}. Pass another one.")
    note_misplaced(script, args)


def _path_of_rank(output: Path) -> tuple[Path, bool]:
    """Give each rank a file of its own, in a folder that stays where it is; tell which rank prints."""
    from everygpu.ranks.membership import find_membership

    path, found = output.absolute(), find_membership()
    if found is None:
        return path, True
    stem, dot, ending = path.name.partition(".json")
    return path.with_name(f"{stem}.rank{found.rank}{dot}{ending}"), found.rank == 0


def _end_early(error: BaseException, tracer: "StepTracer") -> NoReturn:
    if not tracer.is_left_running:
        raise error
    click.echo(f"Error: {error}" if isinstance(error, click.ClickException) else "Interrupted.", err=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)  # with the profiler of a thread that has ended, torch's exit is a crash


def _explain_end(script: str, tracer: "StepTracer", code: str | int | None) -> BaseException:
    if code == INTERRUPTED:
        return KeyboardInterrupt()
    if tracer.num_traced:
        return click.ClickException(
            f"{script} trains in a thread of its own, and must take {tracer.warmup + tracer.num_steps} steps there, "
            f"but ended after {tracer.num_seen}. Pass fewer --steps."
        )
    return click.ClickException(
        f"{script} must take {tracer.warmup} steps before the first that is traced, but ended after "
        f"{tracer.num_seen}, with exit code {code}. Updates by optimizers of torch.optim and calls of "
        "everygpu.TrainStep count. Pass a smaller --warmup, or train for longer."
    )


def _show(tracer: "StepTracer", as_json: bool, console: Output) -> None:
    from everygpu.tracing.events import read_trace
    from everygpu.tracing.shares import device_shares, host_shares

    trace = read_trace(tracer.path, tracer.num_traced)
    gpus = device_shares(trace)
    if as_json:
        shares = [asdict(s) for s in gpus] or [{"device": "cpu", **asdict(host_shares(trace))}]
        found = {"num_steps": trace.num_steps, "step_ms": _step_ms(trace), "file": str(tracer.path), "devices": shares}
        console.out(json.dumps(found | {"untraced_ms": _untraced_ms(tracer)}, indent=2), highlight=False)
        return
    for line in [*describe(trace, gpus, tracer), *_notes(trace, gpus, tracer)]:
        console.out(harmless(line), highlight=False)
    size = format_size(tracer.path.stat().st_size)
    console.out(f"Trace: {harmless(tracer.path)}, {size}; {_HOW_TO_OPEN}", highlight=False)


def describe(trace: "Trace", gpus: "Sequence[DeviceShares]", tracer: "StepTracer") -> list[str]:
    """Write what the steps' time went to, a line for each device, and what to do first."""
    from everygpu.tracing.advice import advise_gpus, advise_host
    from everygpu.tracing.shares import host_shares

    untraced = _untraced_ms(tracer)
    without = "" if untraced is None else f"; {untraced:.2f} ms without the profiler"
    lines = [f"{trace.num_steps} steps of {_step_ms(trace):.2f} ms{without}."]
    if gpus:
        lines += [_describe_gpu(s) for s in gpus]
        return [*lines, advise_gpus(gpus, trace, by_train_step=tracer.by_train_step)]
    host = host_shares(trace)
    return [*lines, _describe_host(host), advise_host(host, trace)]


def _describe_gpu(shares: "DeviceShares") -> str:
    values: dict[str, Any] = asdict(shares)
    losses = sorted(_LOSSES, key=lambda name: -values[name])
    parts = [f"{values[name]:.0f}% {_LOSSES[name]}{_hidden(name, shares)}" for name in losses if _counts(name, shares)]
    return f"{shares.device} computes {shares.computing:.0f}% of the time" + (
        f"; {', '.join(parts)}." if parts else "."
    )


def _counts(name: str, shares: "DeviceShares") -> bool:
    return getattr(shares, name) >= 0.5 or (name == "exchange" and shares.exchange_hidden >= 0.5)


def _hidden(name: str, shares: "DeviceShares") -> str:
    hidden = shares.exchange_hidden if name == "exchange" else 0.0
    return f" ({hidden:.0f}% more is hidden beside computing)" if hidden >= 0.5 else ""


def _describe_host(shares: "HostShares") -> str:
    return (
        f"The CPU is in operators {shares.operators:.0f}% of the time; {shares.data:.0f}% waiting for data, "
        f"{shares.python:.0f}% Python between the operators."
    )


def _notes(trace: "Trace", gpus: "Sequence[DeviceShares]", tracer: "StepTracer") -> list[str]:
    """Say what the trace can't see, and what it changes."""
    import torch

    notes = []
    untraced = _untraced_ms(tracer)
    if gpus and untraced is not None and _step_ms(trace) > _SLOWED * untraced:
        notes.append("The profiler itself slows launches down: without it, less of the time is waiting for launches.")
    if not gpus and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        notes.append("The profiler gave no work of GPUs, though the script uses them: is another profiler running?")
    if not trace.has_loader:
        notes.append("No DataLoader and no Feeder was seen in the training thread: waiting for data can't be told.")
    return notes


def _step_ms(trace: "Trace") -> float:
    return (trace.window[1] - trace.window[0]) / 1e3 / max(1, trace.num_steps)


def _untraced_ms(tracer: "StepTracer") -> float | None:
    return None if tracer.untraced_s is None else 1e3 * tracer.untraced_s
