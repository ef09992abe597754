"""What stands for a tensor in a recording until somebody asks for it."""

import copy
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from everygpu.errors import EveryGPUError
from everygpu.parallel.compiler.eval_frame import is_compiler_at_work, left_to_run
from everygpu.torch_private.pytree import tree_map_only
from everygpu.torch_private.tensors import make_wrapper_subclass

PATIENCE_S = 1.0
"""How long a thread may take to let go of what it has handed over, on a busy machine."""


class DeferredTensorError(EveryGPUError):
    """Something can't stand for a tensor in a recording.

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
    """Raise the first refusal from within, though the model has caught it, or torch has raised another error for it.

    Raises:
        StandInError: there was one.
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
    """Stands for a tensor until somebody asks for it, which is whenever a function of torch's is given this.

    It has no memory: what goes past torch's functions fails, and the recording with it. So does compiled code, which
    would be compiled anew for this class.
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
        """Copy what this stands for, as its class does."""
        return copy.deepcopy(self.materialize(), memo)

    @property
    def __tensor_flatten__(self) -> Any:
        """Stop torch.compile, which asks whether there is this: going on, it would give the whole function up."""
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
    """Refuse a recording beyond whose forward somebody keeps a stand-in.

    Raises:
        StandInError: a replica has put it in a list, say.
    """
    # A replica's thread lets go of what it has returned a moment after it was taken.
    ends = time.monotonic() + PATIENCE_S
    while any(ref() is not None for ref in made):
        if time.monotonic() >= ends:
            raise DeferredTensorError("a module keeps what isn't there yet beyond its forward")
        time.sleep(0.001)


def materialized(x: Tensor) -> Tensor:
    """Return what a tensor stands for, or the tensor."""
    return x.materialize() if isinstance(x, DeferredTensor) else x
