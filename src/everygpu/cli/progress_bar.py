"""The progress bar of every verb: on a terminal's error stream, after a second, and gone when the work is done."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from everygpu.cli.text import harmless

DELAY_S = 1.0
"""Work that is done before shows no bar."""


class Bar:
    """The bar of one piece of work. Where none is shown, its methods change nothing that is seen."""

    def __init__(self, what: str, total: float | None, *columns: ProgressColumn, console: Console) -> None:
        # Nothing is redirected: forked processes, such as a DataLoader's, would inherit rich's locks.
        self.progress = _Progress(
            *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._task = self.progress.add_task(harmless(what), total=total)

    def advance(self, amount: float = 1) -> None:
        """Count what was done since the last call."""
        self.progress.advance(self._task, amount)

    def update(self, what: str, *, completed: float | None = None, total: float | None = None) -> None:
        """Say what is being done, how much of it is done, and how much there is to do; what is left out stays."""
        self.progress.update(self._task, description=harmless(what), completed=completed, total=total)

    @contextmanager
    def measured(self, what: str, total: float, measure: Callable[[], float]) -> Iterator[None]:
        """Begin another part of the work, for which a function says how much is done, each time the bar is drawn."""
        self.progress.reset(self._task, total=total, description=harmless(what))
        self.progress.before_drawing = lambda: self.progress.update(self._task, completed=measure())
        try:
            yield
        finally:
            self.progress.before_drawing = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bar away while the block prints something."""
        is_shown = self.progress.live.is_started
        self.erase()
        yield
        if is_shown:
            self.progress.start()

    def erase(self) -> None:
        """Take it away where it is shown, and give the cursor back."""
        if self.progress.live.is_started:
            self.progress.stop()


class _Progress(Progress):
    before_drawing: Callable[[], None] | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.before_drawing is not None:
            self.before_drawing()
        return super().get_renderables()


@contextmanager
def show_bar(what: str, total: float | None = None, *, unit: str = "bytes", quiet: bool = False) -> Iterator[Bar]:
    """Show a bar on a terminal's error stream while the block runs, and nothing elsewhere.

    Args:
        what: Names the work.
        total: How much there is to do; None where that isn't known.
        unit: Of what there is to do, as a plural.
        quiet: Whether to show none at all, as with JSON.
    """
    console = Console(stderr=True)
    name = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    amount = [DownloadColumn(binary_units=True)] if unit == "bytes" else [MofNCompleteColumn(), TextColumn(unit)]
    bar = Bar(what, total, name, BarColumn(bar_width=20), *amount, TimeRemainingColumn(), console=console)
    # FORCE_COLOR has rich take a pipe for a terminal.
    if quiet or not console.is_interactive or not console.file.isatty():
        yield bar
        return
    timer = threading.Timer(DELAY_S, bar.progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield bar
    finally:
        timer.cancel()
        timer.join()
        with suppress(OSError):  # the terminal is gone
            bar.erase()
