"""The autograd engine: the backward that is running, saved tensors and version counters."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

SavedTensorHooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What packs a tensor that is saved for backward, and what unpacks it."""


def top_saved_tensor_hooks() -> SavedTensorHooks | None:
    """Return the innermost saved-tensor hooks of this thread; ``torch.autograd.graph`` can only enter and leave them.

    The argument asks torch not to raise where hooks are disabled, as within ``disable_saved_tensors_hooks``.
    """
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
    """Return the frames of the checkpointed regions that this thread is in, innermost first, and the frame of the one
    that it runs again, None beside that; ``torch.utils.checkpoint`` keeps them in the closures of its hooks.
    """
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
    """Tell, within a backward, whether it will run a node; nodes aren't told what was asked of the engine.

    Raises:
        RuntimeError: the node is a leaf's, and the backward is ``torch.autograd.grad``.
    """
    return torch._C._will_engine_execute_node(node)


def after_backward(function: Callable[[], None]) -> None:
    """Have the backward that is running call a function when all else is done, as DistributedDataParallel does."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_transforming() -> bool:
    """Tell whether a transformation of ``torch.func``, or forward-mode differentiation, is under way in this thread."""
    return are_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def is_batched(x: Tensor) -> bool:
    """Tell whether a tensor stands for several under ``vmap``, as gradients do with ``is_grads_batched=True``."""
    return torch._C._functorch.is_legacy_batchedtensor(x) or torch._C._functorch.is_batchedtensor(x)


def are_batched(grads: Iterable[Tensor | None]) -> bool:
    """Tell whether one of the gradients that there are is batched."""
    return any(is_batched(g) for g in grads if g is not None)


are_transforms_active = torch._C._are_functorch_transforms_active
"""Tell whether a transformation of ``torch.func`` is under way: ``vmap``, ``grad`` and others; they don't say so."""
