"""The autograd engine: the backward that is running, saved tensors and version counters."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

SavedTensorHooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What packs a saved tensor, and what unpacks it."""


def top_saved_tensor_hooks() -> SavedTensorHooks | None:
    """Return the innermost saved-tensor hooks of this thread, which ``torch.autograd.graph`` only enters and leaves."""
    # True: no error where hooks are disabled, as within ``disable_saved_tensors_hooks``.
    found: SavedTensorHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


push_saved_tensor_hooks = torch._C._autograd._push_saved_tensors_default_hooks
"""Enter hooks that were left by ``pop_saved_tensor_hooks``."""

pop_saved_tensor_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
"""Leave the innermost hooks, which another's context manager has entered."""


@contextmanager
def without_saved_tensor_hooks() -> Iterator[list[SavedTensorHooks]]:
    """Leave all saved-tensor hooks of this thread within, and give them, the innermost first."""
    hooks: list[SavedTensorHooks] = []
    while (top := top_saved_tensor_hooks()) is not None:
        hooks.append(top)
        pop_saved_tensor_hooks()
    try:
        yield hooks
    finally:
        for pack, unpack in reversed(hooks):
            push_saved_tensor_hooks(pack, unpack)


def checkpoint_frames() -> tuple[list[Any], Any]:
    """Return the frames of the checkpointed regions of this thread, innermost first, and that of the one run again."""
    # ``torch.utils.checkpoint`` keeps them in the closures of its hooks.
    with without_saved_tensor_hooks() as hooks:
        pass
    frames, again = [], None
    for pack, _ in hooks:
        pack = inspect.unwrap(pack)
        cells = getattr(pack, "__closure__", None) or ()
        held = dict(zip(pack.__code__.co_freevars, (c.cell_contents for c in cells))) if cells else {}
        if "target_frame_ref" in held:
            again = held["target_frame_ref"]() if again is None else again
        elif "frame" in held:
            frames.append(held["frame"])
    return frames, again


NO_BACKWARD = -1
"""What ``backward_id`` returns outside of one."""


def backward_id() -> int:
    """Return torch's number of the backward of which this thread runs a node; torch has no public name for it."""
    return torch._C._current_graph_task_id()


def will_execute(node: Node) -> bool:
    """Tell, within a backward, whether it runs a node; a RuntimeError for a leaf's within ``torch.autograd.grad``."""
    return torch._C._will_engine_execute_node(node)


def after_backward(function: Callable[[], None]) -> None:
    """Have the backward that is running call a function when all else is done, as DistributedDataParallel does."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_transforming() -> bool:
    """Tell whether a transformation of ``torch.func``, or forward-mode differentiation, is under way in this thread."""
    return are_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def are_batched(grads: Iterable[Tensor | None]) -> bool:
    """Tell whether a gradient stands for several under ``vmap``, as with ``is_grads_batched=True``."""
    functorch = torch._C._functorch
    return any(functorch.is_legacy_batchedtensor(g) or functorch.is_batchedtensor(g) for g in grads if g is not None)


are_transforms_active = torch._C._are_functorch_transforms_active
"""Tell whether a transformation of ``torch.func`` is under way."""
