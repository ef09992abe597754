"""Log lines of a run: once, where all ranks would write the same."""

import logging

logger = logging.getLogger("everygpu")


class OncePerRun(logging.Filter):
    """Leaves warnings and what is below to rank 0; errors come from every rank, and name it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a line is written."""
        if record.levelno < logging.ERROR:
            return self._rank == 0
        record.msg = f"rank {self._rank}: {record.msg}"
        return True


def log_once(rank: int) -> None:
    """Have the package's log lines written once for a run from now on."""
    for old in [f for f in logger.filters if isinstance(f, OncePerRun)]:
        logger.removeFilter(old)
    logger.addFilter(OncePerRun(rank))
