"""What the threads of this process are doing that could hang, for a watchdog that looks from a thread of its own.

Next to nothing is spent while nothing watches: an operation is entered by one call that returns at once.
"""

import os
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from inspect import CO_GENERATOR
from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SAVING_S = 60.0
"""A checkpoint that is being written has this long to be finished before its process is ended."""
SAVING_THREAD = "everygpu-save"

_get_ident = threading.get_ident


class Progress:
    """The operations that threads of this process are in, while something watches."""

    def __init__(self) -> None:
        self.is_watched = False
        self.nothing = nullcontext()
        """Entered while nothing watches: making one for each operation would double its time."""
        self.operations: dict[int, Operation] = {}
        """The innermost one of each thread, by the thread's ``ident``."""
        self.num_begun = 0
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self.is_watched = False
        self.operations.clear()


class Operation:
    """What a thread is in, between ``__enter__`` and ``__exit__``."""

    __slots__ = ("_outer", "_progress", "code", "device", "num_inner", "replica", "waits_for", "what")

    def __init__(
        self,
        progress: Progress,
        code: CodeType,
        what: str,
        device: "torch.device | None",
        replica: int | None,
        waits_for: str | None,
    ) -> None:
        self._progress, self.code, self.what, self.device = progress, code, what, device
        self.replica, self.waits_for = replica, waits_for
        self.num_inner = 0
        """How many operations within it have ended."""

    def __enter__(self) -> None:
        progress, ident = self._progress, _get_ident()
        self._outer = progress.operations.get(ident)
        progress.operations[ident] = self
        progress.num_begun += 1

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        outer = self._outer
        if outer is None:
            self._progress.operations.pop(_get_ident(), None)
        else:
            outer.num_inner += 1
            self._progress.operations[_get_ident()] = outer

    def __str__(self) -> str:
        replica = "" if self.replica is None else f" of replica {self.replica}"
        device = "" if self.device is None else f" on {self.device}"
        return f"{self.what}{replica}{device}"


@cache
def progress() -> Progress:
    """Return that of this process."""
    return Progress()


def running(
    what: str,
    device: "torch.device | None" = None,
    replica: int | None = None,
    waits_for: str | None = None,
) -> AbstractContextManager[None]:
    """Say what the calling thread does within; the block is one of the calling function.

    Args:
        what: A noun, as "forward".
        device: Where.
        replica: Of which one, by its position.
        waits_for: ``"ranks"`` or ``"replicas"`` where it goes on as soon as these do.
    """
    found = progress()
    if not found.is_watched:
        return found.nothing
    frame: Any = sys._getframe(1)
    if frame.f_code.co_flags & CO_GENERATOR:  # a context manager's, which is on no stack while its block runs
        frame = frame.f_back.f_back
    return Operation(found, frame.f_code, what, device, replica, waits_for)


def is_saving() -> bool:
    """Tell whether a checkpoint is being written in the background."""
    return any(thread.name == SAVING_THREAD for thread in threading.enumerate())
