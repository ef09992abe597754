"""Strip the prefix of an outer module from names, such as Lightning's ``model.``."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from everygpu.errors import CheckpointMismatchError
from everygpu.keys import bare_key


def fit_names(state: Mapping[str, Any], expected: Collection[str]) -> str:
    """Find the prefix under which a state has the expected names.

    Segments of wrappers such as ``module`` count for nothing on both sides.

    Args:
        state: Names as a file has them.
        expected: The target's names.
    Returns:
        The prefix, such as ``"model."``; empty where none gives more than half of the names, or the names
        fit at least as well as they are.
    Raises:
        CheckpointMismatchError: the names fit under several prefixes equally well.
    """
    wanted = {bare_key(name) for name in expected}
    fits = Counter(prefix for name in state for prefix in _prefixes(bare_key(name), wanted))
    best = max(fits.values(), default=0)
    leading = sorted(prefix for prefix, count in fits.items() if count == best)
    if 2 * best <= len(wanted) or fits[""] == best:
        return ""
    if len(leading) > 1:
        raise CheckpointMismatchError(
            f"load: the target's names must stand under one prefix, got {', '.join(leading)} with {best} each. "
            f"Choose with `everygpu checkpoint convert --strip-prefix {leading[0]}`."
        )
    return leading[0]


def strip_prefix(name: str, prefix: str) -> str:
    """Take a prefix and the segments of wrappers off a name that has the prefix; leave others alone."""
    bare = bare_key(name)
    return bare.removeprefix(prefix) if prefix and bare.startswith(prefix) else name


def rename(state: Mapping[str, Any], new_name: Callable[[str], str]) -> dict[str, Any]:
    """Give every entry another name.

    Raises:
        CheckpointMismatchError: two entries would have the same name, or one an empty name.
    """
    renamed: dict[str, Any] = {}
    came_from: dict[str, str] = {}
    for name, value in state.items():
        new = new_name(name)
        if not new or new in renamed:
            also = f"those of {came_from[new]} and {name}" if new else f"that of {name}"
            raise CheckpointMismatchError(
                f"load: names must stay different and not empty without their prefix, got {new!r} for {also}. "
                f"Choose another prefix."
            )
        renamed[new], came_from[new] = value, name
    return renamed


def _prefixes(name: str, wanted: Collection[str]) -> list[str]:
    starts = [0, *(i + 1 for i, letter in enumerate(name) if letter == ".")]
    return [name[:start] for start in starts if name[start:] in wanted]
