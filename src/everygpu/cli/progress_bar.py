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
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from everygpu.cli.output import harmless

DELAY_S = 1.0
"""Work that is done before shows no bar."""


class Bar(Progress):
    """The bar of one piece of work. Where none is shown, its methods change nothing that is seen."""

    measure: Callable[[], float] | None = None
    """Says how much is done, each time the bar is drawn."""

    def advance_by(self, amount: float = 1) -> None:
        """Count what was done since the last call."""
        self.advance(self.task_ids[0], amount)

    def say(self, what: str, completed: float | None = None) -> None:
        """Say what is being done, and how much of it is done."""
        self.update(self.task_ids[0], description=harmless(what), completed=completed)

    @contextmanager
    def measured(self, what: str, total: float, measure: Callable[[], float]) -> Iterator[None]:
        """Begin another part of the work, for which a function says how much is done."""
        self.reset(self.task_ids[0], total=total, description=harmless(what))
        self.measure = measure
        try:
            yield
        finally:
            self.measure = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bar away while the block prints something."""
        is_shown = self.live.is_started
        self.erase()
        yield
        if is_shown:
            self.start()

    def erase(self) -> None:
        """Take it away where it is shown, and give the cursor back."""
        if self.live.is_started:
            self.stop()

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.measure is not None:
            self.update(self.task_ids[0], completed=self.measure())
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
    # Nothing is redirected: forked processes, such as a DataLoader's, would inherit rich's locks.
    bar = Bar(
        *(name, BarColumn(bar_width=20), *(amount if unit else ()), TimeRemainingColumn()),
        console=console, transient=True, redirect_stdout=False, redirect_stderr=False,
    )  # fmt: skip
    bar.add_task(harmless(what), total=total)
    # FORCE_COLOR has rich take a pipe for a terminal.
    if quiet or not console.is_interactive or not console.file.isatty():
        yield bar
        return
    timer = threading.Timer(DELAY_S, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield bar
    finally:
        timer.cancel()
        timer.join()
        with suppress(OSError):  # the terminal is gone
            bar.erase()
