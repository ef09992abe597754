"""Proofs, by Dynamo, that recordings of a forward do what the forward would do."""

from typing import Any

from torch import nn

from everygpu.keys import compiled_original
from everygpu.parallel.compiler.whole_graph import WholeGraph
from everygpu.parallel.cuda_graphs.static_batch import Batch
from everygpu.parallel.scatter.scatter import scatter_call
from everygpu.parallel.scatter.split import ScatterSpec

MAX_OPEN = 3
"""Proofs that leave shapes open: one for each way through forward that depends on these."""


class ForwardProof:
    """The proof behind one recording: replicas do with their rows what the first one does with its own.

    Args:
        graph: Has proven it.
        call: The first replica's arguments.
    """

    def __init__(self, graph: WholeGraph, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self._graph, self._call = graph, call

    def holds(self) -> bool:
        """Tell whether all that forward reads is as it was, beside its arguments, which the recording knows by kind."""
        return self._graph.holds(*self._call)


class ForwardProofs:
    """Proofs for batches of several kinds. One that leaves shapes open serves for many."""

    def __init__(self) -> None:
        self._graphs: list[WholeGraph] = []
        self._num_open = 0

    def find(self, module: nn.Module, batch: Batch, spec: ScatterSpec, *, is_first: bool) -> ForwardProof | str:
        """Return a proof, or why there is none.

        Args:
            module: The first replica.
            batch: What is recorded, of all replicas.
            spec: How that is cut.
            is_first: Nothing is recorded now: proofs that don't hold are of no use any more.
        """
        args, kwargs, _ = batch
        first = scatter_call(args, kwargs, spec.devices, spec.dim, spec.split)[0]
        call = (first.args, first.kwargs)
        known = next((graph for graph in self._graphs if graph.holds(*call)), None)
        if known is not None:
            return ForwardProof(known, call)
        if is_first:
            self._graphs, self._num_open = [], 0
        graph = WholeGraph(compiled_original(module) or module)  # compiled code does what it was made of
        # Not at first, as it takes longer and most models are trained on batches of one kind; nor again and again, as
        # some modules have to be traced for each shape.
        is_open = bool(self._graphs) and self._num_open < MAX_OPEN
        self._num_open += is_open
        reason = graph.prove(*call, any_shapes=True) if is_open else None
        if not is_open or reason is not None:
            reason = graph.prove(*call)
        if reason is not None:
            return reason
        self._graphs.append(graph)
        return ForwardProof(graph, call)
