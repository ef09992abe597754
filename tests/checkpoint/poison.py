"""Pickles that would leave a trace if anyone ran them."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Poison:
    """When unpickled, makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return open, (str(self.canary), "w")


@contextmanager
def must_not_run(directory: Path) -> Iterator[Poison]:
    """Yield a poison and see at the end that it was not run; that it works is tried first."""
    tried = directory / "tried"
    pickle.loads(pickle.dumps(Poison(tried))).close()
    assert tried.exists()
    tried.unlink()
    canary = directory / "canary"
    yield Poison(canary)
    assert not canary.exists(), "something in the file was executed"
