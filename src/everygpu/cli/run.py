"""``everygpu run``: choose the GPUs before torch is loaded, then be ``python script.py``."""

import importlib.machinery
import io
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import click
from rich.console import Console

from everygpu.devices import nvml
from everygpu.devices.nvml import DeviceSample
from everygpu.devices.select import Demand, check_demand, choose
from everygpu.devices.visible import resolve_environ
from everygpu.errors import DeviceError
from everygpu.units import format_size

_NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What ``--gpus`` says."""

    count: int | None = None
    """How many; None for every one that fits, or those in ``indices``."""
    indices: tuple[int, ...] = ()
    """``nvidia-smi --query-gpu=index``: exactly these, in this order."""

    @property
    def is_auto(self) -> bool:
        """Whether the CPU will do when there is no GPU."""
        return self == Request()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to change before the script runs."""

    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables to set."""
    note: str | None = None
    """A line for the user."""
    num_gpus: int = 0
    """How many GPUs the script is given for certain."""


def parse_request(text: str) -> Request:
    """Read ``auto``, a count such as ``2``, or indices such as ``0,2`` (``2,`` is GPU 2 alone).

    Raises:
        click.BadParameter: it is none of these.
    """
    if text == "auto":
        return Request()
    if re.fullmatch(r"[1-9][0-9]*", text):
        return Request(count=int(text))
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*,?", text) or text == "0":
        raise click.BadParameter(f"must be 'auto', a count from 1, or indices such as '0,2' or '0,', got {text!r}.")
    indices = tuple(int(index) for index in text.rstrip(",").split(","))
    if len(set(indices)) < len(indices):
        raise click.BadParameter(f"must name each GPU once, got {text!r}.")
    return Request(indices=indices)


def _read_request(context: click.Context, option: click.Parameter, text: str) -> Request:
    return parse_request(text)


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    "--gpus",
    default="auto",
    show_default=True,
    metavar="N|auto|0,2",
    callback=_read_request,
    help="How many GPUs, or which, by the index that `everygpu devices` and nvidia-smi show.",
)
@click.option("--min-free", metavar="SIZE", help="Only GPUs with this much memory free, such as 8GiB.")
@click.option("--cpu", is_flag=True, help="Hide every GPU from the script.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run_chosen(gpus: Request, min_free: str | None, cpu: bool, script: str, args: tuple[str, ...]) -> None:
    """Run a script on chosen GPUs.

    The GPU with the most free memory becomes cuda:0; a list of indices keeps its order. What stands
    after SCRIPT is the script's own, and its exit code is passed on.
    """
    if cpu and not (gpus.is_auto and min_free is None):
        raise click.UsageError("--cpu hides every GPU: leave out --gpus and --min-free.")
    plan = Plan(environ=_NO_GPU) if cpu else plan_run(gpus, min_free, os.environ)
    if plan.note is not None:
        _tell(plan.note)
    os.environ.update(plan.environ)
    code = run_script(script, args)
    if plan.num_gpus and code in (None, 0):
        _warn_if_unused(plan.num_gpus)
    sys.exit(code)


def plan_run(request: Request, min_free: str | None, environ: Mapping[str, str]) -> Plan:
    """Choose the GPUs by what NVML says now, without loading torch.

    Args:
        request: How many, or which.
        min_free: Memory that must be free on each, as ``units.parse_size`` reads it.
        environ: As ``os.environ``; GPUs that it hides are not chosen.
    Raises:
        DeviceError: a request for certain GPUs, or a number of them, can't be met.
    """
    demand = check_demand(count=request.count or len(request.indices) or None, min_free_memory=min_free)
    samples = nvml.sample_devices()
    if not samples and request.is_auto:
        return Plan(note="no NVIDIA GPU found: the script runs on what torch finds, or the CPU.")
    try:
        chosen = choose_gpus(samples or [], request, demand, environ)
    except DeviceError:
        if not request.is_auto:
            raise
        return Plan(environ=_NO_GPU, note=_explain_cpu(demand, environ))
    visible = ",".join(gpu.uuid for gpu in chosen)
    settings = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return Plan(environ=settings, num_gpus=len(chosen))


def choose_gpus(
    samples: Sequence[DeviceSample], request: Request, demand: Demand, environ: Mapping[str, str]
) -> list[DeviceSample]:
    """Take the GPUs that are visible, asked for, and free enough.

    Args:
        samples: Every GPU of the box, in PCI order.
        request: How many, or which.
        demand: The same number, and the memory.
        environ: As ``os.environ``.
    Raises:
        DeviceError: too few; the message has a table of every GPU.
    """
    visible = resolve_environ(environ, samples)
    shown = {gpu.index for gpu in visible}
    everything = [*visible, *(gpu for gpu in samples if gpu.index not in shown)]
    refused = {i: _explain_absence(gpu, environ) for i, gpu in enumerate(everything) if i >= len(visible)}
    if not request.indices:
        return choose(everything, demand, refused)
    refused |= {i: "not asked for" for i, gpu in enumerate(everything) if gpu.index not in request.indices}
    chosen = choose(everything, demand, refused)
    return sorted(chosen, key=lambda gpu: request.indices.index(gpu.index))


def _explain_absence(gpu: DeviceSample, environ: Mapping[str, str]) -> str:
    if gpu.mig_instances == ():
        return "in MIG mode without an instance"
    return f"hidden by CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', '')!r}"


def _explain_cpu(demand: Demand, environ: Mapping[str, str]) -> str:
    text = environ.get("CUDA_VISIBLE_DEVICES")
    among = "" if text is None else f" among CUDA_VISIBLE_DEVICES={text!r}"
    with_free = "" if demand.min_free_bytes is None else f" with {format_size(demand.min_free_bytes)} free"
    return f"no GPU{with_free}{among}: the script runs on the CPU."


def run_script(
    script: str, args: Sequence[str], is_expected: Callable[[BaseException], bool] = lambda _: False
) -> str | int | None:
    """Run a file as ``python script.py args…`` would, in this process.

    Args:
        script: Path of the file.
        args: What follows it in ``sys.argv``.
        is_expected: Tells of an exception that ends the script as it should: it is not shown.
    Returns:
        What to give to ``sys.exit``: the script's own exit code or message; 1 after an exception, whose
        traceback has been shown; 130 after an interrupt.
    Source:
        ``runpy.run_path``. We differ as ``python`` itself does: ``sys.argv[0]`` is the path as written
        while ``__file__`` is absolute, and ``__main__`` stays the script's module, so that threads, exit
        handlers and worker processes that outlive its last line still find it.
    """
    path = os.path.abspath(script)
    sys.argv = [script, *args]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    try:
        _execute(path)
    except SystemExit as stop:
        return stop.code
    except KeyboardInterrupt as error:
        _show(error, path)
        return 130
    except BaseException as error:  # noqa: BLE001 - the interpreter's place: show it and end with 1
        if is_expected(error):
            return 0
        _show(error, path)
        return 1
    return 0


def _execute(path: str) -> None:
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = module
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _show(error: BaseException, path: str) -> None:
    """Show a traceback that begins in the script, through the hook that the script may have set."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _warn_if_unused(num_gpus: int) -> None:
    torch = sys.modules.get("torch")
    if torch is None or torch.cuda.is_initialized():
        return
    if torch.version.cuda is None:
        advice = f"torch {torch.__version__} is built without CUDA: install a CUDA build"
    else:
        advice = "move the model there with .to('cuda'), or wrap it: everygpu.DataParallel(model)"
    _tell(f"CUDA is there but unused: the script had {num_gpus} GPU(s) and used none; {advice}.")


def _tell(line: str) -> None:
    Console(stderr=True).out(f"everygpu run: {line}", highlight=False)
