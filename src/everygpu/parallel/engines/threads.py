"""Run one call per replica, side by side."""

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from everygpu import tree
from everygpu.devices.parse import DeviceLike, parse_devices
from everygpu.devices.seed import RandomOf
from everygpu.errors import OptionError, ReplicaError
from everygpu.parallel.engines.engine import Engine, ModuleCall
from everygpu.parallel.engines.scheduler import Cancelled, ReplicaScheduler
from everygpu.parallel.engines.thread_state import FactoryUse, ThreadState, leave_checkpoints
from everygpu.progress import running

Outcome = tuple[Any, BaseException | None]
"""What a replica returned, or raised."""


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[DeviceLike] | None = None,
) -> list[Any]:
    """Call each module with its inputs, all at once::

        first, second = everygpu.parallel.parallel_apply([module, nn.Linear(4, 3)], [x, x])

    Args:
        modules: One per call.
        inputs: Positional arguments of each call: a tuple, or a single value.
        kwargs_tup: Keyword arguments of each call.
        devices: Where each module lives; found from its parameters or inputs when left out.
    Returns:
        The outputs, in order.
    Raises:
        OptionError: the arguments are not equally many.
        Exception: what a replica raised; its ``__cause__`` names the replica.
    Source:
        ``torch.nn.parallel.parallel_apply``, which carries only autocast's on/off to its threads.
    """
    return apply_once(modules, inputs, kwargs_tup, devices)


def apply_once(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any]] | None,
    devices: Sequence[DeviceLike] | None,
    *,
    at_once: bool = False,
) -> list[Any]:
    """Call each module in threads that are made for it; see ``parallel_apply``, and ``Workers.runs_at_once``."""
    calls = list(inputs)
    kwargs = list(kwargs_tup) if kwargs_tup is not None else [{} for _ in calls]
    found = [_device_of(m, i) for m, i in zip(modules, calls)] if devices is None else parse_devices(devices)
    if not len(modules) == len(calls) == len(kwargs) == len(found):
        raise OptionError(
            f"parallel_apply: needs as many inputs, kwargs and devices as modules, got {len(modules)} modules, "
            f"{len(calls)} inputs, {len(kwargs)} kwargs and {len(found)} devices."
        )
    if not calls:
        return []
    arguments = [c if isinstance(c, tuple) else (c,) for c in calls]
    workers = Workers(len(modules) - 1)
    workers.runs_at_once = at_once
    try:
        return workers.run(list(zip(modules, arguments, kwargs)), found)
    finally:
        workers.close()


class ReplicaThread:
    """A thread that makes one call after another, until this object is closed or dropped.

    It outlives the main thread, where other threads, or exit handlers, still call the model: a
    ``ThreadPoolExecutor(max_workers=1)`` takes no calls then.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._calls.put, None)
        self._end.atexit = False

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Make a call after those before it."""
        future: Future[Any] = Future()
        self._calls.put(functools.partial(_fulfil, future, function, args))
        return future

    def close(self) -> None:
        """End the thread, after the calls that were submitted."""
        self._end()
        self._thread.join()


def _serve(calls: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # while it waits, it holds no activations


def _fulfil(future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        future.set_result(function(*args))
    except BaseException as error:  # noqa: BLE001 - raised again by future.result()
        future.set_exception(error)
    finally:
        del future, function, args  # the error's traceback holds this frame


class Workers(Engine):
    """One persistent thread per replica after the first, which runs in the caller's.

    The threads start at the first call and end with this object.
    """

    runs_at_once = False
    """Whether replicas on one device also run concurrently."""

    def __init__(self, num_threads: int, random_of: RandomOf | None = None) -> None:
        self._random_of = random_of
        self._num_threads = num_threads
        self._threads: list[ReplicaThread] = []
        self._pid = 0
        self._factories = FactoryUse()

    @property
    def in_use(self) -> str:
        return "threads"

    def run(
        self,
        calls: Sequence[ModuleCall],
        devices: Sequence[torch.device],
        positions: Sequence[int] | None = None,
    ) -> list[Any]:
        """Make the calls side by side and wait for all of them.

        Replicas that share a device share its random generator, so they run one after another, in order: a seeded run
        gives the same numbers every time. So do all replicas under saved-tensor hooks that may depend on the order.
        But where ``replicate`` is overridden, they run at once: it may have connected them to wait for each other.
        """
        if len(devices) > 1 and devices[0].type == "cuda":
            _load_linear_algebra()
        state = ThreadState(list(devices))
        names = positions if positions is not None else range(len(calls))
        random = None if self._random_of is None else self._random_of(devices, names)
        in_order = state.counts_saved_tensors or random is not None
        scheduler = ReplicaScheduler(devices, in_order=in_order, at_once=self.runs_at_once, random=random)
        jobs = [functools.partial(_call, scheduler, i, *each) for i, each in enumerate(zip(calls, devices, names))]
        futures: list[Future[Any]] = []
        mode = self._factories.mode_for(calls[0][0])
        try:
            for worker, job, device in zip(self._started(), jobs[1:], devices[1:]):
                futures.append(worker.submit(state.run, state.snapshot(), device, job, mode))
            own = devices[0] if len(jobs) > 1 else None
            outcomes = [attempt(functools.partial(state.run_here, jobs[0], own, mode))]
            while futures:  # a future of a failed call would hold its exception, and that this frame
                outcomes.append(attempt(futures.pop(0).result))
        except BaseException:  # Ctrl-C while waiting: no replica may still run in the next call
            scheduler.stop()
            with contextlib.suppress(RuntimeError):  # a thread that can't start has nothing to wait for
                wait([thread.submit(lambda: None) for thread in self._threads])
            raise
        return take_values(outcomes, list(zip(names, devices, calls)))

    def run_alone(self, call: ModuleCall, device: torch.device) -> Any:
        """Call the module as it is: no thread, no thread state to carry over."""
        module, args, kwargs = call
        if torch.compiler.is_compiling():
            return module(*args, **kwargs)
        with running("forward", device, 0):
            return module(*args, **kwargs)

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.close()
        self._threads, self._pid = [], 0

    def _started(self) -> list[ReplicaThread]:
        if self._pid != os.getpid():  # first call, or a fork, which copies no threads
            self._threads = [ReplicaThread(f"everygpu-replica-{i + 1}") for i in range(self._num_threads)]
            self._pid = os.getpid()  # last: a thread that can't start, or Ctrl-C, leaves it to be done
        return self._threads


@functools.cache
def _load_linear_algebra() -> None:
    """Load what torch loads at the first use of torch.linalg: done by two threads at once, that fails.

    Source: https://github.com/pytorch/pytorch/issues/90613
    """
    torch.linalg.inv(torch.ones((1, 1), device="cuda"))


def _call(scheduler: ReplicaScheduler, index: int, call: ModuleCall, device: torch.device, position: int) -> Any:
    """Make one replica's call."""
    module, args, kwargs = call
    try:
        with scheduler.turn(index), running("forward", device, position):
            return module(*args, **kwargs)
    except BaseException as error:
        leave_checkpoints(error)
        raise


def attempt(function: Callable[[], Any]) -> Outcome:
    """Call a function, keeping an exception for when all replicas have stopped."""
    try:
        return function(), None
    except Exception as error:  # noqa: BLE001 - raised again by take_values
        return None, error
    finally:
        del function  # the traceback holds this frame, and a future's method the exception


def take_values(outcomes: list[Outcome], calls: Sequence[tuple[int, torch.device, Any]]) -> list[Any]:
    """Return what the replicas returned, or raise the first exception as it was, with the replica named as its cause.

    The outcomes are taken out of their list. A traceback holds the frames of all callers: one that held the exception
    in turn would keep what the failed replicas have allocated until the next garbage collection.
    """
    values = [value for value, _ in outcomes]
    errors = [error for _, error in outcomes]
    outcomes.clear()
    failed = next((i for i, e in enumerate(errors) if e is not None and not isinstance(e, Cancelled)), None)
    if failed is None:
        return values
    position, device, (_, args, kwargs) = calls[failed]
    shapes, error = _shapes(args, kwargs), errors[failed]
    # These may not be rows: a mask with as many rows as the batch was also cut.
    advice = " Wrap an input that every replica needs whole in everygpu.Replicated(...)."
    where = ReplicaError(
        f"forward: replica {position} on {device} failed, called with {', '.join(shapes) or 'no tensors'}."
        f"{advice if len(shapes) > 1 and type(error) in (RuntimeError, ValueError, IndexError) else ''}"
    )
    assert error is not None  # noqa: S101 - it has failed
    where.__cause__ = error.__cause__
    try:
        raise error from where
    finally:
        del error, errors, values


def _shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    named = [*tree.leaves(args, "args"), *tree.leaves(dict(kwargs), "kwargs")]
    return [f"{path} {tree.shape_of(leaf)}" for path, leaf in named if isinstance(leaf, Tensor)]


def _device_of(module: nn.Module, inputs: Any) -> torch.device:
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [leaf for _, leaf in tree.leaves(inputs, "") if isinstance(leaf, Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")
