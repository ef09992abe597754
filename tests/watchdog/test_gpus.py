"""How GPUs are asked whether they go on: by a stand-in for the driver, and by a real one."""

import ctypes
import threading
import time
from collections.abc import Callable

import pytest
import torch

from everygpu._watchdog import NOT_READY, GpuWatch


class FakeLibrary:
    """A driver with three GPUs, of which two are in use; events are done or not as told."""

    def __init__(self) -> None:
        self.hung: set[int] = set()
        self.blocked: dict[int, threading.Event] = {}
        self.failed = self.captures = False
        self.is_initialized = True
        self.calls: list[str] = []
        self.threads: set[str] = set()
        self.recorded: dict[int, int] = {}
        """How often each GPU's event was."""
        self._current = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*args: object) -> int:
            self.calls.append(name)
            self.threads.add(threading.current_thread().name)
            return 719 if self.failed else self._answer(name, args)

        return call

    def _answer(self, name: str, args: tuple[object, ...]) -> int:
        if name == "cuDeviceGetCount":
            if not self.is_initialized:
                return 3
            _target(args[0]).value = 3
        if name == "cuDevicePrimaryCtxGetState":
            _target(args[2]).value = int(args[0] in (0, 2))
        if name == "cuDevicePrimaryCtxRetain":
            _target(args[0]).value = 100 + int(str(args[1]))
        if name == "cuCtxSetCurrent":
            self._current = _value(args[0]) - 100
        if name == "cuEventCreate":
            _target(args[0]).value = 1 + self._current
            self.recorded[1 + self._current] = 0
        if name == "cuEventRecord" and self._current in self.blocked:
            self.blocked[self._current].wait()
        if name == "cuEventRecord" and self.captures:
            return 906
        if name == "cuEventRecord":
            self.recorded[_value(args[0])] += 1
        if name == "cuEventQuery":
            event = _value(args[0])
            return NOT_READY if self.recorded[event] and event - 1 in self.hung else 0
        return 0


def _target(reference: object) -> "ctypes.c_int":
    found: ctypes.c_int = getattr(reference, "_obj")  # noqa: B009 - of ctypes.byref
    return found


def _value(pointer: object) -> int:
    found: int = getattr(pointer, "value")  # noqa: B009 - of ctypes.c_void_p
    return found


def until(is_true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.fixture
def library() -> FakeLibrary:
    return FakeLibrary()


def watching(library: object) -> GpuWatch:
    watch = GpuWatch(time.monotonic, 0.01, threading.Event(), library)
    watch.start()
    return watch


def end(watch: GpuWatch) -> None:
    watch.is_over.set()
    watch.join()


def test_a_gpu_that_hangs_is_pending_since_then(library: FakeLibrary) -> None:
    watch = watching(library)
    until(lambda: library.recorded.get(3, 0) >= 3)
    library.hung = {2}
    until(lambda: list(watch.pending) == [2])
    since, num = watch.pending[2], library.recorded[1]
    until(lambda: library.recorded[1] > num + 1)  # of the other one
    assert watch.pending[2] == since
    library.hung = set()
    until(lambda: not watch.pending)
    end(watch)
    assert library.threads == {"everygpu-watch-gpus"}
    before_captures = library.calls[: library.calls.index("cuThreadExchangeStreamCaptureMode")]
    assert set(before_captures) == {"cuDeviceGetCount"}
    assert library.calls.count("cuDevicePrimaryCtxRetain") == 2, "one context for each GPU that has one, and no other"


def test_cuda_is_not_begun_for_its_sake(library: FakeLibrary) -> None:
    library.is_initialized = False
    watch = watching(library)
    until(lambda: len(library.calls) > 3)
    assert set(library.calls) == {"cuDeviceGetCount"}
    library.hung, library.is_initialized = {0}, True
    until(lambda: list(watch.pending) == [0])
    end(watch)


def test_a_call_that_blocks_is_pending(library: FakeLibrary) -> None:
    library.blocked[0] = threading.Event()
    watch = watching(library)
    until(lambda: list(watch.pending) == [0])
    num_calls = len(library.calls)
    watch.is_over.set()
    library.blocked[0].set()
    watch.join()
    assert len(library.calls) == num_calls, "none after it is stopped"


def test_after_an_error_no_further_call_is_made(library: FakeLibrary) -> None:
    library.hung = {0}
    watch = watching(library)
    until(lambda: 0 in watch.pending)
    library.failed = True
    watch.join(60)
    assert not watch.is_alive()
    assert watch.pending == {}


def test_a_capture_puts_it_off(library: FakeLibrary) -> None:
    library.captures = True
    library.hung = {0}
    watch = watching(library)
    until(lambda: library.calls.count("cuEventRecord") > 3)
    assert not any(library.recorded.values())
    library.captures = False
    until(lambda: list(watch.pending) == [0])
    end(watch)


def test_without_a_driver_nothing_is_pending() -> None:
    watch = watching(object())
    watch.join(60)
    assert not watch.is_alive()
    assert watch.pending == {}


@pytest.mark.gpu
@pytest.mark.alone
def test_a_real_gpu_that_is_busy_is_pending_and_captures_go_on() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x = torch.ones(8, device="cuda")
    watch = watching(None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # in the strictest mode, which other threads' calls may spoil
        y = x * 2
        time.sleep(0.2)
    graph.replay()
    assert y.sum().item() == 16
    torch.cuda._sleep(1 << 31)
    until(lambda: 0 in watch.pending)
    torch.cuda.synchronize()
    until(lambda: not watch.pending)
    end(watch)
