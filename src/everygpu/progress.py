"""The operations that threads of this process are in, for a watchdog. While none watches, noting one is one call."""

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SAVING_THREAD = "everygpu-save"
"""The name of a thread that writes a checkpoint: a watchdog lets it finish."""
_get_ident = threading.get_ident


@dataclass(slots=True)
class Progress:
    """The open operations, while something watches."""

    is_watched: bool = False
    nothing: AbstractContextManager[None] = field(default_factory=nullcontext)
    """Entered while nothing watches: making one for each operation would double its time."""
    operations: "dict[int, Operation]" = field(default_factory=dict)
    """The innermost one of each thread, by the thread's ``ident``."""
    num_begun: int = 0


@dataclass(slots=True, eq=False)
class Operation:
    """What a thread is in, between ``__enter__`` and ``__exit__``."""

    progress: Progress
    what: str
    waits_for: str | None
    _outer: "Operation | None" = None

    def __enter__(self) -> None:
        ident = _get_ident()
        self.progress.num_begun += 1
        self._outer = self.progress.operations.get(ident)
        self.progress.operations[ident] = self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._outer is None:
            self.progress.operations.pop(_get_ident(), None)
        else:
            self.progress.operations[_get_ident()] = self._outer


@cache
def progress() -> Progress:
    """Return that of this process."""
    return Progress()


def running(
    what: str, device: "torch.device | None" = None, replica: int | None = None, waits_for: str | None = None
) -> AbstractContextManager[None]:
    """Note what the calling thread does in a ``with`` block.

    Args:
        what: A noun, as "forward".
        device: Where.
        replica: Of which one, by its position.
        waits_for: ``"ranks"`` or ``"replicas"`` if it continues as soon as these do.
    """
    found = progress()
    if not found.is_watched:
        return found.nothing
    of_replica = "" if replica is None else f" of replica {replica}"
    return Operation(found, f"{what}{of_replica}{'' if device is None else f' on {device}'}", waits_for)
