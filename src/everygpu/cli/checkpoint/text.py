"""What the verbs share: where to print, and text from files made harmless."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text


def open_console() -> Console:
    """Return where results are printed; a pipe gets lines as long as they are."""
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 10_000  # rich takes 80 columns for a pipe
    return console


def harmless(text: object) -> str:
    """Escape what isn't printable: names come from files that anyone may have made, and a terminal obeys.

    Likewise what the output's encoding has no letter for.
    """
    printable = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in str(text))
    encoding = sys.stdout.encoding or "utf-8"
    return printable.encode(encoding, "backslashreplace").decode(encoding)


def plain(text: object) -> Text:
    """Make text that rich prints as it stands."""
    return Text(harmless(text))


@contextmanager
def open_progress(what: str, total: int | None = None) -> Iterator[Progress]:
    """Show a bar on a terminal's error stream while the block runs, and nothing elsewhere.

    Args:
        what: What is being done.
        total: How much there is to do; None where that isn't known.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what, total=total)
        yield progress
