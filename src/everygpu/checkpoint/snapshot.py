"""A copy of a run's state in host memory, so that training goes on while it is written."""

import logging
import mmap
import sys
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from everygpu.checkpoint.save import Taken
from everygpu.checkpoint.values import identity

logger = logging.getLogger("everygpu")
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run's state, copied to memory of its own."""

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

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()

    def wait(self) -> None:
        """Wait for all that GPUs are copying, also for a snapshot that was given up."""
        if self._memory.is_pinned():
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)

    def release(self) -> None:
        """Give the memory back; snapshots in it must not be used any more."""
        # Asked of the driver: an interrupt could come between pinning it and noting so.
        if self._memory.is_pinned():
            self.wait()
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        # Of a snapshot that was interrupted; at the process' end the system gives all back.
        if hasattr(self, "_memory") and not sys.is_finalizing():
            self.release()

    def reserve(self, num_bytes: int, *, pin: bool) -> None:
        """Have room for so many bytes, what is there being lost where there was less."""
        if num_bytes > self._memory.numel():
            self.release()
            self._memory = _map_memory(num_bytes)
        if pin and not self._memory.is_pinned():
            _pin(self._memory)

    def area(self, begin: int, tensor: Tensor) -> Tensor:
        """Return the memory from a byte on, shaped for a tensor."""
        return self._memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def copy_to(memory: SnapshotMemory, taken: Taken) -> Snapshot:
    """Copy a run's state to host memory, where it overwrites the one before; equal views are copied once.

    Tensors on GPUs are copied in the order of their device's current stream: what is launched there afterwards may
    change them at once.
    """
    unique = {identity(t): t for tensors in taken.tensors.values() for t in tensors.values()}
    devices = sorted({t.device for t in unique.values() if t.is_cuda}, key=str)
    memory.reserve(sum(map(_padded_bytes, unique.values())), pin=bool(devices))
    areas: dict[object, Tensor] = {}
    begin = 0
    # One after the other: a GPU copies the first tensors while the areas of the others are made.
    for key, tensor in unique.items():
        areas[key] = memory.area(begin, tensor).copy_(tensor, non_blocking=True)
        begin += _padded_bytes(tensor)
    tensors = {
        file: {name: areas[identity(t)] for name, t in content.items()} for file, content in taken.tensors.items()
    }
    events = tuple(torch.cuda.current_stream(device).record_event() for device in devices)
    return Snapshot(taken=replace(taken, tensors=tensors), copied=events)


def _padded_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _map_memory(num_bytes: int) -> Tensor:
    """Map memory of exactly this size, in large pages where the system has them: they are cleared faster."""
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pin(memory: Tensor) -> None:
    """Lock memory in place, so that GPUs write to it by themselves.

    Source:
        ``cudaHostRegister``. ``Tensor.pin_memory`` would round the size up to a power of two.
    """
    result = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)  # type: ignore[no-untyped-call]
    if int(result) != 0:
        logger.warning(
            "%d bytes can't be pinned (%s): copying from the GPUs holds training up.", memory.numel(), result
        )
