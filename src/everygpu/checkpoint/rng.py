"""States of the random generators: Python's, NumPy's, torch's on the CPU and on each CUDA device."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor

from everygpu.checkpoint.values import cut
from everygpu.errors import CheckpointDamagedError


def take_rng_states(with_cuda: bool = True) -> dict[str, Any]:
    """Return the states of every generator in use, without drawing from any; CUDA's where it is in use."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state().numpy().tobytes()}
    states["numpy"] = _to_lists(numpy.random.get_state(legacy=False))
    if with_cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    return states


def plan_rng_restore(states: Any) -> Callable[[], None]:
    """Check saved states and return what puts them back; those of CUDA devices that are not here are left out."""
    try:
        random.Random().setstate(states["python"])
        torch_state = _to_tensor(states["torch"])
        torch.Generator().set_state(torch_state)
        cuda = [_to_tensor(state) for state in states.get("cuda", [])]
        # Of the same kind as numpy's global one, which a program may have replaced.
        kind = type(numpy.random.get_bit_generator())  # type: ignore[attr-defined]
        numpy.random.RandomState(kind()).set_state(states["numpy"])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as cause:
        what = f"The saved random states are damaged ({type(cause).__name__}: {cut(cause)})"
        raise CheckpointDamagedError(f"load: {what}. Nothing was loaded; leave out rng=True.") from cause

    def restore() -> None:
        random.setstate(states["python"])
        torch.set_rng_state(torch_state)
        numpy.random.set_state(states["numpy"])
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for index, state in enumerate(cuda[:count]):
            torch.cuda.set_rng_state(state, index)

    return restore


@contextmanager
def rng_states_kept(with_cuda: bool = True) -> Iterator[None]:
    """Put the random states back when the block ends, as `take_rng_states` takes them."""
    restore = plan_rng_restore(take_rng_states(with_cuda))
    try:
        yield
    finally:
        restore()


def _to_tensor(state: Any) -> Tensor:
    if not isinstance(state, bytes):
        raise TypeError(f"a state must be bytes, not {type(state).__name__}")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _to_lists(state: Any) -> Any:
    """Replace NumPy's arrays, which would be stored as tensors, by lists."""
    if isinstance(state, dict):
        return {key: _to_lists(item) for key, item in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state
