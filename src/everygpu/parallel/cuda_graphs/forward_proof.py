"""Proof, by Dynamo, that a recording of a forward does what the forward would do."""

from torch import nn

from everygpu.parallel.compiler.whole_graph import WholeGraph
from everygpu.parallel.cuda_graphs.static_batch import Batch
from everygpu.parallel.scatter.scatter import scatter_call
from everygpu.parallel.scatter.split import ScatterSpec


class ForwardProof:
    """The proof behind one recording: replicas do with their rows what the first one does with its own.

    Args:
        module: The first replica.
        batch: What it is recorded on, of all replicas.
        spec: How that is cut.
    """

    def __init__(self, module: nn.Module, batch: Batch, spec: ScatterSpec) -> None:
        args, kwargs, _ = batch
        first = scatter_call(args, kwargs, spec.devices, spec.dim, spec.split)[0]
        self._call = (first.args, first.kwargs)
        self._graph = WholeGraph(module)
        self.reason = self._graph.prove(*self._call)
        """Why the forward may not be recorded; None if it may."""

    def holds(self) -> bool:
        """Tell whether all that forward reads is as it was, beside its arguments, which the recording knows by kind."""
        return self._graph.holds(*self._call)
