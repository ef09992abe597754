"""The bar of long work: on a terminal's error stream, and gone when the work is done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from everygpu.cli.output import harmless


@contextmanager
def show_bar(what: str, num_bytes: int | None = None, *, quiet: bool = False) -> Iterator[Callable[[float], None]]:
    """Show a bar on a terminal while the block runs; yield a function that adds to the bytes done."""
    console = Console(stderr=True)
    # FORCE_COLOR has rich take a pipe for a terminal.
    is_shown = not quiet and console.is_interactive and console.file.isatty()
    name = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    amount = () if num_bytes is None else (DownloadColumn(binary_units=True), TimeRemainingColumn())
    # Nothing is redirected: forked processes, such as a DataLoader's, would inherit rich's locks.
    bar = Progress(
        *(name, BarColumn(bar_width=20), *amount),
        console=console, transient=True, redirect_stdout=False, redirect_stderr=False, disable=not is_shown,
    )  # fmt: skip
    with bar:
        task = bar.add_task(harmless(what), total=num_bytes)
        yield lambda done: bar.advance(task, done)
