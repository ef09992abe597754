"""Calls side by side: in turns on one device, together on several, and what happens when one fails."""

import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from concurrent.futures import CancelledError

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from everygpu.errors import DeviceError, OptionError, ReplicaError
from everygpu.parallel import parallel_apply
from everygpu.parallel.engines.scheduler import barrier
from everygpu.parallel.engines.threads import Workers
from everygpu.torch_private.core import top_saved_tensor_hooks

CPU = torch.device("cpu")
SHARED = [CPU] * 3
# Different to us, one and the same to torch: replicas that don't have to take turns.
DISTINCT = [torch.device("cpu", i) for i in range(3)]


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


@pytest.fixture
def workers():
    workers = Workers(2)
    yield workers
    workers.close()


def run(workers, functions, devices=SHARED, positions=None, args=()):
    """Run one function per replica."""
    calls = [(Call(f), args, {}) for f in functions]
    return workers.run(calls, devices[: len(calls)], positions)


def works(workers):
    """Whether the next call gives what it should."""
    return run(workers, [lambda i=i: i for i in range(3)]) == [0, 1, 2]


class TestParallelApply:
    def test_outputs_come_in_order(self, devices):
        used = devices(3)
        modules = [nn.Linear(2, 1).to(d) for d in used]
        inputs = [torch.full((i + 1, 2), 1.0, device=d) for i, d in enumerate(used)]
        outputs = parallel_apply(modules, inputs)
        for module, x, y in zip(modules, inputs, outputs):
            torch.testing.assert_close(y, module(x))

    def test_arguments_of_each_call(self):
        modules = [Call(lambda *args, **kwargs: (args, kwargs)) for _ in range(3)]
        outputs = parallel_apply(modules, [(1, 2), [3], ()], [{"a": 1}, {}, {"b": 2}], ["cpu"] * 3)
        assert outputs == [((1, 2), {"a": 1}), (([3],), {}), ((), {"b": 2})]

    def test_one_module_and_none(self):
        assert parallel_apply([Call(lambda x: x + 1)], [1]) == [2]
        assert parallel_apply([], []) == []

    @pytest.mark.parametrize(
        ("inputs", "kwargs", "devices", "words"),
        [
            ([1], None, None, "2 modules, 1 inputs, 1 kwargs"),
            ([1, 2], [{}], None, "2 modules, 2 inputs, 1 kwargs"),
            ([1, 2], None, ["cpu"] * 3, "2 kwargs and 3 devices"),
        ],
    )
    def test_unequal_numbers(self, inputs, kwargs, devices, words):
        with pytest.raises(OptionError, match=words):
            parallel_apply([Call(lambda x: x)] * 2, inputs, kwargs, devices)

    def test_unknown_device(self):
        with pytest.raises(DeviceError):
            parallel_apply([Call(lambda x: x)], [1], devices=["tpu"])

    def test_threads_end_with_it_also_when_it_fails(self):
        def fail(x):
            raise ValueError(x)

        before = threading.active_count()
        with pytest.raises(ValueError, match="7"):
            parallel_apply([Call(fail)] * 3, [7] * 3)
        assert threading.active_count() == before


class TestTurns:
    def test_replicas_on_one_device_run_one_after_another_in_order(self, workers):
        events = []

        def note(i):
            events.append(("begin", i))
            time.sleep(0.01 * (3 - i))
            events.append(("end", i))

        run(workers, [lambda i=i: note(i) for i in range(3)])
        assert events == [(what, i) for i in range(3) for what in ("begin", "end")]

    def test_only_those_that_share_a_device_wait(self, workers):
        """Replica 1 meets replica 0, then replica 2, which comes after replica 0."""
        early, late = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)
        devices = [DISTINCT[0], DISTINCT[1], DISTINCT[0]]
        run(workers, [early.wait, lambda: (early.wait(), late.wait()), late.wait], devices)

    @pytest.mark.cards(2)
    def test_real_devices_run_at_once(self, devices, workers):
        used = devices(2)
        barrier = threading.Barrier(2, timeout=60)
        assert sorted(run(workers, [barrier.wait] * 2, DISTINCT if used[0].type == "cpu" else used)) == [0, 1]

    @pytest.mark.parametrize("devices", [DISTINCT, [DISTINCT[0], DISTINCT[1], DISTINCT[0]]], ids=["all", "some"])
    def test_tensors_are_saved_in_order(self, workers, devices):
        saved, x = [], torch.ones(2, requires_grad=True)

        def replica(name):
            y = x
            for _ in range(2):
                for _ in range(3):
                    time.sleep(0.002)
                    y = y * torch.full((2,), name)
                barrier(None, lambda brought: brought)
            return y

        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            run(workers, [lambda name=name: replica(name) for name in (2.0, 3.0, 5.0)], devices)
        assert [t[0].item() for t in saved] == [2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 5.0, 5.0, 5.0] * 2

    def test_tensors_that_go_to_the_host_are_saved_at_once(self, workers):
        both, x = threading.Barrier(3, timeout=60), torch.ones(2, requires_grad=True)
        with torch.autograd.graph.save_on_cpu():
            outputs = run(workers, [lambda: (both.wait(), x * x)[1]] * 3, DISTINCT)
        assert torch.autograd.grad(sum(outputs).sum(), x)[0].tolist() == [6.0, 6.0]


class TestThreads:
    def test_first_runs_in_the_callers_and_the_others_in_lasting_ones(self, workers):
        first = run(workers, [threading.get_ident] * 3)
        assert first[0] == threading.get_ident()
        assert len(set(first)) == 3
        for _ in range(3):
            assert run(workers, [threading.get_ident] * 3) == first

    def test_threads_start_at_the_first_call(self):
        before = threading.active_count()
        workers = Workers(2)
        assert threading.active_count() == before
        assert works(workers)
        assert threading.active_count() == before + 2
        workers.close()
        assert threading.active_count() == before
        assert works(workers)
        workers.close()

    def test_fewer_calls_than_threads(self, workers):
        assert run(workers, [lambda: "a", lambda: "b"]) == ["a", "b"]
        assert run(workers, [lambda: "a"]) == ["a"]
        assert works(workers)

    def test_outputs_are_not_kept(self, workers):
        outputs = run(workers, [lambda: torch.ones(3)] * 3)
        left = [weakref.ref(t) for t in outputs]
        del outputs
        works(workers)
        gc.collect()
        assert [ref() for ref in left] == [None] * 3


def fail_deep_inside(message):
    raise KeyError(message)


OLD_CHECKPOINT = """
from torch.autograd.graph import saved_tensors_hooks

def _within_hooks():
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        yield

def checkpoint(function, *args, use_reentrant):
    gen = _within_hooks()
    next(gen)
    result = function(*args)
    next(gen, None)
    return result
"""


def as_in_torch_2_11(function, *args, use_reentrant):
    """Call torch's checkpoint as it was: its hooks stayed after an exception."""
    namespace = {"__name__": "torch.utils.checkpoint"}
    exec(OLD_CHECKPOINT, namespace)
    return namespace["checkpoint"](function, *args, use_reentrant=use_reentrant)


class TestFailure:
    @pytest.mark.parametrize("failing", [0, 1, 2])
    @pytest.mark.parametrize("devices", [SHARED, DISTINCT], ids=["shared", "distinct"])
    def test_exception_is_the_replicas_own(self, workers, failing, devices):
        functions = [lambda x: x] * 3
        functions[failing] = lambda x: fail_deep_inside("mine")
        with pytest.raises(KeyError, match="mine") as caught:
            run(workers, functions, devices, positions=[0, 4, 7], args=(torch.ones(2, 3),))
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert frames[-1] == "fail_deep_inside"
        where = caught.value.__cause__
        assert isinstance(where, ReplicaError)
        position = [0, 4, 7][failing]
        assert str(where) == (f"forward: replica {position} on {devices[failing]} failed, called with args[0] (2, 3).")
        assert works(workers)

    def test_shapes_of_nested_arguments(self, workers):
        calls = [(Call(lambda *a, **k: 1 / 0), ({"x": [torch.ones(2)]}, 3), {"y": torch.ones(4, 1)})] * 2
        with pytest.raises(ZeroDivisionError) as caught:
            workers.run(calls, SHARED[:2])
        assert 'called with args[0]["x"][0] (2,), kwargs["y"] (4, 1).' in str(caught.value.__cause__)

    def test_first_replicas_exception_wins(self, workers):
        barrier = threading.Barrier(3, timeout=60)

        def fail(i):
            barrier.wait()
            time.sleep(0.01 * (3 - i))
            raise ValueError(f"replica {i}")

        with pytest.raises(ValueError, match="replica 0"):
            run(workers, [lambda i=i: fail(i) for i in range(3)], DISTINCT)

    @pytest.mark.parametrize("failing", [0, 1])
    def test_replicas_that_have_not_begun_never_do(self, workers, failing):
        begun = []

        def note(i):
            begun.append(i)
            if i == failing:
                raise ValueError("stop")

        with pytest.raises(ValueError, match="stop"):
            run(workers, [lambda i=i: note(i) for i in range(3)])
        assert begun == list(range(failing + 1))
        assert works(workers)

    def test_replicas_that_have_begun_are_waited_for(self, workers):
        begun, done = threading.Event(), []

        def finish():
            begun.set()
            time.sleep(0.1)
            done.append(True)

        def fail():
            begun.wait(60)
            raise ValueError("early")

        with pytest.raises(ValueError, match="early"):
            run(workers, [fail, finish], DISTINCT)
        assert done == [True]

    @pytest.mark.parametrize("failing", [0, 1, 2])
    def test_cancelled_error_of_the_users_is_an_exception_like_any(self, workers, failing):
        def fail():
            raise CancelledError("a future of mine")

        functions = [lambda: 1] * 3
        functions[failing] = fail
        with pytest.raises(CancelledError, match="a future of mine"):
            run(workers, functions)

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
    @pytest.mark.parametrize("failing", [0, 1])
    @pytest.mark.parametrize("devices", [SHARED, DISTINCT], ids=["shared", "distinct"])
    def test_interrupt_in_a_replica_reaches_the_caller(self, workers, kind, failing, devices):
        def interrupt():
            raise kind

        functions = [lambda: 1] * 3
        functions[failing] = interrupt
        with pytest.raises(kind):
            run(workers, functions, devices)
        assert works(workers)

    @pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")
    @pytest.mark.parametrize("devices", [SHARED, DISTINCT], ids=["shared", "distinct"])
    def test_ctrl_c_while_waiting(self, workers, devices):
        begun, done = [], []

        def press(i):
            begun.append(i)
            time.sleep(0.1)  # by now the caller waits
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.2)
            done.append(i)

        with pytest.raises(KeyboardInterrupt):
            run(workers, [int, lambda: press(1)], devices)
        assert done == begun == [1]
        assert works(workers)

    @pytest.mark.parametrize("checkpoint", [checkpoint, as_in_torch_2_11], ids=["torch's", "as in torch 2.11"])
    @pytest.mark.parametrize("failing", range(3))
    def test_a_checkpoint_that_fails_leaves_no_hooks_in_its_thread(self, workers, failing, checkpoint):
        def inner(i):
            return checkpoint(lambda: 1 / 0 if i == failing else i, use_reentrant=False)

        def middle(i):
            try:
                return checkpoint(inner, i, use_reentrant=False)
            except ZeroDivisionError as error:
                raise ValueError from error

        def outer(i):
            return checkpoint(middle, i, use_reentrant=False)

        with pytest.raises(ValueError):  # whose traceback holds the checkpoints' frames
            run(workers, [functools.partial(outer, i) for i in range(3)], DISTINCT)
        assert run(workers, [top_saved_tensor_hooks] * 3, DISTINCT) == [None] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
class TestFork:
    def test_children_start_threads_of_their_own(self, workers):
        assert works(workers)
        assert in_child(lambda: works(workers) and in_child(lambda: works(workers)))
        assert works(workers)


def in_child(check, seconds=60):
    """Whether ``check()`` is true in a forked process."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return status == 0


AFTER_MAIN = """
import atexit, threading
import torch, everygpu

model = everygpu.DataParallel(torch.nn.Identity(), ["cpu"] * 3)
model(torch.ones(3))

def go_on():
    threading.main_thread().join()
    print("thread", model(torch.ones(3)).tolist())

threading.Thread(target=go_on).start()
atexit.register(lambda: print("exit", model(torch.ones(3)).tolist()))
"""


@pytest.mark.usefixtures("warm_python")
def test_replicas_serve_threads_and_exit_handlers_that_outlive_the_main_thread():
    done = subprocess.run([sys.executable, "-c", AFTER_MAIN], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "thread [1.0, 1.0, 1.0]\nexit [1.0, 1.0, 1.0]\n"


def test_thread_that_cannot_start_leaves_no_replica_out_later(workers, monkeypatch):
    start, calls, begun = threading.Thread.start, [], []

    def refuse(thread):
        calls.append(thread)
        if len(calls) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        run(workers, [lambda i=i: begun.append(i) for i in range(3)])
    assert 0 not in begun
    assert works(workers)
