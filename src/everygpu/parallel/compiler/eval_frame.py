"""Python code that torch.compile leaves as it is."""

from collections.abc import Callable
from typing import Any, TypeVar

from everygpu.torch_private.compiler import skip_code

Method = TypeVar("Method", bound=Callable[..., Any])


def not_compiled(method: Method) -> Method:
    """Keep torch.compile out of a method and what it calls, which it would compile piece by piece."""
    skip_code(method.__code__, with_calls=True)
    return method


def left_to_run(method: Method) -> Method:
    """Have torch.compile leave a method's code as it is, though not what it calls: there it can be seen at work."""
    skip_code(method.__code__, with_calls=False)
    return method
