"""What becomes of a wrapper in processes, threads and forwards that come, end, or are interrupted."""

import contextlib
import functools
import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from everygpu import DataParallel
from everygpu.parallel import forward_lock
from tests.parallel.engines.test_threads import in_child
from tests.parallel.oracle import Returning
from tests.parallel.test_wrapper import build


def in_threads(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


class TestObjectsCome:
    """Objects made, used and dropped leave nothing; several side by side don't meet."""

    def test_many_objects_leave_no_thread_and_no_memory(self, devs):
        threads, left = threading.active_count(), []
        for _ in range(20):
            net = build(devs[0])
            model = DataParallel(net, devs)
            model(torch.ones(6, 3)).sum().backward()
            left += [weakref.ref(model), weakref.ref(net), weakref.ref(net.linear.weight)]
        del net, model
        deadline = time.monotonic() + 60
        while (threading.active_count() > threads or any(ref() for ref in left)) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert threading.active_count() <= threads
        assert not [ref for ref in left if ref() is not None]

    def test_dropping_one_needs_no_garbage_collector(self):
        model = DataParallel(build(), ["cpu"] * 3)
        with torch.no_grad():
            model(torch.ones(6, 3))
        left = weakref.ref(model)
        gc.disable()
        try:
            del model
            assert left() is None
        finally:
            gc.enable()

    def test_two_models(self, devs):
        models = [DataParallel(build(devs[0], scale=s), devs) for s in (1.0, 3.0)]
        x = torch.randn(6, 3)
        for _ in range(3):
            once, thrice = (model(x) for model in models)
            torch.testing.assert_close(once * 3, thrice)

    def test_threads_calling_one_model(self, devs):
        net = build(devs[0])
        model = DataParallel(net, devs)
        batches = [torch.randn(n, 3, device=devs[0]) for n in (5, 6, 7, 8)]
        expected = [net(x) for x in batches]
        results = [[] for _ in batches]

        def call(i):
            for _ in range(10):
                with contextlib.suppress(RuntimeError):
                    model(torch.ones(4, 5))  # who waits gets its turn after a failure, too
                results[i].append(model(batches[i]))

        in_threads(*(functools.partial(call, i) for i in range(len(batches))))
        for mine, right in zip(results, expected):
            assert len(mine) == 10
            for got in mine:
                torch.testing.assert_close(got, right)

    def test_calls_of_one_model_wait_for_each_other(self):
        inside, overlaps = [], []

        def slow(x):
            inside.append(x)
            time.sleep(0.005)
            overlaps.append(len(inside) - 1)
            inside.pop()
            return x

        model = DataParallel(Returning(slow), ["cpu"] * 2)
        in_threads(*[lambda: model(torch.ones(2))] * 5)
        assert overlaps == [0] * 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
class TestFork:
    """With a module that starts no OpenMP threads: in a forked child those hang, also without us."""

    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([3.0]))
            self.inside, self.leave = threading.Event(), threading.Event()

        def forward(self, x):
            self.inside.set()
            self.leave.wait(120)
            return x * self.weight

    def test_after_use(self):
        net = self.Slow()
        net.leave.set()
        model = DataParallel(net, ["cpu"] * 3)
        x = torch.ones(6)
        model(x).sum().backward()

        def train():
            net.weight.grad = None
            model(x).sum().backward()
            return net.weight.grad.item() == 6

        assert in_child(train)
        assert train()

    def test_while_another_thread_is_in_forward(self):
        net = self.Slow()
        inside, leave = net.inside, net.leave
        model = DataParallel(net, ["cpu"] * 2)
        x = torch.ones(4)
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        inside.wait(60)
        try:
            fine = in_child(lambda: leave.set() or model(x).equal(x * 3))
        finally:
            leave.set()
            thread.join()
        assert fine, "the child hung or was wrong"


CALL_ITSELF = """
import torch, everygpu
from everygpu.errors import EveryGPUError

class Net(torch.nn.Module):
    def forward(self, x):
        return model(x) if calls_itself(x[0]) else x

for calls_itself in (lambda first: True, lambda first: first > 1, lambda first: first > 3):
    model = everygpu.DataParallel(Net(), ["cpu"] * 3)
    try:
        model(torch.arange(6.0))
        print("not refused")
    except EveryGPUError as error:
        print(error)
    found = everygpu.DataParallel(torch.nn.Identity(), ["cpu"] * 3)(torch.ones(3))
    print("works" if found.equal(torch.ones(3)) else "")
"""


@pytest.mark.usefixtures("warm_python")
def test_forward_within_its_own_forward_is_an_error_in_any_replica():
    # In a process of its own: a replica that waits for its own turn waits forever.
    done = subprocess.run([sys.executable, "-c", CALL_ITSELF], capture_output=True, text=True, timeout=60, check=True)
    refused, works = done.stdout.splitlines()[::2], done.stdout.splitlines()[1::2]
    assert len(refused) == 3
    assert all("from within its own forward. Call the inner module" in line for line in refused)
    assert works == ["works"] * 3


class InterruptedOnce:
    """A context variable after whose first change Ctrl-C comes."""

    def __init__(self, variable):
        self.get, self.reset, self._set, self._is_due = variable.get, variable.reset, variable.set, True

    def set(self, value):
        token = self._set(value)
        if self._is_due:
            self._is_due = False
            raise KeyboardInterrupt
        return token


def test_interrupt_at_the_begin_of_a_forward_leaves_the_wrapper_usable(monkeypatch):
    model = DataParallel(nn.Linear(3, 2), ["cpu"] * 2)
    x = torch.randn(4, 3)
    monkeypatch.setattr(forward_lock, "_running", InterruptedOnce(forward_lock._running))
    with pytest.raises(KeyboardInterrupt):
        model(x)
    torch.testing.assert_close(model(x), model.module(x))
    outputs = []
    in_threads(lambda: outputs.append(model(x)))
    torch.testing.assert_close(outputs[0], model.module(x))
