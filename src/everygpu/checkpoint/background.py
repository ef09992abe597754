"""One piece of work at a time in a thread of its own, whose error is raised at the next call."""

import logging
import threading
from collections.abc import Callable

_LOG = logging.getLogger("everygpu")


class Background:
    """Runs work beside the caller; the thread ends with the work."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Begin a piece of work, after the one before it.

        Raises:
            BaseException: what the work before it raised; the new one is not begun.
        """
        self.wait()
        # No daemon: the interpreter waits for it at its end.
        self._thread = threading.Thread(target=self._run, args=(work,), name="everygpu-save")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the work is done.

        Raises:
            BaseException: what it raised, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what the work has raised by now, once; don't wait for it."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            _LOG.error("A checkpoint saved in the background failed: %s", error)
            self._error = error
