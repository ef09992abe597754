"""The tensors that a recording returns."""

from typing import Any, NamedTuple

from torch import Tensor

from everygpu import tree
from everygpu.parallel.cuda_graphs.deferred_linear import LinearCall


class Slot(NamedTuple):
    """A tensor that a recording returns, or an operand of a product that its launches compute and return."""

    tensor: Tensor
    """It has the value of the last launch."""
    output: int
    """Which of the tensors in the outputs it is for."""
    is_operand: bool
    """The launch reads it in the recording's own memory."""
    requires_grad: bool

    def detached(self) -> "Slot":
        """Return it without the graph."""
        return self._replace(tensor=self.tensor.detach())


def slots_of(outputs: list[Any]) -> list[Slot]:
    """List the tensors of a recording's outputs; in place of a deferred product, its operands."""
    found: list[Slot] = []
    leaves = [x for _, x in tree.leaves(outputs, "out") if isinstance(x, (Tensor, LinearCall))]
    for i, x in enumerate(leaves):
        tensors = x.operands if isinstance(x, LinearCall) else [x]
        found += [Slot(t, i, isinstance(x, LinearCall), t.requires_grad) for t in tensors]
    return found


def without_graph(outputs: list[Any]) -> list[Any]:
    """Return a recording's outputs without the graph they were recorded with."""
    detached: list[Any] = tree.map_leaves(_detached, outputs)
    return detached


def _detached(leaf: Any) -> Any:
    if isinstance(leaf, LinearCall):
        return LinearCall([t.detach() for t in leaf.operands])
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
