"""Ranks get as many batches each, from loaders that may end unevenly."""

from collections.abc import Callable
from typing import Any

from everygpu.errors import RankError
from everygpu.ranks.group import Group


class Lockstep:
    """Tells at each batch of one pass whether any rank has one; all ranks ask as often.

    While ranks have batches ready beyond the next one, what they say to each other travels beside the step before.

    Args:
        group: The ranks.
        must_match: Whether all loaders have to give as many batches.
    """

    def __init__(self, group: Group, *, must_match: bool) -> None:
        self._group, self._must_match = group, must_match
        self._num_ready = 0
        self._num_asked = 0
        self._most_ready = 0
        self._pending: Callable[[], int] | None = None
        self._example: Any = None

    def note(self, make_example: Callable[[], Any]) -> None:
        """Count a batch that this rank's loader has given; it may be any number ahead of the one that is asked for.

        Args:
            make_example: Makes a batch without rows, to give when the loader has ended; called once.
        """
        if self._num_ready == 0:
            self._example = make_example()
        self._num_ready += 1

    def goes_on(self, has_batch: bool) -> bool:
        """Tell whether any rank has the next batch.

        Args:
            has_batch: Whether this rank does; if not, its loader has ended.
        Raises:
            RankError: the loaders have to match, and only this one has ended.
        """
        position, self._num_asked = self._num_asked, self._num_asked + 1
        if self._pending is not None:
            self._most_ready = self._pending()
        if self._most_ready <= position:
            self._most_ready = self._ask_all() if position == 0 else self._group.begin_max(self._num_ready)()
        if self._most_ready <= position:
            self._pending = None
            return False
        if not has_batch and self._must_match:
            raise RankError(
                f"ranks: every rank's loader must give the same batches, got only {position} in a "
                f"pass on rank {self._group.rank}. If each rank has data of its own, pass sharded=True."
            )
        self._pending = self._group.begin_max(self._num_ready)
        return True

    def empty_batch(self) -> Any:
        """Return a batch without rows, of the structure that the others have."""
        return self._example

    def _ask_all(self) -> int:
        """Ask at the first batch; a rank without any learns from the others what one looks like."""
        ready = self._group.gather(self._num_ready > 0)
        if any(ready) and not all(ready):
            examples = self._group.gather((self._num_ready > 0, self._example))
            self._example = next(example for is_ready, example in examples if is_ready)
        return int(any(ready))
