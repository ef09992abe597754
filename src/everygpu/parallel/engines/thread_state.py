"""What torch and Python keep per thread, carried from the caller to the replicas' threads."""

import contextvars
import threading
import traceback
import types
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor

from everygpu.comm.streams import queueing_on
from everygpu.parallel.cuda_graphs.executed_code import current_profile, profiling
from everygpu.torch_private.core import (
    DeviceContext,
    SavedTensorHooks,
    device_constructors,
    function_modes,
    pop_function_mode,
    push_function_mode,
    top_saved_tensor_hooks,
)

T = TypeVar("T")

NUM_WATCHED = 3
"""Calls of a kind in which a module is watched for tensors that it makes without a device."""


class ThreadState:
    """The calling thread's state: grad and inference mode, autocast, function modes, saved-tensor hooks,
    context variables and current streams.
    """

    def __init__(self, devices: list[torch.device]) -> None:
        self._records_grads, self._is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        kinds = dict.fromkeys(["cpu", *(d.type for d in devices)])
        self._autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._function_modes = function_modes()
        hooks = top_saved_tensor_hooks()
        self.counts_saved_tensors = hooks is not None and hooks[0].__module__ != torch.autograd.graph.__name__
        """Whether saved-tensor hooks may depend on the order of their calls.

        An activation checkpoint's do, which knows the tensors of a forward that it runs again by their number; torch's
        ``save_on_cpu`` takes each tensor by itself.
        """
        self._hooks = _one_at_a_time(*hooks) if hooks is not None and self.counts_saved_tensors else hooks
        self._profile = current_profile()
        self._streams = {d: torch.cuda.current_stream(d) for d in devices if d.type == "cuda"}

    def run_here(
        self, function: Callable[[], T], device: torch.device | None = None, mode: "MakeMode | None" = None
    ) -> T:
        """Call a function in the captured thread, with the saved-tensor hooks that the others get."""
        try:
            with self._packing(), self._on_device(device, mode):
                return function()
        finally:  # once more: Ctrl-C may have come while the mode was to be left
            while len(modes := function_modes()) > len(self._function_modes) and isinstance(modes[-1], FactoryDevice):
                pop_function_mode()

    def snapshot(self) -> contextvars.Context:
        """Copy the context variables; one copy can run in one thread only."""
        return contextvars.copy_context()

    def run(
        self,
        context: contextvars.Context,
        device: torch.device,
        function: Callable[[], T],
        mode: "MakeMode | None" = None,
    ) -> T:
        """Call a function in another thread as if from the captured one, with ``device`` current; see ``on_device``."""

        def call() -> T:
            with ExitStack() as stack:
                enter = stack.enter_context
                if self._is_inference:
                    enter(torch.inference_mode())
                enter(torch.set_grad_enabled(self._records_grads))
                for kind, dtype in self._autocast:
                    enter(torch.autocast(kind, dtype, cache_enabled=self._caches_casts))
                enter(self._packing())
                for outer in self._function_modes:
                    enter(_pushed(_for_device(outer, device)))
                for d, stream in self._streams.items():  # a replica may read a tensor there that is no parameter
                    if d != device and stream != torch.cuda.default_stream(d):
                        enter(torch.cuda.stream(stream))
                enter(self._on_device(device, mode))
                enter(nullcontext() if self._profile is None else profiling(self._profile))
                return function()

        return context.run(call)

    def _on_device(self, device: torch.device | None, mode: "MakeMode | None") -> AbstractContextManager[None]:
        if device is None or device.type == "cpu":
            return nullcontext()
        return on_device(device, self._streams.get(device), mode)

    def _packing(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._hooks is None else torch.autograd.graph.saved_tensors_hooks(*self._hooks)


def _one_at_a_time(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> SavedTensorHooks:
    """Let one thread at a time unpack tensors.

    Autograd has a thread for each GPU. The first tensor of a checkpoint that is unpacked has the forward run again:
    a second thread would run it once more, while the first one does.
    """
    turn = threading.RLock()

    def unpack_alone(packed: Any) -> Tensor:
        with turn:
            return unpack(packed)

    return pack, unpack_alone


def leave_checkpoints(error: BaseException) -> None:
    """Leave the saved-tensor hooks of activation checkpoints that an exception has come through.

    Before torch 2.13 they stay in their thread until the traceback is gone, and are then left in any other. Meanwhile
    they take what later forwards save in this thread for a part of the checkpoint.
    """
    if error.__context__ is not None:  # the inner ones first
        leave_checkpoints(error.__context__)
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__") == torch.utils.checkpoint.__name__:
            for value in list(frame.f_locals.values()):
                if isinstance(value, types.GeneratorType):
                    value.close()


class FactoryDevice(DeviceContext):
    """``with torch.device(…)`` for one thread: torch's own also sets a variable that all threads share. ``use`` is
    notified when a tensor is made without ``device=``.
    """

    def __init__(self, device: torch.device, use: "FactoryUse | None" = None) -> None:
        super().__init__(device)
        self._use = use

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._use is not None and func in device_constructors() and (kwargs or {}).get("device") is None:
            self._use.is_found = True
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def __enter__(self) -> None:
        push_function_mode(self)

    def __exit__(self, *error: object) -> None:
        pop_function_mode()


MakeMode = Callable[[torch.device], DeviceContext]
"""Makes what gives tensors their device."""


class FactoryUse:
    """Whether a module makes tensors without ``device=``.

    A function mode gives them the replica's device. It costs each operation some 2 us, a fifth of what forward costs
    Python, so that it is left out after a few calls in which there were none.
    """

    def __init__(self) -> None:
        self.is_found = False
        self._num_calls: dict[Hashable, int] = {}

    def mode_for(self, call: Callable[..., Any]) -> MakeMode | None:
        """Return what to make a mode with for a call of this module or method, or of replicas'; None: it needs none."""
        is_method = isinstance(call, types.MethodType)
        code, module = (call.__func__, call.__self__) if is_method else (type(call), call)  # type: ignore[attr-defined]
        kind = code, getattr(module, "training", None), torch.is_grad_enabled()
        num_calls = self._num_calls.get(kind, 0)
        if not self.is_found and num_calls >= NUM_WATCHED:
            return None
        if not any(isinstance(m, DeviceContext) for m in function_modes()):  # or the caller's would hide what it finds
            self._num_calls[kind] = num_calls + 1
        return partial(FactoryDevice, use=self)


@contextmanager
def _pushed(mode: Any) -> Iterator[None]:
    # Not mode.__enter__: the caller has entered it already, and what that does beyond pushing is done.
    push_function_mode(mode)
    try:
        yield
    finally:
        pop_function_mode()


def _for_device(mode: Any, device: torch.device) -> Any:
    """Turn ``with torch.device("cuda:0")`` around the call into the replica's device."""
    if isinstance(mode, DeviceContext):
        return FactoryDevice(device if mode.device.type == device.type else mode.device)
    return mode


@contextmanager
def fresh_casts(*, caches: bool = True) -> Iterator[None]:
    """Use a fresh autocast cache of cast parameters within the block.

    It keeps them until its outermost context ends, whatever is written to the parameters; and as there is one cache
    for all threads, until any thread leaves autocast, which replicas' do at some time or other. Those that are made
    within a capture aren't for others, and the capture must not count on those of before.

    Without ``caches`` each use of a parameter has a cast of its own, whenever other threads leave autocast.
    """
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(before and caches)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


@contextmanager
def on_device(device: torch.device, stream: torch.cuda.Stream | None, mode: MakeMode | None = None) -> Iterator[None]:
    """Make a device current for a replica: ``.cuda()`` means this one. On the CPU the caller's default stays.

    ``mode`` puts tensors made without ``device=`` there: ``FactoryDevice`` if other threads run, or torch's own,
    which its compiler knows.
    """
    with ExitStack() as stack:
        stack.enter_context(queueing_on(device, stream))
        is_set = device.type == "cpu" or any(isinstance(m, DeviceContext) for m in function_modes())
        if mode is not None and not is_set:
            stack.enter_context(mode(device))
        yield
