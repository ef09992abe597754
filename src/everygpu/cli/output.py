"""Print results and the bar of long work, and read paths."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

_PIPED_WIDTH = 200  # rich takes 80 columns for a pipe, and would fold the UUIDs
_CALLER = re.compile(r"[A-Za-z_][\w.]*: ")


class UserPath(click.Path):
    """A path whose ``~`` is the home: in ``--json=~/rows.json`` a shell leaves it as it is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(os.path.expanduser(value), param, ctx)


def make_console(piped_width: int = _PIPED_WIDTH) -> Console:
    """Make a console that prints names as they are, and doesn't fold tables in a pipe."""
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = piped_width
    return console


def harmless(text: object, *, keep: str = "") -> str:
    """Escape what isn't printable, as control sequences in names, nor in ``keep``, or has no letter in the output."""
    printable = "".join(x if x.isprintable() or x in keep else ascii(x)[1:-1] for x in str(text))
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # a script may run without an output
    return printable.encode(encoding, "backslashreplace").decode(encoding)


def plain(text: object) -> Text:
    """Make text that rich prints verbatim."""
    return Text(harmless(text))


def say(text: str) -> None:
    """Write for the user, on the error stream if that can be: standard output is the script's, or has the results."""
    if sys.stderr is not None:
        with suppress(OSError):
            Console(stderr=True).out(harmless(text, keep="\n"), highlight=False)


def without_caller(message: str) -> str:
    """Take off the name of the Python function that an error begins with."""
    return message[found.end() :] if (found := _CALLER.match(message)) else message


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
