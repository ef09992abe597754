"""Compile for one replica, run on all.

Replicas have the same Python state, so Dynamo traces the others to the graphs that it traced the first one to, each on
its own device: what was compiled for the first serves them all.
"""

import inspect
import re
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from everygpu.parallel.compiler.capturable_graph import home_of, is_written, value_of
from everygpu.parallel.compiler.inductor_backend import Backend, MultiDeviceGraph
from everygpu.parallel.scatter.denominator import are_classes, count_kept, note_denominator
from everygpu.torch_private.compiler import note_inlined


class CompileOnce:
    """A compiler backend that compiles equal graphs on several devices once."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._known: dict[Hashable, tuple[torch.device, Callable[..., Any], Callable[..., Any]]] = {}
        self._is_sharing = threading.local()

    def __call__(self, graph: Any, example_inputs: list[Any]) -> Callable[..., Any]:
        note_inlined()
        home = home_of(graph)
        key = _key_of(graph, home) if getattr(self._is_sharing, "now", False) else None
        if key is None:
            return self._compile(graph, example_inputs)[1]
        known = self._known.get(key)
        if known is not None and _serves(*known[:2], home):
            return known[2]
        function, run = self._compile(graph, example_inputs)
        self._known.setdefault(key, (home, function, run))
        return run

    def _compile(self, graph: Any, example_inputs: list[Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return what the backend makes of a graph, and what Dynamo is to call."""
        num, places = _return_denominators(graph)
        function = self._backend(graph, example_inputs)

        def run(*inputs: Any) -> Any:
            outputs = function(*inputs)
            for i, place in places.items():
                if outputs[i].grad_fn is not None:
                    note_denominator(outputs[i], outputs[place])
            return outputs[:num]

        return function, run if places else function

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Share what is compiled within, by this thread: settings of torch that a graph doesn't show are the same."""
        self._known, self._is_sharing.now = {}, True
        try:
            yield
        finally:
            self._known, self._is_sharing.now = {}, False


def _return_denominators(graph: Any) -> tuple[int, dict[int, int]]:
    """Make a graph also return what its losses are the mean of, as eager ones' autograd nodes say. Return how many
    outputs it had, and which of them is the mean of which output now.
    """
    output = graph.graph.output_node()
    results, places = list(output.args[0]), {}
    num = len(results)
    for i, node in enumerate(results[:num]):
        while getattr(node, "target", None) in _SAME_VALUE and not is_written(node):
            node = node.args[0]
        counted = _targets_of(node)
        if counted is not None:
            places[i] = len(results)
            with graph.graph.inserting_after(node):  # the targets may be written later
                results.append(graph.graph.call_function(count_kept, counted))
    if places:
        output.args = (tuple(results),)
        graph.recompile()
    return num, places


_SAME_VALUE = {"unsqueeze", "squeeze", "view", "reshape", "clone", "contiguous", "float", "double"}
"""Methods that leave a single number as it is."""


def _targets_of(node: Any) -> tuple[Any, int, Any] | None:
    """Return what ``count_kept`` takes for a node that is a mean loss of classes."""
    function = getattr(node, "target", None)
    if function not in (F.cross_entropy, F.nll_loss) or is_written(node):
        return None
    call = inspect.signature(function).bind(*node.args, **node.kwargs).arguments
    is_mean = call.get("reduction", "mean") == "mean" and call.keys().isdisjoint(("size_average", "reduce"))
    if not is_mean or not are_classes(value_of(call["target"])):
        return None
    return call["target"], call.get("ignore_index", -100), call.get("weight")


def _serves(home: torch.device, function: Callable[..., Any], device: torch.device) -> bool:
    return home == device or (isinstance(function, MultiDeviceGraph) and function.serves(device))


def _key_of(graph: Any, home: torch.device) -> Hashable | None:
    """Return a key that is equal for graphs that do the same on their devices; None if it is unknown: a graph has
    tensors built in, or sizes are left open, of which compiling guards what it has used in the first graph only.
    """
    found: list[Hashable] = []
    for node in graph.graph.nodes:
        part = getattr(graph, node.target, None) if node.op == "get_attr" else None
        nested = _key_of(part, home) if isinstance(part, torch.fx.GraphModule) else None
        if node.op == "call_module" or (node.op == "get_attr" and nested is None):
            return None
        value = value_of(node) if node.op == "placeholder" else None
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return None
        if isinstance(value, Tensor):
            if not all(isinstance(n, int) for n in value.shape):
                return None
            found.append(_layout_of(value, home))
        arguments = repr((node.args, node.kwargs))
        found.append((node.op, node.name, node.target, _with_home(arguments, home), nested))
    return tuple(found)


def _layout_of(x: Tensor, home: torch.device) -> Hashable:
    where = "home" if x.device == home else str(x.device)
    strides = x.stride() if x.layout == torch.strided else ()
    return type(x), tuple(x.shape), strides, x.dtype, x.layout, x.requires_grad, where


def _with_home(arguments: str, home: torch.device) -> str:
    """Write a replica's own device in a graph's arguments in the same way for all replicas."""
    if home.type == "cpu":
        return arguments
    return re.sub(rf"device\(type='{home.type}', index={home.index}\)|'{home.type}:{home.index}'", "home", arguments)
