"""A copy of a run's state in host memory, so that training goes on while it is written."""

import logging
import mmap
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from everygpu.checkpoint.save import Taken
from everygpu.checkpoint.tensors import identity

_LOG = logging.getLogger("everygpu")
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What was taken from a run, in memory of its own."""

    taken: Taken
    copied: tuple[torch.cuda.Event, ...]
    """One per device; when they have passed, the memory holds the values."""

    def wait(self) -> None:
        """Wait until the values have arrived from the GPUs."""
        for event in self.copied:
            event.synchronize()


class SnapshotMemory:
    """Host memory for one snapshot, kept from one to the next, pinned where tensors come from GPUs.

    Fresh memory is slow: the system clears each page when it is first touched, and pins it. So a copy into
    memory that was used before takes a fraction of the first.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False

    def copy(self, taken: Taken) -> Snapshot:
        """Copy every tensor of what was taken; equal views of the same memory are copied once.

        Tensors on GPUs are copied in the order of their device's current stream: what is launched there
        afterwards may change them at once. The copy before this one is overwritten.

        Args:
            taken: Of the run.
        """
        unique = {identity(t): t for tensors in taken.tensors.values() for t in tensors.values()}
        devices = sorted({t.device for t in unique.values() if t.is_cuda}, key=str)
        *begins, num_bytes = accumulate((_padded_bytes(t) for t in unique.values()), initial=0)
        self._reserve(num_bytes, pin=bool(devices))
        # One after the other: a GPU copies the first tensors while the areas of the others are made.
        areas = {
            key: self._area(begin, tensor).copy_(tensor, non_blocking=True)
            for begin, (key, tensor) in zip(begins, unique.items())
        }
        tensors = {
            file: {name: areas[identity(t)] for name, t in content.items()} for file, content in taken.tensors.items()
        }
        events = tuple(torch.cuda.current_stream(device).record_event() for device in devices)
        return Snapshot(taken=replace(taken, tensors=tensors), copied=events)

    def release(self) -> None:
        """Give the memory back; snapshots in it must not be used any more."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]
        self._memory, self._is_pinned = torch.empty(0, dtype=torch.uint8), False

    def _reserve(self, num_bytes: int, pin: bool) -> None:
        if num_bytes > self._memory.numel():
            self.release()
            self._memory = _map_memory(num_bytes)
        if pin and not self._is_pinned:
            self._is_pinned = _pin(self._memory)

    def _area(self, begin: int, tensor: Tensor) -> Tensor:
        """Return the memory from a byte on, shaped for a tensor."""
        num_bytes = tensor.numel() * tensor.element_size()
        return self._memory[begin : begin + num_bytes].view(tensor.dtype).view(tensor.shape)


def _padded_bytes(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _map_memory(num_bytes: int) -> Tensor:
    """Map memory of exactly this size, in large pages where the system has them: they are cleared faster."""
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pin(memory: Tensor) -> bool:
    """Lock memory in place, so that GPUs write to it by themselves.

    Source:
        ``cudaHostRegister``. ``Tensor.pin_memory`` would round the size up to a power of two.
    """
    result = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)  # type: ignore[no-untyped-call]
    if int(result) != 0:
        _LOG.warning("%d bytes can't be pinned (%s): copying from the GPUs holds training up.", memory.numel(), result)
    return int(result) == 0
