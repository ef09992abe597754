"""A tensor without memory, materialized when a function of torch's is first given it."""

import copy
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from everygpu.errors import CaptureError
from everygpu.parallel.compiler.eval_frame import is_compiler_at_work, left_to_run
from everygpu.torch_private.pytree import tree_map_only
from everygpu.torch_private.tensors import make_wrapper_subclass

PATIENCE_S = 1.0
"""How long a thread may take to drop its references to what it has returned, on a busy machine."""


class DeferredTensorError(CaptureError):
    """A recording can't go on with a deferred tensor.

    Args:
        reason: Why.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"DataParallel: {reason}")
        known = _refusals.get()
        if known is not None:
            known.append(self)


_refusals: ContextVar[list[DeferredTensorError] | None] = ContextVar("everygpu_refusals", default=None)


@contextmanager
def refusals_heeded() -> Iterator[None]:
    """Raise the first ``DeferredTensorError`` from within, even if the model caught it or torch replaced it.

    Raises:
        DeferredTensorError: there was one.
    """
    refusals: list[DeferredTensorError] = []
    token = _refusals.set(refusals)
    try:
        yield
    except Exception as error:
        if refusals:
            raise refusals[0] from error
        raise
    finally:
        _refusals.reset(token)
    if refusals:
        raise refusals[0]


class DeferredTensor(Tensor):
    """A tensor that is computed when a function of torch's is first given it.

    It has no memory: code that bypasses torch's functions fails, and the recording with it. So does compiled code,
    which would be compiled anew for this class.
    """

    @staticmethod
    def __new__(cls, shape: Sequence[int], like: Tensor) -> Any:
        """Make one; the shape, and the dtype and device of another tensor are what C++ code sees."""
        return make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device, requires_grad=True)

    def __init__(self, *_: Any) -> None:
        """Everything is done in ``__new__``, as for all tensors."""

    def materialize(self) -> Tensor:
        """Return the tensor, for use on the current stream."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the value, as its class does."""
        return copy.deepcopy(self.materialize(), memo)

    @property
    def __tensor_flatten__(self) -> Any:
        """Stop torch.compile, which looks for this attribute; it would otherwise fall back for the whole function."""
        raise DeferredTensorError("compiled code was given what isn't there yet")

    @classmethod
    @left_to_run
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_compiler_at_work():
            raise DeferredTensorError("compiled code was given what isn't there yet")
        args, kwargs = tree_map_only(DeferredTensor, materialized, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise DeferredTensorError(f"{func} was given what isn't there yet, past torch's functions")


def check_dropped(made: Sequence["weakref.ref[Any]"]) -> None:
    """Refuse a recording whose deferred tensors are still referenced after the forward.

    Raises:
        DeferredTensorError: a replica has put it in a list, say.
    """
    # A replica's thread drops its references a moment after its result was taken.
    ends = time.monotonic() + PATIENCE_S
    while any(ref() is not None for ref in made):
        if time.monotonic() >= ends:
            raise DeferredTensorError("a module keeps what isn't there yet beyond its forward")
        time.sleep(0.001)


def materialized(x: Tensor) -> Tensor:
    """Return a deferred tensor's value, or the tensor itself."""
    return x.materialize() if isinstance(x, DeferredTensor) else x
