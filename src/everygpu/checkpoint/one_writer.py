"""Under ranks: rank 0 writes, and the others wait until it has.

They read a note that rank 0 leaves, instead of meeting it in a collective: a save that only rank 0 calls, as in
``if rank == 0``, waits for nothing.
"""

import json
from collections import Counter
from collections.abc import Callable
from functools import cache

from everygpu import errors
from everygpu.errors import CheckpointError
from everygpu.ranks.group import joined
from everygpu.ranks.membership import is_main

BEGIN_S = 600.0
"""How long the others wait for rank 0 to begin to write, as NCCL's collectives wait for a rank that is late."""


class OneWriter:
    """Pairs what rank 0 writes with what the others wait for, each by a key and a count."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    @property
    def is_writing(self) -> bool:
        """Whether this is the process that writes."""
        return is_main()

    def next_key(self, name: str) -> str:
        """Name the next piece of work of a name, as "save to runs/last"; the same on all ranks."""
        self._counts[name] += 1
        return f"{name}, number {self._counts[name]}"

    def write(self, key: str, work: Callable[[], object]) -> None:
        """Do the work on rank 0, and wait for it on the others.

        Raises:
            CheckpointError: the work has raised it, on rank 0.
        """
        if not self.is_writing:
            self.wait(key)
            return
        self._leave(_begun(key), None)
        try:
            work()
        except BaseException as error:
            self._leave(key, {"kind": type(error).__name__, "message": str(error)})
            raise
        self._leave(key, None)

    def wait(self, key: str) -> None:
        """Wait until rank 0 has done the work; without a group that has been joined, there is no way to.

        Raises:
            CheckpointError: the work has raised it there, or ended in an error of another type.
            RankError: rank 0 has failed, or ended without the work.
        """
        group = joined()
        if group is None:
            return
        group.read_note(_begun(key), BEGIN_S)
        found = json.loads(group.read_note(key))
        if found is None:
            return
        kind = getattr(errors, found["kind"], None)
        if isinstance(kind, type) and issubclass(kind, errors.EveryGPUError):
            raise kind(found["message"])
        raise CheckpointError(f"save: rank 0 must be able to write, got {found['kind']} there: {found['message']}")

    def _leave(self, key: str, outcome: object) -> None:
        group = joined()
        if group is not None:
            group.leave_note(key, json.dumps(outcome))


def _begun(key: str) -> str:
    return f"begin to {key}"


@cache
def one_writer() -> OneWriter:
    """Return that of this process."""
    return OneWriter()
