"""Types of numeric options."""

import math
from typing import Any

import click

from everygpu.cli.output import without_caller
from everygpu.errors import OptionError
from everygpu.units import parse_size


class FiniteRange(click.FloatRange):
    """A finite number in a range: ``FloatRange`` lets nan through, which no comparison finds outside."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"must be a finite number, got {value!r}.", param, ctx)
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
            self.fail(f"needs a unit, got {value!r}. Write {value}GiB, or {value}B for bytes.", param, ctx)
        return str(value)
