"""The progress bar of every verb: on a terminal's error stream, after a second, and gone when the work is done."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from everygpu.cli.text import harmless
from everygpu.units import format_size

DELAY_S = 1.0
"""Work that is done before shows no bar."""
_REFRESH_S = 0.1
_BYTES = "bytes"


class Bar:
    """The bar of one piece of work. Where none is shown, its methods change nothing that is seen."""

    def __init__(self, progress: Progress, what: str, total: float | None, unit: str) -> None:
        self._progress = progress
        self._drawing = threading.Lock()
        self._ended = threading.Event()
        self._measure: Callable[[], float] | None = None
        progress.add_task(harmless(what), total=total, unit=unit, at_s=0.0)

    @property
    def _task(self) -> Task:
        return self._progress.tasks[0]

    def advance(self, amount: float = 1) -> None:
        """Count what was done since the last call."""
        self.update(completed=self._task.completed + amount)

    def update(self, what: str | None = None, *, completed: float | None = None, total: float | None = None) -> None:
        """Say what is being done, how much of it is done, or how much there is to do; what is left out stays."""
        task = self._task
        at_s = task.fields["at_s"] if completed in (None, task.completed) else task.elapsed or 0.0
        description = None if what is None else harmless(what)
        self._progress.update(task.id, description=description, completed=completed, total=total, at_s=at_s)

    @contextmanager
    def measured(self, what: str, total: float, measure: Callable[[], float]) -> Iterator[None]:
        """Begin another part of the work, for which a function says how much is done, each time the bar is drawn."""
        fields = {**self._task.fields, "at_s": 0.0}
        self._progress.reset(self._task.id, total=total, description=harmless(what), **fields)
        self._measure = measure
        try:
            yield
        finally:
            self._measure = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bar away while the block prints something."""
        with self._drawing:
            self.erase()
            yield

    def erase(self) -> None:
        """Take it away where it is shown, and give the cursor back."""
        if self._progress.live.is_started:
            with suppress(OSError):  # the terminal is gone
                self._progress.stop()

    def draw(self) -> None:
        """Show it as it is now."""
        if (measure := self._measure) is not None:
            self.update(completed=max(self._task.completed, min(measure(), self._task.total or 0)))
        with self._drawing:
            self._progress.start()
            self._progress.refresh()

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draw it now and then while the block runs, whatever that waits for."""
        thread = threading.Thread(target=self._draw_until_ended, name="everygpu-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            self.erase()

    def _draw_until_ended(self) -> None:
        pause_s = DELAY_S
        while not self._ended.wait(pause_s):
            try:
                self.draw()
            except OSError:
                return
            pause_s = _REFRESH_S


class _WhatColumn(ProgressColumn):
    """What is being done; the first to be cut where the terminal is narrow."""

    def render(self, task: Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


class _AmountColumn(ProgressColumn):
    """What is done of what there is to do, with its unit."""

    def render(self, task: Task) -> Text:
        amounts = [value for value in (task.completed, task.total) if value is not None]
        unit = task.fields["unit"]
        if amounts == [0]:  # nothing is known yet
            return Text("")
        if unit == _BYTES:
            return Text(" of ".join(format_size(int(value)) for value in amounts))
        noun = unit.removesuffix("s") if amounts[-1] == 1 else unit
        return Text(" of ".join(f"{value:g}" for value in amounts) + f" {noun}")


class _TimeColumn(ProgressColumn):
    """How long it may still take; how long it has taken where that can't be known."""

    max_refresh = None

    def render(self, task: Task) -> Text:
        left_s = remaining_s(task.completed, task.total, task.fields["at_s"], task.elapsed or 0.0)
        return Text(clock(task.elapsed or 0.0) if left_s is None else f"{clock(left_s)} left")


def remaining_s(completed: float, total: float | None, at_s: float, now_s: float) -> float | None:
    """Estimate the seconds that work still takes, from what the part that is done has taken.

    Args:
        completed, total: How much is done, and of how much; total is None where that isn't known.
        at_s: When so much was done, in seconds since the beginning.
        now_s: How late it is.
    """
    if not total or not completed:
        return None
    return max(0.0, at_s / completed * (total - completed) - (now_s - at_s))


def clock(seconds: float) -> str:
    """Write a duration as ``1:05``, or ``2:01:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def show_bar(what: str, total: float | None = None, *, unit: str = _BYTES, quiet: bool = False) -> Iterator[Bar]:
    """Show a bar on a terminal's error stream while the block runs, and nothing elsewhere.

    Args:
        what: Names the work.
        total: How much there is to do; None where that isn't known.
        unit: Of what there is to do, as a plural.
        quiet: Whether to show none at all, as with JSON.
    """
    console = Console(stderr=True)
    whole = Column(no_wrap=True)
    columns = _WhatColumn(Column()), BarColumn(bar_width=20), _AmountColumn(whole), _TimeColumn(whole)
    # Nothing is redirected: processes that are forked meanwhile, such as a DataLoader's, would inherit rich's locks.
    progress = Progress(
        *columns, console=console, transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    )
    bar = Bar(progress, what, total, unit)
    # FORCE_COLOR has rich take a pipe for a terminal.
    if quiet or not console.is_interactive or not console.file.isatty():
        yield bar
    else:
        with bar.drawn():
            yield bar
