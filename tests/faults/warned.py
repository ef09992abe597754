"""What a block warns of."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def warnings() -> Iterator[list[str]]:
    """Return the warnings of the package that are logged within; for tests that run several times, or in a child."""
    handler = _Lines()
    logger = logging.getLogger("everygpu")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
