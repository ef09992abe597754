"""Exit codes with which a run ends, and what they say to what has started it."""

import os
from contextlib import suppress
from pathlib import Path

BAD_NUMBERS = 5
"""Numbers of the training are no longer finite, or replicas' parameters differ."""
STUCK = 6
"""The watchdog has ended a run that stood still, or that has lost a GPU."""
INTERRUPTED = 130
"""After Ctrl-C: 128 and the signal, as a shell says it."""
STOPPED = 143
"""A signal has asked the run to end, and its checkpoint is saved: 128 and SIGTERM."""
REASON_FILE = "EVERYGPU_REASON_FILE"
"""Variable that names a file for the reason: a script may end with 5 or 6 of its own."""


def tell_reason(reason: str) -> None:
    """Write why everygpu ends this process into the file that is asked for, if one is."""
    if path := os.environ.get(REASON_FILE):
        with suppress(OSError):
            Path(path).write_text(f"{reason}\n", encoding="utf-8")
