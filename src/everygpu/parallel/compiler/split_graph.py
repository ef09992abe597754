"""Large graphs cut in pieces, each compiled by itself, so that gradients come piece by piece.

torch does so for DistributedDataParallel, and its ``DDPOptimizer`` does the work here. What it leaves open is settled
below: what a parameter counts for, in which order pieces run, and which graphs are better left whole.
"""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from everygpu.parallel import switches
from everygpu.parallel.buckets.sizes import NUM_PIECES, PIECE_BYTES
from everygpu.parallel.compiler.dynamo import inputs_of, is_written, value_of
from everygpu.torch_private.compiler import make_ddp_optimizer, tracing_context

Backend = Callable[[Any, list[Any]], Callable[..., Any]]
"""From Dynamo's graph and example inputs to what runs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPolicy:
    """How graphs are cut that a recording will have in it."""

    in_pieces: bool = False
    """Large ones, so that gradients come piece by piece: work on them can begin before backward is over. Of a whole
    graph autograd gets all gradients at the end."""
    defers_linear: bool = False
    """Before a product that they end with; see ``deferred_linear``."""


WHOLE = SplitPolicy()


def compile_pieces(graph: Any, example_inputs: list[Any], compile_piece: Backend) -> Callable[..., Any] | None:
    """Compile a graph in pieces of about equally many parameters.

    Args:
        graph: A ``torch.fx.GraphModule`` of Dynamo's, whose parameters are inputs.
        example_inputs: The graph's.
        compile_piece: Compiles one.
    Returns:
        What runs all pieces; None where the graph is small, or ``switches.SPLITS_GRAPHS`` is off.
    Raises:
        NotImplementedError: the graph is better left whole.
        Exception: torch's, where it can't be cut, or a piece can't be compiled.
    Source:
        ``torch._dynamo.backends.distributed.DDPOptimizer``.
    """
    total = sum(p.nbytes for p in map(value_of, inputs_of(graph)) if _is_trained(p))
    limit = max(PIECE_BYTES, total // NUM_PIECES)
    if total <= limit or not switches.is_on(switches.SPLITS_GRAPHS):
        return None

    def compile_checked(piece: Any, inputs: list[Any]) -> Callable[..., Any]:
        _check_writes(graph, optimizer.buckets)  # here, where they are known, and nothing is compiled
        return compile_piece(piece, inputs)

    optimizer = make_ddp_optimizer(limit, compile_checked, _count)
    with _leaving_no_trace() as guards:
        pieces: Any = optimizer.compile_fn(graph, example_inputs)
        if any(map(_is_between, guards())):
            raise NotImplementedError("where tensors share memory must be checked between pieces")
        if len(optimizer.buckets) > 1:
            _put_in_order(pieces)
    return pieces  # type: ignore[no-any-return]


def _is_trained(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and value.requires_grad


def _count(piece: Any, node: Any) -> None:
    """Count the parameters whose gradients are complete with a node's: those that it is the first to use.

    And their own bytes, not their storages': a training step's parameters lie side by side in few of these.
    """
    for source in node.all_input_nodes:
        if source.op == "placeholder" and _is_trained(value_of(source)) and next(iter(source.users)) is node:
            piece.size += value_of(source).nbytes
            piece.params.append(str(source.target))


@contextmanager
def _leaving_no_trace() -> Iterator[Callable[[], list[Any]]]:
    """Give the guards that a compilation has added; one that fails leaves none, nor what says that there are pieces."""
    context = tracing_context()
    guards: list[Any] = [] if context is None else context.guards_context.aotautograd_guards
    num_before = len(guards)
    try:
        yield lambda: guards[num_before:]
    except BaseException:
        if context is not None:
            context.ddp_optimizer_ctx = None
        del guards[num_before:]
        raise


def _is_between(guard: Any) -> bool:
    """Tell whether a guard is about what one piece hands another: Dynamo, which checks inputs, fails at it."""
    found = vars(guard).values()
    return any(source is None for x in found for source in (x if isinstance(x, list) else [x]))


def _check_writes(graph: Any, pieces: list[Any]) -> None:
    """Refuse a graph one of whose inputs is written in one piece, and used in another.

    What that one saves for backward, autograd then takes for overwritten.
    """
    for source in inputs_of(graph):
        if is_written(source) and sum(not source.users.keys().isdisjoint(piece.nodes) for piece in pieces) > 1:
            raise NotImplementedError(f"{source.target} is written, and used in several pieces")


def _put_in_order(pieces: Any) -> None:
    """Have pieces run in the order in which they were cut.

    torch asks only which needs what others return; but one may also read what another has written.
    """
    *nodes, output = pieces.graph.nodes
    calls = [node for node in nodes if node.op == "call_module"]
    for call in sorted(calls, key=lambda node: int(node.target.rpartition("_")[2])):
        output.prepend(call)
        for item in [user for user in call.users if user.target is operator.getitem]:
            output.prepend(item)
    pieces.recompile()
