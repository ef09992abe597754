"""A replica's call made once more in this process, for gradients that are differentiated again."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from everygpu import tree
from everygpu.comm.streams import current_stream
from everygpu.parallel.engines.processes.generators import cuda_state, set_cuda_state
from everygpu.parallel.engines.processes.module_sender import ModuleSender
from everygpu.parallel.engines.thread_state import FactoryDevice, Modes, on_device
from everygpu.parallel.replicas.module_tree import is_dense


class Recomputation:
    """Gradients with a graph of their own, as ``create_graph=True`` asks for: a helper's graph stays in the helper.

    Args:
        sender: Knows the replica, whose attributes are as they are now.
        tensors: Its parameters and buffers at the time of the call.
        call: Positional and keyword arguments.
        modes: Of the call.
        state: Of the GPU's random generator before the call; None on the CPU.
        grads: Of the outputs that take gradients, in order.
    """

    def __init__(
        self,
        sender: ModuleSender,
        tensors: Sequence[Tensor],
        call: tuple[tuple[Any, ...], Mapping[str, Any]],
        modes: Modes,
        state: bytes | None,
        grads: Sequence[Tensor | None],
    ) -> None:
        device = tensors[0].device
        before = cuda_state(device)
        if state is not None:
            set_cuda_state(device, state)
        try:
            with (
                modes.entered(),
                on_device(device, current_stream(device), FactoryDevice),
                sender.with_tensors(tensors),
            ):
                output = sender.module(*call[0], **call[1])
        finally:
            if before is not None:
                set_cuda_state(device, before)
        outputs = [t for _, t in tree.leaves(output, "out") if isinstance(t, Tensor) and t.requires_grad]
        pairs = [(t, g) for t, g in zip(dict.fromkeys(outputs), grads) if g is not None]
        inputs = [t for _, t in tree.leaves(call, "args") if isinstance(t, Tensor) and t.requires_grad]
        sources = [*inputs, *(t for t in tensors if t.requires_grad)]
        found = torch.autograd.grad(
            [t for t, _ in pairs], sources, [g for _, g in pairs], create_graph=True, allow_unused=True
        )
        by_id = {id(t): g for t, g in zip(sources, found)}
        self._inputs = [by_id[id(t)] for t in dict.fromkeys(inputs)]
        self._parameters = {i: by_id.get(id(t)) for i, t in enumerate(tensors)}

    # What is taken is held no longer: its graph leads back to the call.

    def take_inputs(self) -> list[Tensor | None]:
        """Return the gradients of the arguments that need them."""
        found: list[Tensor | None] = list(self._inputs)
        self._inputs = []
        return found

    def take(self, indices: Sequence[int]) -> list[Tensor | None]:
        """Return the gradients of some of the tensors."""
        return [self._parameters.pop(i, None) for i in indices]


def copy_buffers(tensors: Sequence[Tensor], changing: Collection[int] | None) -> dict[int, Tensor]:
    """Copy what forward writes to, at once where it is side by side, for a recomputation to begin with.

    Args:
        tensors: Parameters and buffers.
        changing: The places of those that forward writes to; None where that isn't known.
    """
    which = range(len(tensors)) if changing is None else changing
    found = {i: t for i in which if not (t := tensors[i]).requires_grad and is_dense(t)}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in found.values()}
    copies = {address: storage.clone() for address, storage in storages.items()}  # type: ignore[no-untyped-call]
    return {
        i: t.new_empty(0).set_(copies[t.untyped_storage().data_ptr()], t.storage_offset(), t.shape, t.stride())
        for i, t in found.items()
    }
