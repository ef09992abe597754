"""Tensors that two processes share, without a copy: CUDA memory by the driver, host memory by file descriptors."""

import itertools
import os
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from everygpu.comm import ipc
from everygpu.torch_private.tensors import share_fd


class SharedTensor(NamedTuple):
    """Where a tensor of the other process is."""

    allocation: int
    handle: Any
    """How to open the allocation; None where the tensor is empty."""
    offset: int
    """In bytes."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    ticket: int
    """Given back when the other process needs the tensor no more; 0 where the owner knows that by itself."""


class Exporter:
    """Describes this process's tensors to another process.

    Args:
        device: Where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, ipc.Allocation] = {}
        self._tickets = itertools.count(1)
        self._lent: dict[int, Tensor] = {}

    def describe(self, t: Tensor, *, lends: bool = False) -> SharedTensor:
        """Say where a tensor is.

        Args:
            t: For which ``why_not_shared`` finds no reason.
            lends: Keep it until the other process gives it back.
        """
        t = t.detach()
        ticket = 0
        if lends:
            ticket = next(self._tickets)
            self._lent[ticket] = t
        allocation, handle, offset = self._locate_cuda(t) if t.is_cuda else _locate_cpu(t)
        return SharedTensor(allocation, handle, offset, tuple(t.shape), t.stride(), t.dtype, ticket)

    def take_back(self, tickets: list[int]) -> None:
        """Forget tensors that were lent."""
        for ticket in tickets:
            self._lent.pop(ticket, None)

    def why_not_shared(self, t: Tensor) -> str | None:
        """Say why a tensor can't be shared."""
        if t.layout != torch.strided or type(t) not in (Tensor, nn.Parameter) or t.is_quantized:
            return f"a {type(t).__name__} of layout {t.layout}, where only dense tensors can be shared"
        if t.is_conj() or t.is_neg():
            return "a lazily conjugated or negated tensor"
        if t.device != self._device:
            return f"a tensor on {t.device}, where only those on {self._device} can be shared"
        return None

    def _locate_cuda(self, t: Tensor) -> tuple[int, Any, int]:
        if not t.numel():
            return 0, None, 0
        found = ipc.range_at(t.data_ptr())
        offset = t.data_ptr() - found.start
        if found.id not in self._known:
            self._known[found.id] = ipc.share(found, self._device)
        return found.id, self._known[found.id], offset


def _locate_cpu(t: Tensor) -> tuple[int, Any, int]:
    storage = t.untyped_storage()
    if not storage.nbytes():
        return 0, None, 0
    if not storage.is_shared():
        storage.share_memory_()
    fd, num_bytes = share_fd(storage)
    return 0, (f"/proc/{os.getpid()}/fd/{fd}", num_bytes), int(t.storage_offset()) * t.element_size()


class Importer:
    """Makes tensors of the other process's memory.

    Args:
        device: Where the memory is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # All stay open, as opening and closing one waits for the GPU.
        self._open: dict[int, ipc.Mapping] = {}
        self._done: deque[int] = deque()

    def open(self, shared: SharedTensor) -> Tensor:
        """Make a tensor on the other process's memory."""
        if shared.handle is None:
            self._done.append(shared.ticket)
            return torch.empty_strided(shared.shape, shared.strides, dtype=shared.dtype, device=self._device)
        if self._device.type == "cpu":
            return self._open_cpu(shared)
        mapping = self._mapping(shared)
        owner = _Loan(mapping, shared.ticket, self._done)
        return ipc.tensor_at(
            mapping.start + shared.offset, shared.shape, shared.strides, shared.dtype, self._device, owner
        )

    def take_done(self) -> list[int]:
        """Return the tickets of tensors that are gone since the last call."""
        found = []
        while self._done:
            found.append(self._done.popleft())
        return [ticket for ticket in found if ticket]

    def owns(self, t: Tensor) -> bool:
        """Tell whether a tensor is on the other process's memory."""
        if self._device.type == "cpu":
            return t.untyped_storage().is_shared()
        address = t.data_ptr()
        return any(m.start <= address < m.start + m.num_bytes for m in self._open.values())

    def close(self) -> None:
        """Unmap the memory, each allocation when no tensor is on it any more."""
        self._open.clear()

    def _open_cpu(self, shared: SharedTensor) -> Tensor:
        path, num_bytes = shared.handle
        storage: Any = torch.UntypedStorage.from_file(path, True, num_bytes)
        self._done.append(shared.ticket)
        start = shared.offset // shared.dtype.itemsize
        return torch.empty(0, dtype=shared.dtype).set_(storage, start, shared.shape, shared.strides)

    def _mapping(self, shared: SharedTensor) -> ipc.Mapping:
        found = self._open.get(shared.allocation)
        if found is None:
            found = self._open[shared.allocation] = ipc.Mapping(shared.handle, self._device)
        return found


class _Loan:
    """Gives a ticket back when the last tensor on its memory is gone."""

    __slots__ = ("_done", "_mapping", "_ticket")

    def __init__(self, mapping: ipc.Mapping, ticket: int, done: "deque[int]") -> None:
        self._mapping, self._ticket, self._done = mapping, ticket, done

    def __del__(self) -> None:
        self._done.append(self._ticket)
