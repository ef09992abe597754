"""Options that several verbs have: filters of GPUs, and the types of numbers."""

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import click

from everygpu.cli.output import without_caller
from everygpu.devices.select import Demand
from everygpu.errors import OptionError
from everygpu.units import parse_size


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


class Seconds(click.FloatRange):
    """A time, which nan is not: it passes every comparison with a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = super().convert(value, param, ctx)
        return seconds if math.isfinite(seconds) else self.fail(f"{value!r} is no time.", param, ctx)


def read_request(context: click.Context, option: click.Parameter, text: str | None) -> Demand | None:
    """Read ``auto``, a count such as ``2``, or indices such as ``0,2`` (``2,`` is GPU 2 alone)."""
    if text is None or text == "auto":
        return None if text is None else Demand()
    if re.fullmatch(r"[1-9][0-9]{0,8}", text):
        return Demand(count=int(text))
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*,?", text) or text == "0":
        raise click.BadParameter(f"{text!r} is not 'auto', a count, or indices such as '0,2' or '0,'.")
    indices = tuple(int(index) for index in text.rstrip(",").split(","))
    if len(set(indices)) < len(indices):
        raise click.BadParameter(f"{text!r} names a GPU twice.")
    return Demand(indices=indices)


def _read_excluded(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(entry.strip() for text in texts for entry in text.split(","))


Filters = Mapping[str, Any]
"""The filters that are given, by their names, which are those of ``Demand``."""


def option_group(argument: str, options: Mapping[str, Callable[..., Any]]) -> Callable[..., Callable[..., None]]:
    """Make a decorator that adds options to a command, which gets those that are given as one argument, by name."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def collect(**values: Any) -> None:
            found = {name: values.pop(name) for name in options}
            command(**values, **{argument: {name: x for name, x in found.items() if x not in (None, ())}})

        return functools.reduce(lambda made, option: option(made), list(options.values())[::-1], collect)

    return decorate


filter_options = option_group("filters", {
    "min_free_memory": click.option(
        "--min-free", "min_free_memory", type=Size(), metavar="SIZE", help="Minimum free memory, such as 8GiB."
    ),
    "max_utilization": click.option("--max-utilization", type=float, metavar="PCT", help="Maximum utilization now."),
    "name": click.option("--name", metavar="TEXT", help="Part of the GPU's name, such as H100."),
    "exclude": click.option(
        "--exclude", multiple=True, callback=_read_excluded, metavar="GPU",
        help="Skip these indices, names or UUIDs: 0,T400.",
    ),
})  # fmt: skip
