"""CUDA memory that two processes share, and flags that their streams write and wait for, through the driver.

``torch.multiprocessing`` shares CUDA tensors with a reference count in a file and an event for each: 0.3 ms there and
back on an H200. And a stream that waits for the event of a process that was killed waits forever. Flags take 0.02 ms,
and the process that waits can set them itself.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import weakref
from typing import Any, NamedTuple

import torch

from everygpu.errors import DeviceError

_BUFFER_ID, _IS_SHAREABLE, _RANGE_START, _RANGE_SIZE = 7, 10, 11, 12
_WAIT_UNTIL_AT_LEAST = 0
_HANDLE_BYTES = 64
_FLAG = ctypes.c_int32
_ALL_DONE = 2**31 - 1


class Allocation(NamedTuple):
    """Memory of another process, as the driver allocated it."""

    id: int
    """No two allocations of a process have the same."""
    handle: bytes


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * _HANDLE_BYTES)]


@functools.cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        getattr(driver, name).argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    return driver


def unsupported_reason(kind: str) -> str | None:
    """Say why processes can't share memory of devices of a kind here, if so."""
    if sys.platform != "linux":
        return f"memory can be shared between processes on Linux only, and this is {sys.platform}"
    try:
        if kind == "cuda":
            _driver()
    except OSError as error:
        return f"the CUDA driver can't be loaded: {error}"
    return None


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class Range(NamedTuple):
    """An allocation in this process."""

    id: int
    start: int
    num_bytes: int


def range_at(address: int) -> Range:
    """Return the allocation that an address is in.

    Raises:
        DeviceError: this memory can't be shared, as with expandable segments.
    """
    buffer_id, is_shareable = ctypes.c_uint64(), ctypes.c_int()
    start, num_bytes = ctypes.c_uint64(), ctypes.c_size_t()
    found = {_BUFFER_ID: buffer_id, _IS_SHAREABLE: is_shareable, _RANGE_START: start, _RANGE_SIZE: num_bytes}
    names = (ctypes.c_int * len(found))(*found)
    places = (ctypes.c_void_p * len(found))(*map(ctypes.addressof, found.values()))
    code = _driver().cuPointerGetAttributes(len(found), names, places, ctypes.c_uint64(address))
    _check(code, "find an allocation")
    return Range(buffer_id.value, start.value, num_bytes.value if is_shareable.value else 0)


def share(found: Range, device: torch.device) -> Allocation:
    """Describe an allocation to another process.

    Raises:
        DeviceError: this memory can't be shared, as with expandable segments.
    """
    if not found.num_bytes:
        raise DeviceError(
            "processes: CUDA memory must come from cudaMalloc to be shared, got memory of another allocator. "
            "Leave expandable_segments and backend:cudaMallocAsync out of PYTORCH_CUDA_ALLOC_CONF."
        )
    handle = _Handle()
    with torch.cuda.device(device):
        _check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(found.start)), "share memory")
    return Allocation(found.id, bytes(handle))


class Mapping:
    """Memory of another process on the same GPU, mapped as long as this object lives.

    Args:
        allocation: As the other process describes it.
        device: The GPU.
    """

    def __init__(self, allocation: Allocation, device: torch.device) -> None:
        address = ctypes.c_uint64()
        handle = _Handle.from_buffer_copy(allocation.handle)
        self._device = device
        with torch.cuda.device(device):
            _check(_driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, 1), "open shared memory")
        self.start = address.value
        self.num_bytes = range_at(address.value).num_bytes

    def __del__(self) -> None:
        # While Python ends, the driver may be gone; the process's mappings end with it.
        with contextlib.suppress(Exception), torch.cuda.device(self._device):
            _driver().cuIpcCloseMemHandle(ctypes.c_uint64(self.start))


class _Memory:
    """Memory at an address, for ``torch.as_tensor``, which keeps this object as long as the tensor's storage."""

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__cuda_array_interface__ = interface
        self.owner = owner


def storage_at(address: int, num_bytes: int, device: torch.device, owner: object) -> torch.UntypedStorage:
    """Make a storage of memory at an address.

    Args:
        address: Where it begins.
        num_bytes: 1 or more.
        device: Where the memory is.
        owner: Kept as long as the storage is.
    """
    interface = {"data": (address, False), "shape": (num_bytes,), "typestr": "|u1", "version": 3}
    return torch.as_tensor(_Memory(interface, owner), device=device).untyped_storage()


class Flags:
    """Numbers in host memory that only grow, which streams of several processes write and wait for.

    Args:
        fd: A file descriptor of another process's flags, inherited; new flags when left out.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("everygpu-flags") if fd is None else fd
        self._close_fd = weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._map = mmap.mmap(self.fd, mmap.PAGESIZE)
        self._values = (_FLAG * (mmap.PAGESIZE // ctypes.sizeof(_FLAG))).from_buffer(self._map)
        self._address = ctypes.addressof(self._values)
        self._is_registered = False

    def write(self, index: int, value: int, stream: torch.cuda.Stream) -> None:
        """Have a stream set a flag, after what is queued on it."""
        self._register()
        with torch.cuda.device(stream.device):  # whose default stream is meant by 0
            code = _driver().cuStreamWriteValue32_v2(stream.cuda_stream, self._address_of(index), value, 0)
        _check(code, "write a flag")

    def wait(self, index: int, value: int, stream: torch.cuda.Stream) -> None:
        """Have a stream wait until a flag has a value, or a larger one."""
        self._register()
        address = self._address_of(index)
        with torch.cuda.device(stream.device):
            code = _driver().cuStreamWaitValue32_v2(stream.cuda_stream, address, value, _WAIT_UNTIL_AT_LEAST)
        _check(code, "wait for a flag")

    def release(self, index: int) -> None:
        """Let all that waits for a flag go on: what should have written it has ended."""
        self._values[index] = _ALL_DONE

    def close(self) -> None:
        """Give the memory back; nothing may wait for it any more."""
        if self._is_registered:
            self._is_registered = False
            with contextlib.suppress(RuntimeError):
                _runtime().cudaHostUnregister(self._address)
        self._close_fd()

    def _register(self) -> None:
        if not self._is_registered:
            is_portable = 1
            code = _runtime().cudaHostRegister(self._address, mmap.PAGESIZE, is_portable)
            _check(int(code), "share flags")
            self._is_registered = True

    def _address_of(self, index: int) -> int:
        return self._address + index * ctypes.sizeof(_FLAG)


def _check(code: int, what: str) -> None:
    if code:
        raise DeviceError(
            f"processes: the CUDA driver must be able to {what}, got its error {code}. Pass engine='threads'."
        )
