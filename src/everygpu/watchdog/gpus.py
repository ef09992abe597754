"""Whether GPUs go on: an event is queued on each one's default stream, and asked for until it is done.

A thread of its own speaks to the driver, as a call may block while a GPU is stuck; and by ``ctypes``, as torch's calls
hold the GIL. On streams other than the default one work is seen once the default stream waits for it.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

NOT_READY = 600
"""``CUDA_ERROR_NOT_READY`` of cuda.h."""
OF_CAPTURE = range(900, 909)
"""Codes of calls that another thread's capture forbids for now: another look comes."""
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING


class Driver:
    """The few calls of the CUDA driver that are needed; none makes a context.

    Args:
        library: ``libcuda``; loaded where it is left out.
    Raises:
        OSError: there is none.
        RuntimeError: it refuses a call.
    """

    def __init__(self, library: Any = None) -> None:
        name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
        self._library = ctypes.CDLL(name) if library is None else library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        # Or queries would spoil the captures of other threads, which torch.cuda.graph makes in the strictest mode.
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))

    def used_devices(self) -> list[int]:
        """List the GPUs that this process has a context on, as CUDA counts them."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return [index for index in range(count.value) if self._is_used(index)]

    def record(self, device: int) -> ctypes.c_void_p | None:
        """Queue an event on a GPU's default stream; return it, or None where that isn't possible now."""
        self._enter(device)
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), _NO_TIMING)
        code = self._library.cuEventRecord(event, None)
        if code in OF_CAPTURE:
            self._library.cuEventDestroy_v2(event)
            return None
        _check("cuEventRecord", code)
        return event

    def is_done(self, device: int, event: ctypes.c_void_p) -> bool:
        """Tell whether a GPU has come to an event; it has, too, where the GPU has failed, which the script hears of."""
        self._enter(device)
        if self._library.cuEventQuery(event) == NOT_READY:
            return False
        self._library.cuEventDestroy_v2(event)
        return True

    def _is_used(self, index: int) -> bool:
        flags, is_active = ctypes.c_uint(), ctypes.c_int()
        self._call("cuDevicePrimaryCtxGetState", index, ctypes.byref(flags), ctypes.byref(is_active))
        return bool(is_active.value)

    def _enter(self, device: int) -> None:
        if device not in self._contexts:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device] = context
        self._call("cuCtxSetCurrent", self._contexts[device])

    def _call(self, name: str, *args: Any) -> None:
        _check(name, getattr(self._library, name)(*args))


def _check(name: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{name} failed with code {code}")


class GpuWatch:
    """Looks at the GPUs that this process uses, until it is stopped.

    Args:
        clock_s: Tells the time.
        period_s: From one look to the next.
        open_driver: Makes the driver, in the thread that speaks to it.
    """

    def __init__(
        self, clock_s: Callable[[], float], period_s: Callable[[], float], open_driver: Callable[[], Driver] = Driver
    ) -> None:
        self._clock_s, self._period_s, self._open_driver = clock_s, period_s, open_driver
        self._is_over = threading.Event()
        self._pending: dict[int, float] = {}
        self.thread = threading.Thread(target=self._run, name="everygpu-watch-gpus", daemon=True)
        self.thread.start()

    def pending(self) -> Mapping[int, float]:
        """Return since when each GPU has not come to what was queued then."""
        return dict(self._pending)

    def stop(self) -> None:
        """Make no further calls."""
        self._is_over.set()

    def _run(self) -> None:
        try:
            driver = self._open_driver()
            events: dict[int, Any] = {}
            while not self._is_over.wait(self._period_s()):
                for device in driver.used_devices():
                    self._look(driver, device, events)
        except (OSError, RuntimeError, AttributeError):  # no driver, or one that has failed: the script hears of it
            self._pending.clear()

    def _look(self, driver: Driver, device: int, events: dict[int, Any]) -> None:
        if self._is_over.is_set():
            return
        if device not in events:
            self._pending[device] = self._clock_s()  # before the call, which waits where the GPU's queue is full
            events[device] = driver.record(device)
        if events[device] is None or driver.is_done(device, events[device]):
            del events[device], self._pending[device]
