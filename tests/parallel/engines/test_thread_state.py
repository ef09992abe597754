"""What the calling thread has set reaches the replicas' threads, and stays out of everyone else's."""

import contextvars
import threading
import time

import pytest
import torch
from torch.overrides import TorchFunctionMode

from everygpu.parallel.engines.thread_state import NUM_WATCHED, FactoryDevice, FactoryUse, ThreadState, on_device

gpu_only = pytest.mark.parametrize("devices", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
variable = contextvars.ContextVar("variable", default="unset")


def call_in_thread(function):
    """Return what a fresh thread gives, or raise what it raises."""
    found = []

    def call():
        try:
            found.append((function(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    value, error = found[0]
    if error is not None:
        raise error
    return value


def carry(used, setting, look):
    """What ``look`` sees in a thread that runs as if within ``setting``, and in that thread afterwards."""
    with setting:
        state = ThreadState(used)
        context = state.snapshot()
    return call_in_thread(lambda: (state.run(context, used[-1], look), look()))


class Counting(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_every_autocast_type_at_once(devices):
    used = devices(2)
    kind = used[0].type

    def look():
        return torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype(kind)

    with torch.autocast("cpu", torch.float16):
        seen, _ = carry(used, torch.autocast(kind, torch.bfloat16), look)
    assert seen == (torch.bfloat16 if kind == "cpu" else torch.float16, torch.bfloat16)


def test_one_thread_at_a_time_unpacks_saved_tensors():
    inside, most = [], []

    def unpack(t):
        inside.append(t)
        time.sleep(0.01)
        most.append(len(inside))
        return inside.pop()

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        state = ThreadState([torch.device("cpu")])
        outputs = [state.run_here(lambda: x * x)]
    outputs += [call_in_thread(lambda: state.run(state.snapshot(), torch.device("cpu"), lambda: x * x))]
    threads = [threading.Thread(target=lambda y=y: torch.autograd.grad(y.sum(), x)) for y in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4


def test_thread_is_put_back_after_an_exception():
    def fail():
        raise ValueError("inside")

    with torch.no_grad(), torch.autocast("cpu"), Counting() as mode:
        state = ThreadState([torch.device("cpu")])

    def attempt():
        with pytest.raises(ValueError, match="inside"):
            state.run(state.snapshot(), torch.device("cpu"), fail)
        torch.ones(1)
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    calls = mode.calls
    assert call_in_thread(attempt) == (True, False)
    assert mode.calls == calls


class TestFactoryUse:
    """Where a module makes tensors without ``device=``, they are on its replica's."""

    HERE = torch.device("meta")

    def made(self, use, module, make=lambda: torch.ones(1)):
        with on_device(self.HERE, None, use.mode_for(module)):
            return make().device

    def test_is_left_out_after_calls_without(self):
        use, module = FactoryUse(), torch.nn.ReLU()
        for _ in range(NUM_WATCHED):
            assert use.mode_for(module) is not None
            assert self.made(FactoryUse(), module) == self.HERE
        assert use.mode_for(module) is None
        assert self.made(use, module).type == "cpu"
        assert use.mode_for(module.eval()) is not None, "evaluation may take another way"
        with torch.no_grad():
            assert use.mode_for(module) is not None

    def test_stays_after_calls_with(self):
        use, module = FactoryUse(), torch.nn.ReLU()
        for _ in range(NUM_WATCHED + 2):
            assert self.made(use, module, lambda: torch.arange(3)) == self.HERE
        assert self.made(use, module, lambda: torch.ones(1, device="cpu")).type == "cpu"

    def test_named_devices_and_other_operations_are_no_use(self):
        use, module, x = FactoryUse(), torch.nn.ReLU(), torch.zeros(2)
        for _ in range(NUM_WATCHED):
            self.made(use, module, lambda: torch.ones(2, device="cpu").relu() + torch.zeros_like(x))
        assert use.mode_for(module) is None


class TestOnDevice:
    def test_cpu_changes_nothing(self):
        with torch.device("meta"), on_device(torch.device("cpu"), None):
            assert torch.ones(1).device.type == "meta"
        with on_device(torch.device("cpu"), None):
            assert torch.ones(1).device.type == "cpu"

    @gpu_only
    def test_gpu_is_current_and_takes_new_tensors(self, devices):
        device = devices(2)[-1]
        stream = torch.cuda.Stream(device)
        with on_device(device, stream, FactoryDevice):
            assert torch.cuda.current_device() == device.index
            assert torch.cuda.current_stream() == stream
            assert torch.ones(1).device == device
            assert torch.ones(1, device="cpu").cuda().device == device
        assert torch.ones(1).device.type == "cpu"

    @gpu_only
    def test_callers_default_device_becomes_the_replicas(self, devices):
        used = devices(2)
        for setting, expected in ((torch.device(used[0]), used[-1]), (torch.device("cpu"), torch.device("cpu"))):
            inside, _ = carry(used, setting, lambda: torch.ones(1).device)
            assert inside == expected

    @gpu_only
    def test_callers_stream_is_carried(self, devices):
        used = devices(2)
        stream = torch.cuda.Stream(used[-1])
        inside, outside = carry(used, torch.cuda.stream(stream), torch.cuda.current_stream)
        assert inside == stream
        assert outside != stream
