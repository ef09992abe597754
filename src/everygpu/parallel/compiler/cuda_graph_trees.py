"""torch's CUDA graphs of compiled code, one per GPU, made in one process with a thread for each GPU."""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from everygpu.parallel.compiler.multi_device_graph import device_index_of
from everygpu.torch_private.compiler import cuda_graph_manager, is_replaying
from everygpu.torch_private.tensors import foreach_copy_

CAPTURING = threading.RLock()
"""Held while a CUDA graph may be captured, of whichever model: memory and streams then serve the capture only."""


class CapturedGraph:
    """A graph that torch makes CUDA graphs of, one per GPU: it is warmed up and captured first, then replayed.

    torch counts on one thread at a GPU. Autograd has one for each, and they copy gradients to each other's.

    Args:
        run: Takes a list of inputs, which it empties.
        static: Indices of the inputs that stay where they are: parameters, and what forward has saved.
        copies_outputs: Gradients end up in ``.grad``, in the very memory they come in: they must not stay where
            the next run of a CUDA graph writes.
    """

    def __init__(
        self, run: Callable[[list[Any]], Any], static: Sequence[int] = (), *, copies_outputs: bool = False
    ) -> None:
        self._run = run
        self._static = frozenset(static)
        self._copies_outputs = copies_outputs
        self._replaying: set[int] = set()

    def __call__(self, inputs: list[Any]) -> Any:
        index = device_index_of(inputs)
        manager = cuda_graph_manager(index)
        # Warming up, torch frees inputs while its own stream is not done with them. Threads of other GPUs, which
        # don't wait for that stream, would be given their memory.
        for i, x in enumerate(inputs):
            if i not in self._static and isinstance(x, Tensor) and x.is_cuda:
                x.record_stream(manager.stream)
        with nullcontext() if index in self._replaying else CAPTURING:
            outputs = self._run(inputs)
            if is_replaying(manager):
                self._replaying.add(index)
        return _copied(outputs) if self._copies_outputs else outputs


def _copied(outputs: Sequence[Any]) -> list[Any]:
    """Copy what lies on a GPU, in one launch per dtype."""
    copies = [torch.empty_like(x) if isinstance(x, Tensor) and x.is_cuda else x for x in outputs]
    pairs = [(c, x) for c, x in zip(copies, outputs) if c is not x]
    for dtype in dict.fromkeys(x.dtype for _, x in pairs):
        targets, sources = zip(*((c, x) for c, x in pairs if x.dtype is dtype))
        foreach_copy_(list(targets), list(sources))
    return copies
