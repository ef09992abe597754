"""Whether the GPUs go on, and whether an error means that this process has lost one."""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from everygpu.devices import nvml
from everygpu.errors import ReplicaError

NOT_READY = 600  # CUDA_ERROR_NOT_READY
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED: the process doesn't use CUDA so far
_CAPTURING = range(900, 909)
"""Codes of what another thread's capture forbids for now."""
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
LOST = frozenset({46, 100, 214, 220, 226, 700, 702, 709, 714, 715, 716, 717, 718, 719, 721, 999})
"""Codes of ``cudaError_t`` after which each call of the process fails: faults of memory, links and kernels, GPUs that
are not there. Not 710, ``cudaErrorAssert``: another try would meet the same index out of range again."""
NVML_S = 5.0
"""A GPU that has fallen off the bus may hold NVML up."""


class GpuWatch(threading.Thread):
    """Queues an event on the default stream of each GPU in use, and another once it is done.

    Calls the driver by ``ctypes``, from a thread of its own: a call may block while a GPU hangs, and torch's hold the
    GIL. Work of other streams is seen once the default stream waits for it.

    Args:
        clock_s: Tells the time.
        period_s: Seconds from one look to the next.
        is_over: Set when no further call is to be made.
        library: ``libcuda``; loaded where it is left out.
    """

    def __init__(
        self, clock_s: Callable[[], float], period_s: float, is_over: threading.Event, library: Any = None
    ) -> None:
        super().__init__(name="everygpu-watch-gpus", daemon=True)
        self.pending: dict[int, float] = {}
        """Since when each GPU has not come to its event."""
        self._clock_s, self._period_s, self._library = clock_s, period_s, library
        self._events: dict[int, tuple[ctypes.c_void_p, ctypes.c_void_p]] = {}
        self.is_over = is_over

    def run(self) -> None:
        """Look at the GPUs until it is over, or until a call fails, which the script hears of as well."""
        count = ctypes.c_int()
        try:
            if self._library is None:
                self._library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
            while not self.is_over.wait(self._period_s):
                if self._call("cuDeviceGetCount", ctypes.byref(count), allowed=(_NOT_INITIALIZED,)):
                    continue
                # Or it would spoil the captures of other threads, which torch.cuda.graph makes in the strictest mode.
                self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))
                for device in filter(self._is_used, range(count.value)):
                    self._look(device)
        except (OSError, RuntimeError, AttributeError):
            self.pending.clear()

    def _look(self, device: int) -> None:
        is_pending = device in self.pending
        if not is_pending:
            self.pending[device] = self._clock_s()  # before calls that block while the GPU's queue is full
        context, event = self._event_of(device)
        self._call("cuCtxSetCurrent", context)
        if not is_pending:  # refused by a capture, it is done as before
            self._call("cuEventRecord", event, None, allowed=_CAPTURING)
        if self._call("cuEventQuery", event, allowed=(NOT_READY, *_CAPTURING)) != NOT_READY:
            del self.pending[device]

    def _is_used(self, device: int) -> bool:
        flags, is_active = ctypes.c_uint(), ctypes.c_int()
        self._call("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(is_active))
        return bool(is_active.value)

    def _event_of(self, device: int) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """Return a GPU's context, which is there, and its event."""
        if device not in self._events:
            context, event = ctypes.c_void_p(), ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._call("cuCtxSetCurrent", context)
            self._call("cuEventCreate", ctypes.byref(event), _NO_TIMING)
            self._events[device] = context, event
        return self._events[device]

    def _call(self, name: str, *args: Any, allowed: "range | tuple[int, ...]" = ()) -> int:
        code: int = 0 if self.is_over.is_set() else getattr(self._library, name)(*args)
        if code and code not in allowed:
            raise RuntimeError(f"{name} failed with code {code}")
        return code


def find_loss(error: BaseException) -> str | None:
    """Say which GPU an uncaught error means is lost, if one is; make no call of CUDA's."""
    torch: Any = sys.modules.get("torch")
    chain = list(_chain(error))
    if torch is None or not any(isinstance(e, RuntimeError) for e in chain):
        return None
    codes = [getattr(e, "error_code", None) for e in chain if isinstance(e, torch.AcceleratorError)]
    gone = _ask_nvml() if any(codes) or torch.cuda.is_initialized() else []
    code = next((code for code in codes if code in LOST), None)
    if code is None and not gone:
        return None
    where = next((str(e).partition(" failed")[0] for e in chain if isinstance(e, ReplicaError)), "")
    found = ["" if code is None else f"CUDA error {code}", where.replace("forward: ", "in "), *gone]
    return (
        f"This process has lost a GPU: {', '.join(filter(None, found))}. Start again from the newest checkpoint, as "
        f"everygpu run --max-restarts does; `dmesg | grep -i xid` has the driver's reason, where the GPU is at fault."
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _ask_nvml() -> list[str]:
    """Name the GPUs that NVML has lost."""
    answers: list[list[str]] = []
    thread = threading.Thread(target=lambda: answers.append(nvml.find_lost()), daemon=True)
    thread.start()
    thread.join(NVML_S)
    if thread.is_alive():
        return [f"no answer of NVML in {NVML_S:g} s"]
    return answers[0] if answers else []
