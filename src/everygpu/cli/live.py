"""Refresh a display until Ctrl-C."""

import time
from collections.abc import Callable

import click
from rich.console import RenderableType
from rich.live import Live

from everygpu.cli.numbers import FiniteRange
from everygpu.cli.output import Output

PIPED_WIDTH = 200  # rich takes 80 columns for a pipe, and would fold the UUIDs


def make_console() -> Output:
    """Make a console that prints names as they are, and doesn't fold tables in a pipe."""
    console = Output(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    return console


def show_live(build: Callable[[], RenderableType], interval_s: float) -> None:
    """Redraw in place; in a pipe, print one after the other.

    Args:
        build: Makes what is shown, anew each time.
        interval_s: Seconds between two.
    """
    console = make_console()
    try:
        if not console.is_terminal:
            while True:
                console.print(build())
                time.sleep(interval_s)
        with Live(build(), console=console, auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(interval_s)
                live.update(build(), refresh=True)
    except KeyboardInterrupt:
        return  # that is how one leaves it


def interval_option(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--interval`` to a command."""
    return click.option(
        "--interval",
        "interval_s",
        type=FiniteRange(min=0.1, max=86400),
        default=2.0,
        show_default=True,
        metavar="SECONDS",
        help="How often a live view is renewed.",
    )(command)
