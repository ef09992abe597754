"""Python code that torch.compile leaves as it is."""

from collections.abc import Callable
from typing import Any, TypeVar

from everygpu.torch_private.compiler import eval_frame

Method = TypeVar("Method", bound=Callable[..., Any])


def _left(calls: str, method: Method) -> Method:
    action = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(action.SKIP, getattr(action, calls))
    eval_frame.set_code_exec_strategy(method.__code__, strategy)
    return method


def not_compiled(method: Method) -> Method:
    """Keep torch.compile out of a method and what it calls, which it would compile piece by piece."""
    return _left("SKIP", method)


def left_to_run(method: Method) -> Method:
    """Have torch.compile leave a method's code as it is, though not what it calls: there it can be seen at work."""
    return _left("DEFAULT", method)


@left_to_run
def is_compiler_at_work() -> bool:
    """Tell whether this thread is in a function that went through torch.compile; False where torch can't be asked."""
    ask = getattr(eval_frame, "get_eval_frame_callback", None)
    return ask is not None and ask() is not None
