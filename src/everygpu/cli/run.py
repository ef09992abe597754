"""``everygpu run``: choose the GPUs before torch is loaded, then be ``python script.py`` or torchrun."""

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import click

from everygpu._watchdog import TIMEOUT_S, VARIABLE, watchdog
from everygpu.cli.choose import NO_GPU, Plan, plan_run
from everygpu.cli.options import Filters, Seconds, filter_options, option_group, read_request
from everygpu.cli.output import say
from everygpu.cli.script import OPTIONS, launch, require_script, run_script, torchrun_arguments
from everygpu.devices import nvml
from everygpu.devices.select import Demand
from everygpu.errors import DeviceError

_SPLITS = {"chunk": "chunk", "even": "even", "weighted": "auto"}
SPLIT_VARIABLE = "EVERYGPU_SPLIT"


def _read_processes(context: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """Read ``--processes``; 0 means one per GPU."""
    if text is None or text == "auto":
        return None if text is None else 0
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise click.BadParameter(f"{text!r} is not 'auto' or a number from 1.")
    return int(text)


_NAMES = {name.removeprefix("--").replace("-", "_"): name for name in OPTIONS}
torchrun_options = option_group(  # in both of torchrun's spellings
    "torchrun",
    {key: click.option(*dict.fromkeys((name, f"--{key}")), key, hidden=True) for key, name in _NAMES.items()},
)


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    "--gpus",
    "request",
    default="auto",
    show_default=True,
    metavar="N|auto|0,2",
    callback=read_request,
    help="Number of GPUs, or their indices as in nvidia-smi.",
)
@filter_options
@click.option("--wait", is_flag=True, help="Wait until enough GPUs are free.")
@click.option("--timeout", type=Seconds(min=0, max=1e8), metavar="SECONDS", help="Stop waiting after this time.")
@click.option("--share", is_flag=True, help="Ignore reservations, and make none.")
@click.option("--cpu", is_flag=True, help="Hide all GPUs.")
@click.option("--split", type=click.Choice(list(_SPLITS)), help="Default batch split.")
@click.option(
    "--watchdog",
    type=Seconds(min=0, max=1e8),
    default=TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="Exit with code 6 after this time without progress; 0 for never.",
)
@click.option(
    "--processes", metavar="N|auto", callback=_read_processes, help="Start N processes with torchrun, or one per GPU."
)
@torchrun_options
@click.option("-m", "--module", "is_module", is_flag=True, help="Run a module, as `python -m` does.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    request: Demand,
    filters: Filters,
    wait: bool,
    timeout: float | None,
    share: bool,
    cpu: bool,
    split: str | None,
    watchdog: float,
    processes: int | None,
    torchrun: Mapping[str, str],
    is_module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run a script on chosen GPUs.

    The GPU with the most free memory becomes cuda:0; a list of indices keeps its order. Other runs of this user take
    other GPUs. Options after SCRIPT are the script's. The exit code is the script's.

    With --processes, torchrun's options such as --nnodes, --rdzv-endpoint, --max-restarts, --log-dir and
    --redirects are passed on.
    """
    if cpu and (request != Demand() or filters):
        raise click.UsageError("--cpu hides every GPU. Leave out --gpus and the filters.")
    if cpu and processes == 0:
        raise click.UsageError("--processes auto counts GPUs, and --cpu hides them. Pass --processes N --cpu.")
    if timeout is not None and not wait:
        raise click.UsageError("--timeout needs --wait.")
    options = {_NAMES[key]: value for key, value in torchrun.items()}
    if options and processes is None:
        raise click.UsageError(f"{next(iter(options))} is torchrun's. Add --processes.")
    require_script(script, is_module)
    _note_misplaced(script, args)
    if cpu:
        plan = Plan(environ=NO_GPU)
    else:
        if processes and processes > 1 and request == Demand() and nvml.sample_devices():
            request = replace(request, count=processes)  # one alone drives all
        wait_s = 0.0 if not wait else math.inf if timeout is None else timeout
        plan = plan_run(replace(request, **filters), os.environ, share=share, wait_s=wait_s, report=_report)
    if processes == 0 and not plan.num_gpus:
        raise DeviceError("No GPU for --processes auto. Pass --processes N --cpu to use the CPU.")
    _report(plan.note)
    os.environ.update(plan.environ)
    if split is not None:
        os.environ[SPLIT_VARIABLE] = _SPLITS[split]
    if processes is None:
        sys.exit(_run_here(plan, watchdog, script, args, is_module))
    os.environ[VARIABLE] = str(watchdog)
    code, note = launch(torchrun_arguments(processes or plan.num_gpus, options, script, args, is_module))
    _report(note)
    sys.exit(code)


def _run_here(plan: Plan, watchdog_s: float, script: str, args: Sequence[str], is_module: bool) -> str | int | None:
    if watchdog_s:
        watchdog(watchdog_s)
    code = run_script(script, args, is_module)
    torch = sys.modules.get("torch")
    is_unused = torch is not None and not torch.cuda.is_initialized() and not _had_children()
    if torch is not None and is_unused and plan.num_gpus and code in (None, 0):
        advice = "move the model there with .to('cuda'), or wrap it: everygpu.DataParallel(model)"
        if torch.version.cuda is None:
            advice = f"torch {torch.__version__} is built without CUDA: install a CUDA build"
        _report(f"CUDA is there but unused: the script had {plan.num_gpus} GPU(s) and used none; {advice}.")
    return code


def _had_children() -> bool:
    """Whether this process has waited for others, which may have used the GPUs."""
    if sys.platform == "win32":
        return False
    import resource

    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0


def _note_misplaced(script: str, args: Sequence[str]) -> None:
    """Warn of an option of everygpu that comes after the script; one after ``--`` is meant for the script."""
    params = click.get_current_context().command.params
    own = {name for p in params if not getattr(p, "hidden", False) for name in p.opts if name.startswith("--")}
    until = args.index("--") if "--" in args else len(args)
    for name in (arg.partition("=")[0] for arg in args[:until]):
        if name in own:
            _report(
                f"{name} comes after {script} and goes to it. Put it before the script if it is meant for everygpu."
            )
            return


def _report(line: str | None) -> None:
    if line is not None:
        say(f"everygpu run: {line}")
