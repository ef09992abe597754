"""The two faults of a foreign file: its format is not supported, or it is damaged."""

from pathlib import Path

from everygpu.checkpoint.brief import cut
from everygpu.errors import CheckpointDamagedError, CheckpointForeignError


def refused(path: Path, what: str, advice: str) -> CheckpointForeignError:
    """Say what a file is and why it is not read.

    Args:
        path: The file.
        what: Continues "got PATH, ".
        advice: A sentence: what to do.
    """
    return CheckpointForeignError(
        f"load: the file must be one that can be read without executing anything in it, got {path}, "
        f"{cut(what)}. {advice}"
    )


def broken(path: Path, what: str) -> CheckpointDamagedError:
    """Say how a file is damaged.

    Args:
        path: The file.
        what: Continues "got PATH that ".
    """
    return CheckpointDamagedError(
        f"load: the file must be whole, got {path} that {cut(what)}. Nothing was loaded; fetch or save it again."
    )
