"""Compile for one replica, run on all.

Replicas have the same Python state, so where the first one's call came down to a single graph, the others' would come
down to the same one: with their own parameters, buffers and inputs in its place. The first replica runs under the
compiler's guards, as a compiled module does on one device; the others run its graph.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everygpu import tree
from everygpu.parallel.compiler.inductor_backend import Backend, InductorBackend
from everygpu.parallel.compiler.multi_device_graph import MultiDeviceGraph
from everygpu.parallel.engines.engine import Call

_ALIGNED = 16
"""Elements: compiled code may count on the alignment it has seen."""

Place = tuple[int, str, str] | int
"""Where a graph's input comes from: module, table and name in it; or a leaf of the call's arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One execution of a graph."""

    function: Callable[..., Any]
    is_closed: bool
    """Every tensor in it is an input."""
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


class Recorder:
    """A compiler backend that notes which of its graphs run, with what.

    Args:
        backend: Compiles the graphs.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._runs: list[Run] | None = None

    @property
    def may_capture(self) -> bool:
        """Tell whether results may lie in the memory of a CUDA graph."""
        return not isinstance(self._backend, InductorBackend) or self._backend.uses_cuda_graphs

    def __call__(self, graph: Any, example_inputs: list[Any]) -> Callable[..., Any]:
        # Constants made while tracing are on the first replica's device.
        is_closed = not any(node.op == "get_attr" for node in graph.graph.nodes)
        function = self._backend(graph, example_inputs)

        def run(*inputs: Any) -> Any:
            outputs = function(*inputs)
            if self._runs is not None:
                self._runs.append(Run(function=function, is_closed=is_closed, inputs=inputs, outputs=tuple(outputs)))
            return outputs

        return run

    @contextmanager
    def recording(self) -> Iterator[list[Run]]:
        """Collect what runs within."""
        runs: list[Run] = []
        self._runs = runs
        try:
            yield runs
        finally:
            self._runs = None


class InputBinding:
    """How one replica's call is made of another's graph.

    Args:
        run: What the first replica's call came down to.
        home: Where the first replica is.
        places: Where each input comes from.
        result: What it returned, with the index of a graph's output, as ``_Output``, for each tensor.
    """

    def __init__(self, run: Run, home: torch.device, places: Sequence[Place], result: Any) -> None:
        self._run = run
        self._home = home
        self._places = places
        self._result = result

    def inputs_for(self, call: Call, device: torch.device) -> list[Any] | None:
        """Return what the graph takes in another replica's call.

        Args:
            call: The other replica's.
            device: Where that replica is.
        Returns:
            None where the graph doesn't serve that device, or the inputs are laid out in another way.
        """
        if not self._serves(device):
            return None
        module, args, kwargs = call
        leaves, modules = _leaves(args, kwargs), list(module.modules())
        inputs = [leaves[p] if isinstance(p, int) else getattr(modules[p[0]], p[1])[p[2]] for p in self._places]
        wanted = [device if x.device == self._home else x.device for x in self._run.inputs]
        return inputs if all(map(_is_alike, inputs, self._run.inputs, wanted)) else None

    def _serves(self, device: torch.device) -> bool:
        function = self._run.function
        return device == self._home or (isinstance(function, MultiDeviceGraph) and function.serves(device))

    def run(self, inputs: list[Any]) -> Any:
        """Run the graph, and return what the other replica's call returns."""
        outputs = self._run.function(*inputs)
        return tree.map_leaves(lambda leaf: outputs[leaf.index] if isinstance(leaf, _Output) else leaf, self._result)


class _Output:
    """Stands for a graph's output in what a call returns. No dataclass: those are containers to everygpu."""

    def __init__(self, index: int) -> None:
        self.index = index


def find_binding(runs: Sequence[Run], call: Call, device: torch.device, result: Any) -> InputBinding | None:
    """Work out how the first replica's call came about.

    Args:
        runs: The graphs it ran.
        call: What it was called with.
        device: Where it is.
        result: What it returned.
    Returns:
        None when it was more than one graph, or one with tensors that are not the module's or the call's own.
    """
    if len(runs) != 1 or not runs[0].is_closed:
        return None
    (run,) = runs
    known = _places(call)
    places = [known.get(id(x)) if isinstance(x, Tensor) else None for x in run.inputs]
    outputs = {id(x): i for i, x in enumerate(run.outputs) if isinstance(x, Tensor)}
    leaves = [leaf for _, leaf in tree.leaves(result, "")]
    if None in places or any(isinstance(x, Tensor) and id(x) not in outputs for x in leaves):
        return None
    pattern = tree.map_leaves(lambda x: _Output(outputs[id(x)]) if isinstance(x, Tensor) else x, result)
    return InputBinding(run, device, [p for p in places if p is not None], pattern)


def _is_alike(a: Tensor, b: Tensor, device: torch.device) -> bool:
    """Tell whether a tensor is on a device, and such that a graph made for the other serves for it."""
    return (
        a.shape == b.shape
        and a.device == device
        and a.dtype is b.dtype
        and a.requires_grad is b.requires_grad
        and a.stride() == b.stride()
        and a.storage_offset() % _ALIGNED == b.storage_offset() % _ALIGNED
    )


def _places(call: Call) -> dict[int, Place]:
    module, args, kwargs = call
    found: dict[int, Place] = {id(x): i for i, x in enumerate(_leaves(args, kwargs)) if isinstance(x, Tensor)}
    for index, m in enumerate(module.modules()):
        for table in ("_parameters", "_buffers", "__dict__"):
            found.update({id(t): (index, table, key) for key, t in _tensors(m, table)})
    return found


def _tensors(module: nn.Module, table: str) -> Iterator[tuple[str, Tensor]]:
    return ((key, t) for key, t in getattr(module, table).items() if isinstance(t, Tensor))


def _leaves(args: Any, kwargs: Any) -> list[Any]:
    return [leaf for _, leaf in tree.leaves((args, dict(kwargs)), "")]


def backend_of(context: Any) -> Backend | None:
    """Find the backend that a user's ``torch.compile`` was given; None where torch doesn't tell."""
    found: Any = getattr(context, "callback", None)
    while hasattr(found, "_torchdynamo_orig_backend"):
        found = found._torchdynamo_orig_backend
    return found if callable(found) else None
