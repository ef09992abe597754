"""Print results, and read paths. Output that can't be written ends the command with an exit code and no traceback."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from everygpu.errors import EveryGPUError

CLOSED_PIPE = 141
"""128 and SIGPIPE: what shells report of programs that were writing when their reader left."""

_PIPED_WIDTH = 200  # rich takes 80 columns for a pipe, and would fold the UUIDs
_CALLER = re.compile(r"[A-Za-z_][\w.]*: ")


class UserPath(click.Path):
    """A path whose ``~`` is the home: in ``--json=~/rows.json`` a shell leaves it as it is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(os.path.expanduser(value), param, ctx)


class Output(Console):
    """A console that raises what goes wrong when it writes."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _output_errors():
            super().__exit__(kind, error, trace)

    def on_broken_pipe(self) -> None:
        """Let the command end as it does when anything else finds the pipe closed; rich would end with 1."""
        raise BrokenPipeError


def make_console(piped_width: int = _PIPED_WIDTH) -> Output:
    """Make a console that prints names as they are, and doesn't fold tables in a pipe."""
    console = Output(markup=False, emoji=False, highlight=False)
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


def check_output(verb: str | None) -> None:
    """Refuse to run without an output, before anything is done; a script may do without one.

    Raises:
        click.ClickException: the output is closed.
    """
    if sys.stdout is None and verb != "run":
        raise click.ClickException("The output is closed. Redirect it to a file, or to /dev/null.")


def flush_output() -> None:
    """Have all that was printed arrive, while there still is a place to say that it doesn't."""
    if sys.stdout is not None:
        with _output_errors():
            sys.stdout.flush()


@contextmanager
def plain_end() -> Iterator[None]:
    """End without a word when the reader of the output has left, as other programs do; with one line on a full disk.

    Raises:
        click.ClickException: the system refuses to read or write something.
    """
    try:
        yield
    except BrokenPipeError:
        _drop_output()
        sys.exit(CLOSED_PIPE)
    except OSError as cause:
        if isinstance(cause, EveryGPUError):
            raise
        if cause.filename is None:  # what has no name is the output: click's own help, for instance
            raise _refuse(cause) from cause
        raise click.ClickException(f"{cause.strerror}: {cause.filename}") from cause


def without_caller(message: str) -> str:
    """Take off the name of the Python function that an error begins with."""
    return message[found.end() :] if (found := _CALLER.match(message)) else message


@contextmanager
def _output_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as cause:
        raise _refuse(cause) from cause


def _refuse(cause: OSError) -> click.ClickException:
    _drop_output()
    return click.ClickException(f"Can't write the output: {cause}. Make room, or print elsewhere.")


def _drop_output() -> None:
    """Have what is still buffered lead nowhere: the interpreter would try again to write it, and complain."""
    with suppress(OSError, ValueError, AttributeError):  # no file of the system's, as in tests
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
