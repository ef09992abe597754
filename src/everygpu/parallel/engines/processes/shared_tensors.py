"""Tensors that two processes share, without a copy: CUDA memory by the driver, host memory by file descriptors."""

import itertools
import os
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from everygpu.comm import ipc
from everygpu.parallel.engines.processes.ends import remove_failed_share
from everygpu.torch_private.tensors import share_fd


class SharedStorage(NamedTuple):
    """Where memory of the other process is."""

    allocation: int
    """No two have the same that are there at one time."""
    handle: Any
    """How to open the allocation; None where there is no memory."""
    offset: int
    """Where it begins in the allocation, in bytes."""
    num_bytes: int


class SharedTensor(NamedTuple):
    """Where a tensor of the other process is."""

    storage: SharedStorage
    offset: int
    """In elements."""
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
        ticket = self._lend(t) if lends else 0
        storage = self._share_cuda(t.untyped_storage()) if t.is_cuda else _share_cpu(t.untyped_storage())
        return SharedTensor(storage, int(t.storage_offset()), tuple(t.shape), t.stride(), t.dtype, ticket)

    def lend_again(self, t: Tensor, described: SharedTensor) -> SharedTensor:
        """Lend a tensor that has been described."""
        return described._replace(ticket=self._lend(t))

    def is_lent(self, shared: SharedTensor) -> bool:
        """Tell whether the other process has yet to give a tensor back."""
        return shared.ticket in self._lent

    def _lend(self, t: Tensor) -> int:
        ticket = next(self._tickets)
        self._lent[ticket] = t
        return ticket

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

    def own(self, t: Tensor) -> Tensor:
        """Return a tensor, or a copy where its memory is a third process's: CUDA shares only a process's own."""
        if not t.is_cuda or self.why_not_shared(t) is not None or not t.untyped_storage().nbytes():
            return t
        return t if ipc.range_at(t.untyped_storage().data_ptr()).num_bytes else t.clone()

    def _share_cuda(self, storage: torch.UntypedStorage) -> SharedStorage:
        if not storage.nbytes():
            return SharedStorage(0, None, 0, 0)
        found = ipc.range_at(storage.data_ptr())
        if found.id not in self._known:
            self._known[found.id] = ipc.share(found, self._device)
        return SharedStorage(found.id, self._known[found.id], storage.data_ptr() - found.start, storage.nbytes())


def _share_cpu(storage: torch.UntypedStorage) -> SharedStorage:
    if not storage.nbytes():
        return SharedStorage(0, None, 0, 0)
    if not storage.is_shared():
        try:
            storage.share_memory_()
        except RuntimeError as error:
            remove_failed_share(error)
            raise
    fd, num_bytes = share_fd(storage)
    # The number of a descriptor comes again once its file is gone.
    return SharedStorage(os.fstat(fd).st_ino, f"/proc/{os.getpid()}/fd/{fd}", 0, num_bytes)


class Importer:
    """Makes tensors of the other process's memory.

    Args:
        device: Where the memory is.
        copies_host_memory: Copy tensors on the CPU: one that is mapped here can't be shared once more.
    """

    def __init__(self, device: torch.device, *, copies_host_memory: bool = False) -> None:
        self._device = device
        self._copies_host_memory = copies_host_memory
        # All stay open, as opening and closing one waits for the GPU.
        self._open: dict[int, ipc.Mapping] = {}
        self._done: deque[int] = deque()

    def open(
        self,
        shared: SharedTensor,
        storages: "dict[SharedStorage, torch.UntypedStorage] | None" = None,
        *,
        follows: bool = False,
    ) -> Tensor:
        """Make a tensor on the other process's memory.

        Args:
            shared: Where it is.
            storages: Those that are open: tensors that share one there do so here.
            follows: Don't copy it, as the other process goes on writing to it.
        """
        storage = None if storages is None else storages.get(shared.storage)
        if storage is None:
            storage = self._open_storage(shared.storage, shared.ticket, follows=follows)
            if storages is not None:
                storages[shared.storage] = storage
        empty = torch.empty(0, dtype=shared.dtype, device=self._device)
        return empty.set_(cast(Any, storage), shared.offset, shared.shape, shared.strides)

    def decline(self, lent: Iterable[SharedTensor]) -> None:
        """Give back what isn't opened."""
        self._done.extend(shared.ticket for shared in lent)

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

    def _open_storage(self, shared: SharedStorage, ticket: int, *, follows: bool) -> torch.UntypedStorage:
        if shared.handle is None:
            self._done.append(ticket)
            return torch.empty(0, dtype=torch.uint8, device=self._device).untyped_storage()
        if self._device.type == "cpu":
            self._done.append(ticket)
            storage = cast(torch.UntypedStorage, torch.UntypedStorage.from_file(shared.handle, True, shared.num_bytes))
            return storage.clone() if self._copies_host_memory and not follows else storage  # type: ignore[no-untyped-call]
        mapping = self._mapping(shared)
        owner = _Loan(mapping, ticket, self._done)
        return ipc.storage_at(mapping.start + shared.offset, shared.num_bytes, self._device, owner)

    def _mapping(self, shared: SharedStorage) -> ipc.Mapping:
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
