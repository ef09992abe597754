"""A copy of a run's state in host memory, so that training goes on while it is written."""

import logging
import mmap
import sys
from collections.abc import Mapping
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

    def has_room(self, begin: int, tensor: Tensor) -> bool:
        """Tell whether a tensor fits from a byte on, as the memory is now."""
        fits = begin + _padded_bytes(tensor) <= self._memory.numel()
        return fits and (not tensor.is_cuda or self._memory.is_pinned())

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


class Copying:
    """A snapshot on its way to host memory, where it overwrites the one before; equal views are copied once.

    Tensors on GPUs are copied in the order of their device's current stream: what is launched there afterwards may
    change them at once.

    Args:
        memory: Where to.
    """

    def __init__(self, memory: SnapshotMemory) -> None:
        self._memory = memory
        self._areas: dict[object, Tensor] = {}
        self._end = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin with some tensors, as far as there is room, while others are still looked for."""
        for tensor in tensors.values():
            if identity(tensor) not in self._areas and self._memory.has_room(self._end, tensor):
                self._copy(tensor)

    def finish(self, taken: Taken) -> Snapshot:
        """Copy what is left.

        Args:
            taken: Of the run, with the tensors that were added.
        """
        unique = {identity(t): t for tensors in taken.tensors.values() for t in tensors.values()}
        devices = sorted({t.device for t in unique.values() if t.is_cuda}, key=str)
        self._make_room(unique, pin=bool(devices))
        # One after the other: a GPU copies the first tensors while the areas of the others are made.
        for key, tensor in unique.items():
            if key not in self._areas:
                self._copy(tensor)
        tensors = {
            file: {name: self._areas[identity(t)] for name, t in content.items()}
            for file, content in taken.tensors.items()
        }
        events = tuple(torch.cuda.current_stream(device).record_event() for device in devices)
        return Snapshot(taken=replace(taken, tensors=tensors), copied=events)

    def _make_room(self, unique: Mapping[object, Tensor], *, pin: bool) -> None:
        left = sum(_padded_bytes(t) for key, t in unique.items() if key not in self._areas)
        if self._memory.num_bytes < self._end + left:  # begin anew
            self._areas, self._end = {}, 0
            left = sum(map(_padded_bytes, unique.values()))
        self._memory.reserve(self._end + left, pin=pin)

    def _copy(self, tensor: Tensor) -> None:
        self._areas[identity(tensor)] = self._memory.area(self._end, tensor).copy_(tensor, non_blocking=True)
        self._end += _padded_bytes(tensor)


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
