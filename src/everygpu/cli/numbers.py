"""Numbers that options take."""

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A finite number in a range: ``FloatRange`` lets nan through, which no comparison finds outside."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"must be a finite number, got {value!r}.", param, ctx)
        return number
