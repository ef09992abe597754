"""Which of several models that share parameters adds their gradients up over the ranks."""

import weakref
from collections.abc import Iterable

from torch import Tensor


class Claim:
    """A model's claim to parameters; another one's later claim ends it for those that both have."""

    def __init__(self) -> None:
        self.lost: set[int] = set()
        """Ids of parameters that others have claimed since, among those that this one keeps alive."""


class Claims:
    """All claims of a process."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[Claim] = weakref.WeakSet()
        self._last: weakref.ref[Claim] | None = None

    def take(self, claim: Claim, params: Iterable[Tensor]) -> None:
        """Give one claim these parameters; params are looked at only if another claim was the last."""
        if self._last is not None and self._last() is claim:
            return
        self._all.add(claim)
        self._last = weakref.ref(claim)
        ids = {id(p) for p in params}
        for other in self._all:
            other.lost |= ids
        claim.lost = set()
