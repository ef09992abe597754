"""Run compiled replicas one after another from the calling thread.

A compiled call is a few launches: it returns long before the device is done, so one thread keeps all devices busy,
where eager replicas would wait for each other's Python. torch's guards see to it that Python state, shapes and control
flow mean what they mean without compiling; torch limits how often it compiles again.
"""

import logging
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from everygpu.comm.streams import current_stream
from everygpu.keys import compiled_original
from everygpu.parallel.batch_norm import SyncBatchNorm
from everygpu.parallel.compiler.compile_once import CompileOnce
from everygpu.parallel.compiler.inductor_backend import InductorBackend, backend_of, compiling_once
from everygpu.parallel.engines.engine import Engine, ModuleCall
from everygpu.parallel.engines.thread_state import on_device
from everygpu.parallel.engines.threads import Outcome, Workers, attempt, take_values
from everygpu.progress import running
from everygpu.torch_private.core import DeviceContext

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]

logger = logging.getLogger("everygpu")


class CompiledReplicas(Engine):
    """Compiled counterparts of the replicas, made at their first call, with the options of a module that its user has
    compiled. Where compiling fails, workers run them; with ``fullgraph=True`` it is an error.

    CUDA graphs are not torch's here, which has one for each replica: a capture has one of all.
    """

    compiles = True

    def __init__(self, module: nn.Module, workers: Workers) -> None:
        self._compile, self._once = _compiler_of(module)
        self._must = compiled_original(module) is not None and module.dynamo_ctx.fullgraph  # type: ignore[union-attr]
        self._workers = workers
        self._compiled: dict[int, tuple[nn.Module, Callable[..., Any]]] = {}
        self._given_up = False

    def run(
        self, calls: Sequence[ModuleCall], devices: Sequence[torch.device], positions: Sequence[int] | None = None
    ) -> list[Any]:
        """Make the calls in order, each with its device current; see ``Workers.run``."""
        calls = [(_inner(module), args, kwargs) for module, args, kwargs in calls]
        if not self._given_up and len(calls) > 1 and any(isinstance(m, SyncBatchNorm) for m in calls[0][0].modules()):
            self._give_up("SyncBatchNorm has replicas wait for each other, which takes a thread for each")
        if self._given_up:
            return self._workers.run(calls, devices, positions)
        names = positions if positions is not None else range(len(calls))
        outcomes: list[Outcome] = []
        with self._once.sharing():
            for position, call, device in zip(names, calls, devices):
                outcomes.append(attempt(lambda p=position, c=call, d=device: self._call(p, c, d)))  # type: ignore[misc]
                if outcomes[-1][1] is not None:
                    break
        if not self._must and _is_compilers(outcomes[-1][1]):
            self._give_up(f"compiling failed: {outcomes[-1][1]}")
            return self._workers.run(calls, devices, positions)
        return take_values(outcomes, list(zip(names, devices, calls)))

    def run_alone(self, call: ModuleCall, device: torch.device) -> Any:
        """Make the only call: of a module that its user has compiled, as it is."""
        if compiled_original(call[0]) is None:
            return super().run_alone(call, device)
        return self._workers.run_alone(call, device)

    @property
    def in_use(self) -> str:
        return "threads" if self._given_up else "compile"

    def close(self) -> None:
        """End the threads."""
        self._workers.close()

    def _call(self, position: int, call: ModuleCall, device: torch.device) -> Any:
        module, args, kwargs = call
        known, function = self._compiled.get(position, (None, None))
        if function is None or known is not module:
            function = self._compile(_as_function(module))
            self._compiled[position] = module, function
        with running("forward", device, position), on_device(device, current_stream(device), DeviceContext):
            return function(*args, **kwargs)

    def _give_up(self, why: str) -> None:
        logger.warning("DataParallel: replicas run eagerly in threads from now on: %s", why)
        self._given_up = True
        self._compiled.clear()


def _compiler_of(module: nn.Module) -> tuple[Compiler, CompileOnce]:
    options: dict[str, Any] = {}
    if compiled_original(module) is None:
        once = CompileOnce(InductorBackend({}))
    else:
        context: Any = module.dynamo_ctx
        options = {"dynamic": context._dynamic, "fullgraph": context.fullgraph}
        found = backend_of(context)
        once = CompileOnce(InductorBackend({}) if found is None else compiling_once(found))
        if found is None:
            return context, once
    return lambda function: torch.compile(function, backend=once, **options), once


def _inner(module: nn.Module) -> nn.Module:
    """Look into the code that ``torch.compile`` made of a module."""
    original = compiled_original(module)
    return module if original is None else original


def _as_function(module: nn.Module) -> Callable[..., Any]:
    """Wrap a replica in a function with code of its own.

    torch keeps compiled versions by code object, and searches them in turn: replicas of one class would look
    through each other's.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    return types.FunctionType(
        call.__code__.replace(co_name="replica"), call.__globals__, "replica", None, call.__closure__
    )


def _is_compilers(error: BaseException | None) -> bool:
    return error is not None and type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
