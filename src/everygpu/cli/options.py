"""Options that several verbs have: filters of GPUs, and the types of numbers."""

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import click

from everygpu.cli.output import without_caller
from everygpu.devices.select import Demand, SortKey, check_demand
from everygpu.errors import OptionError
from everygpu.units import parse_size


class FiniteRange(click.FloatRange):
    """A finite number in a range: ``FloatRange`` lets nan through, which no comparison finds outside."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class Size(click.ParamType[str]):
    """A number of bytes with its unit: without one, gigabytes are as likely meant."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            num_bytes = parse_size(value)
        except OptionError as error:
            self.fail(without_caller(str(error)), param, ctx)
        if num_bytes and str(value).strip()[-1].isdigit():
            self.fail(f"{value!r} has no unit. Write {value}GiB, or {value}B for bytes.", param, ctx)
        return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What ``--gpus`` says."""

    count: int | None = None
    """How many; None for every one that fits, or those in ``indices``."""
    indices: tuple[int, ...] = ()
    """``nvidia-smi --query-gpu=index``: exactly these, in this order."""

    @property
    def num_asked(self) -> int | None:
        """How many GPUs were asked for, in either way."""
        return self.count or len(self.indices) or None


def read_request(context: click.Context, option: click.Parameter, text: str | None) -> Request | None:
    """Read ``auto``, a count such as ``2``, or indices such as ``0,2`` (``2,`` is GPU 2 alone)."""
    if text is None or text == "auto":
        return None if text is None else Request()
    if re.fullmatch(r"[1-9][0-9]*", text):
        return Request(count=int(text))
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*,?", text) or text == "0":
        raise click.BadParameter(f"{text!r} is not 'auto', a count, or indices such as '0,2' or '0,'.")
    indices = tuple(int(index) for index in text.rstrip(",").split(","))
    if len(set(indices)) < len(indices):
        raise click.BadParameter(f"{text!r} names a GPU twice.")
    return Request(indices=indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The values of the filters, as ``select_devices`` takes them."""

    min_count: int | None = None
    min_free: str | None = None
    min_total: str | None = None
    max_utilization: float | None = None
    name: str | None = None
    exclude: tuple[str, ...] = ()
    sort: SortKey = "free"

    @property
    def are_given(self) -> bool:
        """Whether any option was given."""
        return self != Filters()

    def demand(self, request: Request) -> Demand:
        """Make a demand for the GPUs of ``--gpus``; raise ``OptionError`` for one that means nothing."""
        return check_demand(
            count=request.num_asked,
            min_count=self.min_count,
            min_free_memory=self.min_free,
            min_total_memory=self.min_total,
            max_utilization=self.max_utilization,
            name=self.name,
            exclude=[entry.strip() for text in self.exclude for entry in text.split(",")],
            sort=self.sort,
        )


_OPTIONS = (
    click.option("--min-count", type=int, metavar="N", help="Accept fewer GPUs, down to this many."),
    click.option("--min-free", type=Size(), metavar="SIZE", help="Minimum free memory, such as 8GiB."),
    click.option("--min-total", type=Size(), metavar="SIZE", help="Minimum total memory."),
    click.option("--max-utilization", type=float, metavar="PCT", help="Maximum utilization now."),
    click.option("--name", metavar="TEXT", help="Part of the GPU's name, such as H100."),
    click.option("--exclude", multiple=True, metavar="GPU", help="Skip these indices, names or UUIDs: 0,T400."),
    click.option("--sort", type=click.Choice(get_args(SortKey)), default="free", show_default=True,
                 help="Which GPUs come first."),
)  # fmt: skip


def filter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the filters to a command, which gets them as ``filters``."""

    @functools.wraps(command)
    def collect(**options: Any) -> None:
        chosen = {name: options.pop(name) for name in Filters.__slots__}
        command(filters=Filters(**chosen), **options)

    for option in reversed(_OPTIONS):
        collect = option(collect)
    return collect
