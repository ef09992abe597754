"""Choose among several ways to lay something out by the width of the terminal."""

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement


class Fitting:
    """The first of several layouts that fits the width it is shown in, else the last; chosen anew when that changes.

    Args:
        layouts: From the widest to the narrowest.
    """

    def __init__(self, layouts: Sequence[RenderableType]) -> None:
        self._layouts = layouts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        *_, last = self._layouts
        unlimited = options.update(width=10_000)
        width = options.max_width
        yield next((x for x in self._layouts if Measurement.get(console, unlimited, x).maximum <= width), last)
