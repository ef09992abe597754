"""Proofs, by Dynamo, that recordings of a forward do what the forward would do."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from everygpu.keys import compiled_original
from everygpu.parallel.compiler.whole_graph import WholeGraph
from everygpu.parallel.cuda_graphs.static_batch import Batch
from everygpu.parallel.scatter.scatter import scatter_call
from everygpu.parallel.scatter.split import ScatterSpec

MAX_OPEN = 3
"""Proofs that leave shapes open: one for each way through forward that depends on these."""

ALLOWED_S = 5.0
"""Seconds that proofs of further kinds of batches may take together at any time."""
ALLOWED_SHARE = 0.1
"""What part of a run they may take besides: a language model with twelve lengths takes 3 to 4 s for each."""


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of the first replica."""


ForwardProof = Callable[[], bool]
"""The proof behind one recording tells whether all that forward reads is as it was, beside its arguments, which the
recording knows by kind, and torch's settings, which ``Capture`` guards. Replicas do with their rows what the first one
does with its own.
"""


class ForwardProofs:
    """Proofs for batches of several kinds. One that leaves shapes open serves for many."""

    def __init__(self) -> None:
        self._graphs: list[WholeGraph] = []
        self._num_open = 0
        self._began: float | None = None
        self._spent_s = 0.0

    def may_find(self, batch: Batch, spec: ScatterSpec) -> bool:
        """Tell whether looking for a proof takes no more of the run than is allowed."""
        if self._began is None or self._spent_s <= ALLOWED_S + ALLOWED_SHARE * (time.monotonic() - self._began):
            return True
        return self._known(*_first_call(batch, spec)) is not None

    def find(self, module: nn.Module, batch: Batch, spec: ScatterSpec, *, is_first: bool) -> ForwardProof | str:
        """Return a proof for the first replica's part of a batch, or why there is none.

        Args:
            is_first: Nothing is recorded now: proofs that don't hold are of no use any more.
        """
        call = _first_call(batch, spec)
        graph: WholeGraph | str | None = self._known(*call)
        if graph is None:
            start = time.monotonic()
            graph = self._prove(module, call, is_first=is_first)
            if self._began is None:
                self._began = time.monotonic()
            else:
                self._spent_s += time.monotonic() - start
        return graph if isinstance(graph, str) else partial(graph.still_holds, *call)

    def _known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WholeGraph | None:
        return next((graph for graph in self._graphs if graph.holds(args, kwargs)), None)

    def _prove(self, module: nn.Module, call: Arguments, *, is_first: bool) -> WholeGraph | str:
        if is_first:
            self._graphs, self._num_open = [], 0
        graph = WholeGraph(compiled_original(module) or module)  # compiled code does what it was made of
        # Not at first, as it takes longer and most models are trained on batches of one kind; nor again and again, as
        # some modules have to be traced for each shape.
        is_open = bool(self._graphs) and self._num_open < MAX_OPEN
        self._num_open += is_open
        reason = graph.prove(*call, any_shapes=True) if is_open else None
        if reason is not None:
            self._num_open = MAX_OPEN  # it takes as long each time
        if not is_open or reason is not None:
            reason = graph.prove(*call)
        if reason is not None:
            return reason
        self._graphs.append(graph)
        return graph


def _first_call(batch: Batch, spec: ScatterSpec) -> Arguments:
    args, kwargs, _ = batch
    call = scatter_call(args, kwargs, spec.devices, spec.dim, spec.split)
    return call.args[0], call.kwargs[0]
