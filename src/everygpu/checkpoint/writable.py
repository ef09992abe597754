"""The error of a write that the system refuses."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everygpu.errors import CheckpointError


@contextmanager
def must_be_writable(path: Path, caller: str, what: str = "writable") -> Iterator[None]:
    """Raise the system's errors in the block as ours; what was at the path is whole.

    Raises:
        CheckpointError: the system refuses something in the block.
    """
    try:
        yield
    except CheckpointError:  # some of ours are errors of the system as well
        raise
    except OSError as cause:
        todo = "make room or choose another place"
        if cause.errno == errno.EMFILE:
            todo = "close files, or allow more of them, as `ulimit -n 65536` does"
        raise CheckpointError(
            f"{caller}: {path} must be {what}, got {cause}. What was there before is untouched; {todo}."
        ) from cause
