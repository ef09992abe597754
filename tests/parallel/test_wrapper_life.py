"""What becomes of a wrapper in processes, threads and forwards that come, end, or are interrupted."""

import contextlib
import functools
import gc
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import lookup_backend

import everygpu
from everygpu import DataParallel
from everygpu.checkpoint.background import Background
from everygpu.errors import CallError
from everygpu.parallel import forward_lock
from everygpu.parallel.engines import compiled
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


class TestFailures:
    """What a failed call has allocated is free as soon as its exception is: no cycle waits for the collector."""

    @pytest.fixture(autouse=True)
    def held(self):
        """Weak references to what is made, without the garbage collector."""
        gc.collect()
        gc.disable()
        yield []
        gc.enable()

    @pytest.fixture
    def check(self, held):
        def check(call):
            with pytest.raises(ValueError, match="no use"):
                call()
            assert held
            assert [ref() for ref in held] == [None] * len(held)

        return check

    @pytest.fixture
    def fail(self, held):
        def fail(x, rows=range(9)):
            """Fail on these rows, with something that was made."""
            temporary = x.clone()
            held.append(weakref.ref(temporary))
            if int(x[0, 0]) in rows:
                raise ValueError("no use")
            return temporary

        return fail

    x = torch.arange(7.0)[:, None].repeat(1, 4)

    @pytest.mark.parametrize("rows", [[0], [6], [0, 3, 6]])
    def test_of_a_replica(self, rows, check, fail):
        net = nn.Sequential(Returning(functools.partial(fail, rows=rows)), nn.Linear(4, 2))
        model = DataParallel(net, ["cpu"] * 3)
        step = everygpu.TrainStep(model, torch.mean, torch.optim.SGD(model.parameters(), lr=0.1))
        check(lambda: model(self.x))
        check(lambda: everygpu.parallel.data_parallel(net, self.x, ["cpu"] * 3))
        check(lambda: step(self.x))

    def test_of_a_compiled_replica(self, monkeypatch, check, fail):
        monkeypatch.setattr(compiled, "InductorBackend", lambda _: lookup_backend("eager"))
        monkeypatch.setattr(compiled, "_as_function", lambda module: torch.compiler.disable(module.forward))
        model = DataParallel(Returning(functools.partial(fail, rows=[3])), ["cpu"] * 3, engine="compile")
        check(lambda: model(self.x))

    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_of_a_loss_and_a_loader(self, prefetch, check, fail):
        def batches():
            yield self.x
            fail(self.x)

        feeder = everygpu.Feeder(batches(), ["cpu"] * 3, prefetch=prefetch)
        check(lambda: list(feeder))
        model = DataParallel(nn.Linear(4, 2), ["cpu"] * 3)
        step = everygpu.TrainStep(model, fail, torch.optim.SGD(model.parameters(), lr=0.1))
        check(lambda: step(self.x * 0))

    def test_of_a_save(self, caplog, check, fail):
        caplog.set_level(logging.CRITICAL)  # pytest keeps the record, and that the exception
        background = Background()
        background.start(lambda: fail(self.x))
        check(background.wait)


ROWS = torch.arange(24.0).reshape(6, 4)


def call_while(model: everygpu.DataParallel, release: Callable[[], None], seconds: float) -> list[str]:
    """Train in two threads while a third one releases; return what went wrong there."""
    wanted, wrong, is_over = model.module(ROWS).detach(), [], threading.Event()

    def call() -> None:
        while not is_over.is_set():
            try:
                y: Tensor = model(ROWS)
                torch.testing.assert_close(y.detach(), wanted)
                y.sum().backward()
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=call, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        release()
        time.sleep(0.001)
    is_over.set()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a call waits forever"
    return wrong


def test_a_thread_calls_while_another_releases() -> None:
    model = everygpu.DataParallel(nn.Linear(4, 2), ["cpu"] * 3)
    assert call_while(model, model.release, 0.2) == []


def test_a_replica_releases_its_own_wrapper() -> None:
    class Net(nn.Module):
        releases = True

        def forward(self, x: Tensor) -> Tensor:
            if self.releases:
                model.release()
            return x * 2

    model = everygpu.DataParallel(Net(), ["cpu"] * 2)
    with pytest.raises(CallError, match="Call release.. after forward"):
        model(ROWS)
    model.module.releases = False
    torch.testing.assert_close(model(ROWS), ROWS * 2)


NUM = 34
"""Of each kind: about 100 together."""


def wrapped() -> everygpu.DataParallel:
    return everygpu.DataParallel(nn.Linear(4, 4), ["cpu"] * 2)


def train_step() -> list[Any]:
    model = wrapped()
    step = everygpu.TrainStep(model, F.mse_loss, torch.optim.AdamW(model.parameters()))
    step(ROWS[:4], ROWS[:4])
    return [step, model, model.module, model.module.weight]


def sharded_optimizer() -> list[Any]:
    model = wrapped()
    optimizer = everygpu.ShardedOptimizer(torch.optim.AdamW(model.parameters()), ["cpu"] * 2)
    model(ROWS[:4]).sum().backward()
    optimizer.step()
    with model.frozen():
        model(ROWS[:4])
    return [optimizer, model, model.module, model.module.weight]


def feeder() -> list[Any]:
    """Leave the loop midway."""
    model = wrapped()
    made = everygpu.Feeder([ROWS[:4]] * 4, model)
    batches = iter(made)
    model(next(batches))
    return [made, model, model.module]


@pytest.mark.parametrize("make", [train_step, sharded_optimizer, feeder])
def test_objects_leave_nothing(make: Callable[[], list[Any]]) -> None:
    other, is_over, outputs = wrapped(), threading.Event(), []

    def use() -> None:
        while not is_over.wait(0.005):
            outputs.append(other(ROWS[:4]).sum().backward())

    thread = threading.Thread(target=use)
    thread.start()
    left = [weakref.ref(made) for _ in range(NUM) for made in make()]
    while thread.is_alive() and not outputs:
        time.sleep(0.001)
    is_over.set()
    thread.join()
    gc.collect()
    assert [ref for ref in left if ref() is not None] == []
    assert outputs


def test_a_parameter_that_is_replaced_is_let_go():
    """On one device, which looks at it in every call; another in its place is moved there as the first was."""
    net = nn.Linear(2, 2)
    model = everygpu.DataParallel(net, ["cpu"])
    model(torch.ones(1, 2))
    before = weakref.ref(net.weight)
    net.weight = nn.Parameter(torch.ones(2, 2))
    assert before() is None
    assert model(torch.ones(1, 2)).requires_grad
    del net.weight, net.bias
    net.forward = lambda x: x
    assert model(torch.ones(1, 2)).sum() == 2


@pytest.mark.gpu
def test_a_parameter_in_place_of_another_is_moved():
    net = nn.Linear(2, 2, bias=False).cuda()
    model = everygpu.DataParallel(net, [0])
    model(torch.ones(1, 2))
    net.weight = nn.Parameter(torch.ones(2, 2))
    assert model(torch.ones(1, 2)).device == torch.device("cuda", 0)
