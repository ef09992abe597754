"""What backends read off Dynamo's graphs: each a ``torch.fx.GraphModule``, whose parameters are inputs."""

from typing import Any

from torch import Tensor


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
