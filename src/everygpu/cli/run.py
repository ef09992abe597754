"""``everygpu run``: choose the GPUs before torch is loaded, then be ``python script.py`` or torchrun."""

import functools
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import click
from rich.console import Console

from everygpu.cli.filters import Filters, filter_options
from everygpu.cli.launch import Launch, launch, pass_on
from everygpu.cli.misplaced import note_refused
from everygpu.cli.numbers import FiniteRange
from everygpu.cli.plan import NO_GPU, Manners, Plan, Request, plan_run, read_request
from everygpu.cli.restarts import Command, run_again
from everygpu.cli.script import require_script, run_module, run_script
from everygpu.cli.text import harmless
from everygpu.devices import nvml
from everygpu.watchdog.watch import TIMEOUT_S, VARIABLE, watch

_SPLITS = {"chunk": "chunk", "even": "even", "weighted": "auto"}
SPLIT_VARIABLE = "EVERYGPU_SPLIT"


def _read_processes(context: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """Read ``--processes``; 0 stands for one per GPU."""
    if text is None or text == "auto":
        return None if text is None else 0
    if not re.fullmatch(r"[1-9][0-9]*", text):
        raise click.BadParameter(f"must be 'auto' or a number from 1, got {text!r}.")
    return int(text)


_TORCHRUN_OPTIONS = {
    "--local-ranks-filter": ("RANKS", "With --processes: whose output is shown, as torchrun's: 0, or 0,1."),
    "--redirects": ("STREAMS", "With --processes: what goes to files of --log-dir, as torchrun's: 3."),
    "--tee": ("STREAMS", "With --processes: what goes there and to the console, as torchrun's: 3."),
    "--log-dir": ("FOLDER", "With --processes: where these files are, as torchrun's."),
    "--max-restarts": ("N", "With --processes: how often all start again when one has failed, as torchrun's."),
}


def torchrun_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add options that torchrun takes as they are; the command gets them together, as ``passed_on``."""
    names = {name: name.removeprefix("--").replace("-", "_") for name in _TORCHRUN_OPTIONS}

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        found = {name: values.pop(key) for name, key in names.items()}
        command(passed_on=pass_on(found), **values)

    for name, (metavar, text) in reversed(_TORCHRUN_OPTIONS.items()):
        with_options = click.option(name, metavar=metavar, help=text)(with_options)
    return with_options


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    "--gpus",
    default="auto",
    show_default=True,
    metavar="N|auto|0,2",
    callback=read_request,
    help="How many GPUs, or which, by the index that `everygpu devices` and nvidia-smi show.",
)
@filter_options
@click.option("--wait", is_flag=True, help="Wait until they are free.")
@click.option("--timeout", type=FiniteRange(min=0), metavar="SECONDS", help="Wait no longer than this.")
@click.option("--share", is_flag=True, help="Reserve nothing, and use what other runs have reserved.")
@click.option("--cpu", is_flag=True, help="Hide every GPU from the script.")
@click.option(
    "--split",
    type=click.Choice(list(_SPLITS)),
    help="How DataParallel cuts batches where the script doesn't say: 'weighted' measures the GPUs.",
)
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Start the script again, N times at most, when it is killed, loses a GPU, or ends with exit code 5 or 6.",
)
@click.option(
    "--watchdog",
    type=FiniteRange(min=0),
    default=TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="End a script that stands still for so long, with exit code 6, and show where; 0 for never.",
)
@click.option(
    "--processes",
    metavar="N|auto",
    callback=_read_processes,
    help="Start this many processes on each box by torchrun, or one per GPU; one drives all GPUs of its box.",
)
@click.option("--nnodes", metavar="N", help="With --processes: how many boxes, as torchrun's.")
@click.option("--rdzv-endpoint", metavar="HOST:PORT", help="With --nnodes: where the boxes meet, as torchrun's.")
@torchrun_options
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is a module's name, as for `python -m`.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run_chosen(
    gpus: Request,
    filters: Filters,
    wait: bool,
    timeout: float | None,
    share: bool,
    cpu: bool,
    split: str | None,
    restarts: int,
    watchdog: float,
    processes: int | None,
    nnodes: str | None,
    rdzv_endpoint: str | None,
    passed_on: tuple[str, ...],
    is_module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run a script on chosen GPUs.

    The GPU with the most free memory becomes cuda:0; a list of indices keeps its order. The GPUs are reserved:
    another `everygpu run` of the same user takes others. What stands after SCRIPT is the script's own, and
    its exit code is passed on.
    """
    _check_devices(cpu, gpus, filters, timeout, wait)
    require_script(script, is_module)
    _check_launch(processes, nnodes, rdzv_endpoint, passed_on)
    if restarts:
        sys.exit(_run_again(restarts, gpus, nnodes, len(args)))
    wait_s = 0.0 if not wait else math.inf if timeout is None else timeout
    manners = Manners(share=share, wait_s=wait_s, tell=_tell)
    plan = Plan(environ=NO_GPU) if cpu else _plan_devices(ask_for_each(processes, gpus), filters, manners)
    _tell(plan.note)
    os.environ.update(plan.environ)
    if split is not None:
        os.environ[SPLIT_VARIABLE] = _SPLITS[split]
    if processes is None:
        sys.exit(_run_here(plan, watchdog, run_module if is_module else run_script, script, args))
    os.environ[VARIABLE] = str(watchdog)
    num = processes or max(1, plan.num_gpus)
    meeting = Launch(num_processes=num, nnodes=nnodes, rdzv_endpoint=rdzv_endpoint)
    code, note = launch(replace(meeting, passed_on=passed_on, is_module=is_module), script, args)
    _tell(note)
    sys.exit(code)


def _run_again(num_restarts: int, gpus: Request, nnodes: str | None, num_args: int) -> int:
    if nnodes is not None:
        raise click.UsageError("--restarts is for one box: for several, --max-restarts starts all processes again.")
    written = sys.argv[sys.argv.index("run") + 1 :]
    end = len(written) - num_args - 1
    options = written[: end - (written[end - 1] == "--")]
    command = Command(options=options, script=written[len(options) :], indices=gpus.indices, count=gpus.count)
    return run_again(command, num_restarts, _tell)


def _plan_devices(request: Request, filters: Filters, manners: Manners) -> Plan:
    return plan_run(request, filters.demand(request.num_asked), os.environ, manners)


def ask_for_each(processes: int | None, gpus: Request) -> Request:
    """Ask for a GPU per process, where there are GPUs and nothing else is asked for; one alone drives all."""
    is_shared = processes is not None and processes > 1
    return replace(gpus, count=processes) if is_shared and gpus.is_auto and nvml.sample_devices() else gpus


def _check_devices(cpu: bool, gpus: Request, filters: Filters, timeout: float | None, wait: bool) -> None:
    if cpu and not (gpus.is_auto and not filters.are_given):
        raise click.UsageError("--cpu hides every GPU: leave out --gpus and the filters.")
    if timeout is not None and not wait:
        raise click.UsageError("--timeout says how long to wait: add --wait.")


def _check_launch(
    processes: int | None, nnodes: str | None, rdzv_endpoint: str | None, passed_on: tuple[str, ...]
) -> None:
    if processes is None and passed_on:
        raise click.UsageError(f"{passed_on[0]} is for several processes: add --processes.")
    if processes is None and (nnodes or rdzv_endpoint):
        raise click.UsageError("--nnodes and --rdzv-endpoint are for several processes: add --processes.")
    if (nnodes is None) != (rdzv_endpoint is None):
        raise click.UsageError("--nnodes and --rdzv-endpoint go together: every box must be told where they meet.")


def _run_here(
    plan: Plan,
    watchdog_s: float,
    run: Callable[[str, Sequence[str]], str | int | None],
    script: str,
    args: tuple[str, ...],
) -> str | int | None:
    if watchdog_s:
        watch(watchdog_s)
    code = run(script, args)
    note_refused(script, args, code)
    if plan.num_gpus and code in (None, 0):
        _warn_if_unused(plan.num_gpus)
    return code


def _warn_if_unused(num_gpus: int) -> None:
    torch = sys.modules.get("torch")
    if torch is None or torch.cuda.is_initialized():
        return
    if torch.version.cuda is None:
        advice = f"torch {torch.__version__} is built without CUDA: install a CUDA build"
    else:
        advice = "move the model there with .to('cuda'), or wrap it: everygpu.DataParallel(model)"
    _tell(f"CUDA is there but unused: the script had {num_gpus} GPU(s) and used none; {advice}.")


def _tell(line: str | None) -> None:
    if line is not None:
        said = harmless(line, keep="\n")
        Console(stderr=True).out(f"everygpu run: {said}", highlight=False)
