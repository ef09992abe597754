"""What backends read off Dynamo's graphs, each a ``torch.fx.GraphModule`` whose parameters are inputs; and what
tracing a module takes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def inputs_of(graph: Any) -> list[Any]:
    """Return the nodes of a graph's inputs, in order."""
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def value_of(node: Any) -> Any:
    """Return what Dynamo has run a node on, or has got of it: a tensor without memory, a number; None if not kept."""
    return node.meta.get("example_value")


def is_written(node: Any) -> bool:
    """Tell whether a graph writes to an input."""
    value = value_of(node)
    return isinstance(value, Tensor) and value._version > 0  # by Dynamo, which has run the graph on this value


@contextmanager
def without_marks(tensors: list[Tensor]) -> Iterator[None]:
    """Take away the attributes that Dynamo leaves on a module's tensors."""
    before = [set(vars(tensor)) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, names in zip(tensors, before):
            for name in set(vars(tensor)) - names:
                if name.startswith("_dynamo_"):
                    delattr(tensor, name)


@contextmanager
def without_flattening(module: nn.Module) -> Iterator[None]:
    """Trace recurrent layers' ``flatten_parameters`` as what it is without cuDNN, nothing: it moves weights, which
    changes no value, and Dynamo can't trace it.
    """
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = before and not any(isinstance(m, nn.RNNBase) for m in module.modules())
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before
