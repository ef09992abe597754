"""What is said once for each place, whatever else is said of it."""

from collections.abc import Callable, Hashable
from typing import Any


class Once:
    """A function that is called once for each first argument, however the others differ."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._places: set[Hashable] = set()
        self.cache_clear = self._places.clear

    def __call__(self, place: Hashable, *args: Any) -> None:
        if place not in self._places:
            self._places.add(place)
            self._function(place, *args)
