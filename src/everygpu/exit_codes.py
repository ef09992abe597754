"""Exit codes with which a run ends, and what they say to what has started it."""

import os
from contextlib import suppress

from everygpu.errors import CheckpointError, DeviceError, OptionError

OTHER = 1
WRONG_OPTION = 2
NO_DEVICE = 3
UNREADABLE = 4
BAD_NUMBERS = 5
"""Numbers of the training are no longer finite, or replicas' parameters differ."""
STUCK = 6
"""The watchdog has ended a run that made no progress, or that has lost a GPU."""
INTERRUPTED = 130
"""After Ctrl-C: 128 and the signal, as a shell says it."""
STOPPED = 143
"""A signal has asked the run to end, and its checkpoint is saved: 128 and SIGTERM."""
MEANINGS = {
    OTHER: "any other error",
    WRONG_OPTION: "wrong option",
    NO_DEVICE: "no such GPU, or too few that fit",
    UNREADABLE: "unreadable checkpoint",
    BAD_NUMBERS: "`run`: numbers not finite, or replicas differ",
    STUCK: "`run`: no progress, or a GPU was lost",
    INTERRUPTED: "Ctrl-C",
    STOPPED: "SIGTERM",
}
REASON_FILE = "EVERYGPU_REASON_FILE"
"""Variable that names a new file for the reason: a script may end with 5 or 6 of its own."""


def code_of(error: Exception) -> int:
    """Return the code with which a command ends by an error."""
    kinds = {OptionError: WRONG_OPTION, DeviceError: NO_DEVICE, CheckpointError: UNREADABLE}
    return next((code for kind, code in kinds.items() if isinstance(error, kind)), OTHER)


def report_reason(reason: str) -> None:
    """Write why everygpu ends this process into the file that is asked for, if one is."""
    if path := os.environ.get(REASON_FILE):
        with (
            suppress(OSError),
            open(path, "x", encoding="utf-8", errors="backslashreplace") as file,
        ):  # never over another
            file.write(f"{reason}\n")
