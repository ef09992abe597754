"""Equal numbers of batches on all ranks, from loaders that may end unevenly."""

import logging
from collections.abc import Callable
from typing import Any

from everygpu.errors import RankError
from everygpu.ranks.group import Group

logger = logging.getLogger("everygpu")

_NEVER = 2**62


class Lockstep:
    """Says before each batch of an epoch whether any rank has one; all ranks ask equally often.

    While ranks have batches ready beyond the next one, their messages overlap the previous step.

    Args:
        group: The ranks.
        must_match: Whether all loaders have to give the same batches.
    """

    def __init__(self, group: Group, *, must_match: bool) -> None:
        self._group, self._must_match = group, must_match
        self._num_ready = self._num_asked = 0
        self._ended_at = _NEVER
        self._most_ready, self._first_end = 0, _NEVER
        self._pending: Callable[[], list[int]] | None = None
        self._example: Any = None
        self._digest = 0

    def note(self, make_example: Callable[[], Any], make_digest: Callable[[], int]) -> None:
        """Count a batch that this rank's loader has given; it may be any number ahead of the one that is asked for.

        Args:
            make_example: Makes a batch without rows, to give when the loader has ended; called once.
            make_digest: Makes a number of what the loader has given; called once, if batches have to match.
        """
        if self._num_ready == 0:
            try:
                self._example = make_example()
            except (LookupError, RuntimeError, TypeError, ValueError) as error:  # as a PackedSequence has none
                self._example = error.with_traceback(None)
            self._digest = make_digest() if self._must_match else 0
        self._num_ready += 1

    def goes_on(self, has_batch: bool) -> bool:
        """Whether any rank has the next batch.

        Args:
            has_batch: Whether this rank does; if not, its loader has ended.
        Raises:
            RankError: the loaders have to match, and one has ended before another; on all ranks at once.
            Exception: one has ended before another, and there is no batch without rows; on all ranks at once.
        """
        position, self._num_asked = self._num_asked, self._num_asked + 1
        if not has_batch:
            self._ended_at = min(self._ended_at, position)
        if self._pending is not None:
            self._hear(self._pending())
        if self._most_ready <= position:
            self._hear(self._ask_all() if position == 0 else self._ask()())
        if self._must_match and self._first_end < self._most_ready:
            raise RankError(
                f"ranks: every rank's loader must give the same batches, got one that has ended after "
                f"{self._first_end} and another that has more. If each rank has data of its own, pass sharded=True."
            )
        goes_on = self._most_ready > position
        self._pending = self._ask() if goes_on else None
        return goes_on

    def empty_batch(self) -> Any:
        """Return a batch without rows, of the structure that the others have.

        Raises:
            Exception: it can't be made. The other ranks learn of it with their next batch.
        """
        if isinstance(self._example, Exception):
            raise self._example
        return self._example

    def _ask(self) -> Callable[[], list[int]]:
        return self._group.begin_max([self._num_ready, -self._ended_at])

    def _hear(self, found: list[int]) -> None:
        self._most_ready, self._first_end = found[0], -found[1]
        if isinstance(self._example, Exception) and self._first_end < self._most_ready:
            raise self._example

    def _ask_all(self) -> list[int]:
        """Ask at the first batch; a rank without any learns from the others what one looks like."""
        found = self._group.gather((self._num_ready, -self._ended_at, self._digest))
        has_any = [num_ready > 0 for num_ready, _, _ in found]
        if any(has_any) and not all(has_any):
            examples = self._group.gather(self._example)
            self._example = next(example for example, is_one in zip(examples, has_any) if is_one)
        if all(has_any) and len({digest for _, _, digest in found}) > 1 and self._group.rank == 0:
            logger.warning(
                "ranks: the first batch of an epoch is not the same on all ranks, which keep their own rows of it: "
                "rows are lost if each has data of its own (pass sharded=True) or another order (use the same seed)."
            )
        return [max(values) for values in zip(*found)]
