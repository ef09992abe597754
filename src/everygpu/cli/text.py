"""Escape foreign text: names of processes, runs and tensors may contain terminal control sequences."""

import sys

from rich.text import Text


def harmless(text: object, *, keep: str = "") -> str:
    """Escape what isn't printable, and what the output's encoding has no letter for.

    Args:
        text: Of a file, the driver, another process, or an error that quotes them.
        keep: Letters that stay: ``"\\n"`` for text of several lines.
    """
    printable = "".join(x if x.isprintable() or x in keep else ascii(x)[1:-1] for x in str(text))
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # a script may run without an output
    return printable.encode(encoding, "backslashreplace").decode(encoding)


def plain(text: object) -> Text:
    """Make text that rich prints as it stands."""
    return Text(harmless(text))
