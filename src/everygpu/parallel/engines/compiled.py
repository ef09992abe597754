"""Run compiled replicas one after another from the calling thread.

A compiled call is a few launches, or the replay of a CUDA graph: it returns long before the device is done, so
one thread keeps all devices busy, where eager replicas would wait for each other's Python. torch's guards see to it
that Python state, shapes and control flow mean what they mean without compiling.
"""

import logging
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everygpu import tree
from everygpu.comm.streams import current_stream
from everygpu.keys import compiled_original
from everygpu.parallel.batch_norm.layer import SyncBatchNorm
from everygpu.parallel.compiler.inductor_backend import compiling_once, inductor
from everygpu.parallel.compiler.shared_graph import Recorder, backend_of, find_binding
from everygpu.parallel.engines.engine import Call, Engine
from everygpu.parallel.engines.thread_state import on_device
from everygpu.parallel.engines.threads import Outcome, Workers, attempt, take_values
from everygpu.progress import running
from everygpu.torch_private.modes import DeviceContext

MAX_SIGNATURES = 8
"""Each combination of shapes costs a compilation for every replica: after this many, replicas run eagerly."""

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]

logger = logging.getLogger("everygpu")


class CompiledReplicas(Engine):
    """Compiled counterparts of the replicas, made at their first call.

    Args:
        module: The user's module; where it went through ``torch.compile``, replicas are compiled with the same
            options, else for the least overhead.
        workers: Run the replicas where compiling doesn't pay off or fails.
        cuda_graphs: Let torch make CUDA graphs of them.
    """

    is_fixed = True

    def __init__(self, module: nn.Module, workers: Workers, *, cuda_graphs: bool = True) -> None:
        self._compile, self._recorder = _compiler_of(module, cuda_graphs=cuda_graphs)
        self._workers = workers
        self._compiled: dict[int, tuple[nn.Module, Callable[..., Any]]] = {}
        self._signatures: set[Any] = set()
        self._given_up = False

    def run(
        self, calls: Sequence[Call], devices: Sequence[torch.device], positions: Sequence[int] | None = None
    ) -> list[Any]:
        """Make the calls in order, each with its device current; see ``Workers.run``."""
        calls = [(_inner(module), args, kwargs) for module, args, kwargs in calls]
        if self._given_up or not self._accepts(calls):
            return self._workers.run(calls, devices, positions)
        names = positions if positions is not None else range(len(calls))
        outcomes = self._launch(calls, devices, names)
        if any(_is_compilers(error) for _, error in outcomes):
            self._give_up(f"compiling failed: {outcomes[-1][1]}")
            return self._workers.run(calls, devices, positions)
        values = take_values(outcomes, list(zip(names, devices, calls)))
        return (
            [tree.map_leaves(_leave_graph_memory, value) for value in values] if self._recorder.may_capture else values
        )

    @property
    def in_use(self) -> str:
        return "threads" if self._given_up else "compile"

    def close(self) -> None:
        """End the threads."""
        self._workers.close()

    def _launch(self, calls: Sequence[Call], devices: Sequence[torch.device], names: Sequence[int]) -> list[Outcome]:
        """Call the first replica, then the others: by its graph where that serves, else each compiled for itself."""
        with self._recorder.recording() as runs:
            outcomes = [attempt(lambda: self._call(names[0], calls[0], devices[0]))]
        binding = find_binding(runs, calls[0], devices[0], outcomes[0][0]) if _can_share(calls) else None
        for position, call, device in list(zip(names, calls, devices))[1:]:
            if outcomes[-1][1] is not None:
                break
            inputs = None if binding is None else binding.inputs_for(call, device)
            if binding is None or inputs is None:
                outcomes.append(attempt(lambda p=position, c=call, d=device: self._call(p, c, d)))  # type: ignore[misc]
            else:
                outcomes.append(attempt(lambda p=position, i=inputs, d=device: _on(d, p, binding.run, i)))  # type: ignore[misc]
        return outcomes

    def _call(self, position: int, call: Call, device: torch.device) -> Any:
        module, args, kwargs = call
        known, function = self._compiled.get(position, (None, None))
        if function is None or known is not module:
            function = self._compile(_as_function(module))
            self._compiled[position] = module, function
        return _on(device, position, function, *args, **kwargs)

    def _accepts(self, calls: Sequence[Call]) -> bool:
        if len(calls) > 1 and any(isinstance(m, SyncBatchNorm) for m in calls[0][0].modules()):
            self._give_up("SyncBatchNorm has replicas wait for each other, which takes a thread for each")
        self._signatures.add(tuple(_signature(call) for call in calls))
        if len(self._signatures) > MAX_SIGNATURES:
            self._give_up(f"inputs came in more than {MAX_SIGNATURES} combinations of shapes")
        return not self._given_up

    def _give_up(self, why: str) -> None:
        logger.warning("DataParallel: replicas run eagerly in threads from now on: %s", why)
        self._given_up = True
        self._compiled.clear()


def _on(device: torch.device, position: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with running("forward", device, position), on_device(device, current_stream(device), DeviceContext):
        return function(*args, **kwargs)


def _can_share(calls: Sequence[Call]) -> bool:
    """Tell whether replicas may run one graph: called alike. Which devices it serves, it knows itself."""
    return len(calls) > 1 and len({_signature(call) for call in calls}) == 1


def _compiler_of(module: nn.Module, *, cuda_graphs: bool) -> tuple[Compiler, Recorder]:
    if compiled_original(module) is not None:
        context: Any = module.dynamo_ctx
        found, options = backend_of(context), {"dynamic": context._dynamic, "fullgraph": context.fullgraph}
        if found is None:
            return context, Recorder(inductor(None))
        backend = compiling_once(found, cuda_graphs=cuda_graphs)
    else:
        mode = "reduce-overhead" if cuda_graphs and torch.cuda.is_available() else None
        backend, options = inductor(mode), {"dynamic": False}
    recorder = Recorder(backend)
    return lambda function: torch.compile(function, backend=recorder, **options), recorder


def _inner(module: nn.Module) -> nn.Module:
    """Look into what ``torch.compile`` made of a module."""
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


def _leave_graph_memory(leaf: Any) -> Any:
    """Copy a result out of memory that the next replay of a CUDA graph writes."""
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_cuda else leaf


def _signature(call: Call) -> Any:
    module, args, kwargs = call
    leaves = [*tree.leaves(args, ""), *tree.leaves(dict(kwargs), "")]
    shapes = tuple((p, tree.shape_of(x), x.dtype) if isinstance(x, Tensor) else (p, type(x)) for p, x in leaves)
    return module.training, torch.is_grad_enabled(), shapes


def _is_compilers(error: BaseException | None) -> bool:
    return error is not None and type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
