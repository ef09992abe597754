"""Print results, and read paths."""

import os
import re
import sys
from typing import Any

import click
from rich.console import Console
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
    """Escape what isn't printable, and what the output's encoding has no letter for.

    Names of processes, runs and tensors may contain terminal control sequences. Letters in ``keep`` stay: ``"\\n"``
    for text of several lines.
    """
    printable = "".join(x if x.isprintable() or x in keep else ascii(x)[1:-1] for x in str(text))
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # a script may run without an output
    return printable.encode(encoding, "backslashreplace").decode(encoding)


def plain(text: object) -> Text:
    """Make text that rich prints as it stands."""
    return Text(harmless(text))


def say(text: str) -> None:
    """Write for the user, on the error stream: standard output is the script's, or has the results."""
    if sys.stderr is not None:
        Console(stderr=True).out(harmless(text, keep="\n"), highlight=False)


def without_caller(message: str) -> str:
    """Take off the name of the Python function that an error begins with."""
    return message[found.end() :] if (found := _CALLER.match(message)) else message
