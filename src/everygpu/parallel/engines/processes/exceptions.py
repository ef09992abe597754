"""Exceptions on their way from one process to another, of their own class wherever that can be found there."""

from collections.abc import Iterator
from typing import Any

import cloudpickle


def pack_exception(error: BaseException) -> bytes:
    """Pickle an exception without its traceback.

    Args:
        error: Any. Pickle makes it again from its class and ``args`` alone, which some classes don't take; those are
            made by their builtin base, with ``args`` and attributes as they were, but for attributes that can't be
            pickled.
    Returns:
        What ``cloudpickle.loads`` makes the exception of. It is a ``RuntimeError`` where not even the class can be
        pickled.
    """
    for attempt in _ways(error.with_traceback(None)):
        try:
            data = cloudpickle.dumps(attempt)
            if type(cloudpickle.loads(data)) is type(error):
                return bytes(data)
        except Exception:  # noqa: BLE001 - of any class, as it comes from the user's code; the next way is tried
            continue
    return bytes(cloudpickle.dumps(RuntimeError(f"{type(error).__name__}: {error}")))


def _ways(error: BaseException) -> Iterator[Any]:
    yield error
    attributes = {name: value for name, value in vars(error).items() if _travels(value)}
    yield _Parts(error, error.args, attributes)
    yield _Parts(error, (str(error),), attributes)


def _travels(value: Any) -> bool:
    try:
        cloudpickle.loads(cloudpickle.dumps(value))
    except Exception:  # noqa: BLE001 - of any class, as it comes from the user's code
        return False
    return True


class _Parts:
    """Pickled as an exception whose own ``__new__`` and ``__init__`` aren't called again."""

    def __init__(self, error: BaseException, args: tuple[Any, ...], attributes: dict[str, Any]) -> None:
        self._parts = type(error), args, attributes

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, self._parts


def _make(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    base: Any = next(b for b in kind.__mro__ if b.__module__ == "builtins")
    error: BaseException = base.__new__(kind, *args)
    base.__init__(error, *args)  # OSError takes its number and file name from these
    vars(error).update(attributes)
    return error
