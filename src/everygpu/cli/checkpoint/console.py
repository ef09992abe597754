"""Consoles and progress bars that the verbs share."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from everygpu.cli.output import Output
from everygpu.cli.text import harmless


def open_console() -> Output:
    """Return where results are printed; a pipe gets lines as long as they are."""
    console = Output(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 10_000  # rich takes 80 columns for a pipe
    return console


@contextmanager
def open_progress(what: str, total: int | None = None) -> Iterator[Progress]:
    """Show a bar on a terminal's error stream while the block runs, and nothing elsewhere.

    Args:
        what: Names the work that progresses.
        total: How much there is to do; None where that isn't known.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(harmless(what), total=total)
        yield progress
