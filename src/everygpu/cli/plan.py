"""Choose the GPUs that ``everygpu run`` gives to a script, before torch is loaded."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import click

from everygpu.cli.output import without_caller
from everygpu.devices import nvml
from everygpu.devices.nvml import DeviceSample
from everygpu.devices.reserve import OWN, Holder, Reservation, reserve
from everygpu.devices.select import Demand, choose, refuse_held
from everygpu.devices.visible import resolve_environ
from everygpu.errors import DeviceError
from everygpu.locks import Lock
from everygpu.units import format_size

NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
_POLL_S = 2.0
_ALONE = "a MIG instance: CUDA uses one in a process, and no GPU beside it"


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

    @property
    def num_asked(self) -> int | None:
        """How many GPUs were asked for, in either way."""
        return self.count or len(self.indices) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to change before the script runs."""

    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables to set."""
    note: str | None = None
    """A line for the user."""
    num_gpus: int = 0
    """How many GPUs the script is given for certain."""
    locks: tuple[Lock, ...] = field(default=(), compare=False)
    """What keeps other runs off them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """How a run behaves towards others."""

    share: bool = False
    """Whether it neither reserves GPUs nor minds what others have reserved."""
    wait_s: float = 0.0
    """How long it waits for GPUs to become free; infinity for as long as it takes."""
    tell: Callable[[str], None] = field(default=lambda line: None, compare=False)
    """Called with a line for the user when the waiting begins."""


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


def read_request(context: click.Context, option: click.Parameter, text: str | None) -> Request | None:
    """Read an option of click's."""
    return None if text is None else parse_request(text)


def plan_run(request: Request, demand: Demand, environ: Mapping[str, str], manners: Manners) -> Plan:
    """Choose the GPUs by what NVML says now, or as soon as there are some, without loading torch.

    Args:
        request: How many, or which.
        demand: The same number, and what each must have.
        environ: As ``os.environ``; GPUs that it hides are not chosen.
        manners: Whether to wait, and whether to mind other runs.
    Raises:
        DeviceError: a request for certain GPUs, or a number of them, can't be met; or all that fit are
            reserved. Where no number is asked for and none fits, the CPU will do.
    """

    def select(holders: Mapping[str, Holder]) -> list[DeviceSample]:
        return choose_gpus(nvml.sample_devices() or [], request, demand, environ, holders)

    samples = nvml.sample_devices() or []
    cpu_will_do = request.is_auto and demand.min_count is None
    if not samples and cpu_will_do:
        return Plan(note="no NVIDIA GPU found: the script runs on what torch finds, or the CPU.")
    is_hopeful = _fits(samples, request, demand.lasting, environ)
    try:
        taken = _take(select, manners if is_hopeful else replace(manners, wait_s=0.0))
    except DeviceError as error:
        if cpu_will_do and not _fits(samples, request, demand, environ):
            return Plan(environ=NO_GPU, note=_explain_cpu(demand, environ))
        raise DeviceError(f"{error}\n{_HINT}") if is_hopeful else error from None
    visible = ",".join(gpu.uuid for gpu in taken.devices)
    settings = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if taken.locks:
        settings[OWN] = visible
    return Plan(environ=settings, num_gpus=len(taken.devices), locks=taken.locks)


_HINT = "--wait starts the script as soon as they are free; --share minds no reservations."


def _take(select: Callable[[Mapping[str, Holder]], list[DeviceSample]], manners: Manners) -> Reservation[DeviceSample]:
    deadline = time.monotonic() + manners.wait_s
    has_told = False
    while True:
        try:
            return Reservation(select({}), ()) if manners.share else reserve(select)
        except DeviceError as error:
            if time.monotonic() >= deadline:
                raise
            if not has_told:
                manners.tell(f"waiting for GPUs.\n{without_caller(str(error))}")
                has_told = True
        time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))


def _fits(samples: Sequence[DeviceSample], request: Request, demand: Demand, environ: Mapping[str, str]) -> bool:
    """Tell whether a demand could be met if no other run had reserved anything."""
    try:
        choose_gpus(samples, request, demand, environ)
    except DeviceError:
        return False
    return True


def choose_gpus(
    samples: Sequence[DeviceSample],
    request: Request,
    demand: Demand,
    environ: Mapping[str, str],
    holders: Mapping[str, Holder] | None = None,
) -> list[DeviceSample]:
    """Take the GPUs that are visible, asked for, and free enough; or one MIG instance.

    Args:
        samples: Every GPU of the box, in PCI order.
        request: How many, or which.
        demand: The same number, and what each must have.
        environ: As ``os.environ``.
        holders: The process that has reserved a GPU, by UUID.
    Raises:
        DeviceError: too few; the message has a table of every GPU.
    """
    visible = _list_visible(environ, samples)
    shown = {gpu.index for gpu in visible}
    everything = [*visible, *(gpu for gpu in samples if gpu.index not in shown)]
    refused = refuse_held(everything, holders or {})
    refused |= {i: _explain_absence(gpu, environ) for i, gpu in enumerate(everything) if i >= len(visible)}
    if request.indices:
        refused |= {i: "not asked for" for i, gpu in enumerate(everything) if gpu.index not in request.indices}
    chosen = _choose_kind(everything, demand, refused)
    return sorted(chosen, key=lambda gpu: request.indices.index(gpu.index)) if request.indices else chosen


def _list_visible(environ: Mapping[str, str], samples: Sequence[DeviceSample]) -> list[DeviceSample]:
    """List what CUDA could use: while nothing is hidden, also what is not a GPU's first MIG instance."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return resolve_environ(environ, samples)
    return [part for gpu in samples for part in ((gpu,) if gpu.mig_instances is None else gpu.mig_instances)]


def _choose_kind(everything: Sequence[DeviceSample], demand: Demand, refused: Mapping[int, str]) -> list[DeviceSample]:
    """Take GPUs; if not even one fits, and one will do, take a MIG instance."""
    instances = {i: _ALONE for i, gpu in enumerate(everything) if gpu.instance is not None}
    try:
        return choose(everything, demand, {**instances, **refused})
    except DeviceError:
        if demand.num_required > 1 or not instances:
            raise
        return choose(everything, replace(demand, count=1, min_count=None), refused)


def _explain_absence(gpu: DeviceSample, environ: Mapping[str, str]) -> str:
    if gpu.mig_instances == ():
        return "in MIG mode without an instance"
    return f"hidden by CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', '')!r}"


def _explain_cpu(demand: Demand, environ: Mapping[str, str]) -> str:
    text = environ.get("CUDA_VISIBLE_DEVICES")
    among = "" if text is None else f" among CUDA_VISIBLE_DEVICES={text!r}"
    with_free = "" if demand.min_free_bytes is None else f" with {format_size(demand.min_free_bytes)} free"
    return f"no GPU{with_free}{among} fits: the script runs on the CPU."
