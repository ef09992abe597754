"""One launch of a recorded forward: what it returns, and how it goes backward."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from everygpu import comm, tree
from everygpu.comm.streams import queueing_on
from everygpu.errors import CaptureError
from everygpu.parallel.buckets.copies import Streams
from everygpu.parallel.buckets.memory import Grads, Use, versions_of
from everygpu.parallel.cuda_graphs.deferred_linear import LinearCall
from everygpu.parallel.cuda_graphs.forward_proof import ForwardProof
from everygpu.parallel.cuda_graphs.guards import ModuleGuards
from everygpu.parallel.cuda_graphs.multi_gpu_graph import MultiGpuGraph
from everygpu.parallel.cuda_graphs.rewind import Rewind
from everygpu.parallel.cuda_graphs.slots import Slot
from everygpu.parallel.cuda_graphs.static_batch import StaticBatch
from everygpu.parallel.cuda_graphs.transfer.backends import GradReducer
from everygpu.parallel.cuda_graphs.transfer.parameter_sync import ParameterSync
from everygpu.parallel.engines.thread_state import Modes
from everygpu.parallel.gather import Joiner
from everygpu.parallel.replicas.replica_set import ReplicaSet
from everygpu.torch_private.autograd import are_batched, keeps_graph

if TYPE_CHECKING:
    from everygpu.parallel.cuda_graphs.recorded_forward import RecordedForward

Leaves = list[list[list[Tensor]]]
"""For each bundle and device, what gradients are taken of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPass:
    """A forward, and the backward from the outputs that were used."""

    outputs: list[Any]
    """Of each replica, with a ``LinearCall`` for each that launches compute afterwards."""
    joiner: Joiner
    slots: list[Slot]
    """Of the outputs, in order."""
    used: tuple[int, ...]
    """Which of the slots the recorded backward takes gradients of."""
    seeds: list[Tensor]
    """Where it finds them."""
    leaves: Leaves
    sums: list[GradReducer]
    """What adds the gradients up: the recorded backward uses its memory."""
    sync: ParameterSync
    """What it was made with; the parameters may have another since."""
    backward: MultiGpuGraph | None
    reached: list[bool]
    """For each parameter whether it gets a gradient, on any device."""
    watched: list[Tensor]
    """What backward reads, and Python may write between launches."""
    needed: list[set[int]]
    """For each slot which of ``watched`` a backward from it reads."""
    batch: StaticBatch
    """Where a launch finds its batch."""
    replicas: ReplicaSet
    guards: ModuleGuards | None
    rewind: Rewind
    """What goes back to before a launch."""
    has_deferred: bool
    """Whether products were left out."""
    proof: ForwardProof | None
    """That a launch does what the forward would do; None where the caller has said so."""


class Launch:
    """A forward that was launched, and how it goes backward.

    A recording goes backward once, from the outputs that were used in the steps before it. For anything else the
    forward runs again, from what the launch started from: its graph isn't kept, or each recording would need the memory
    of a step for itself.

    Args:
        owner: Has launched it.
        recorded: What was launched.
        generators: The random generators' states before.
    """

    def __init__(self, owner: "RecordedForward", recorded: RecordedPass, generators: Sequence[Any]) -> None:
        self.recorded = recorded
        self.use = Use()
        self._owner = owner
        self._generators = generators
        self._modes = Modes.now([slot.tensor.device for slot in recorded.slots])
        self._has_replayed = False
        self._again: list[Slot] | None = None
        self._are_lost: list[bool] = []  # parameters whose values at the launch ``_again`` would have taken
        self._versions = versions_of(recorded.watched)
        """How often what is watched had been written at the launch."""
        self._params = [] if recorded.rewind.has_parameters else versions_of(recorded.sync.params)
        self._spent: set[int] = set()
        """Outputs that a backward began at which freed the graph."""

    def run(self, devices: Sequence[torch.device]) -> list[Any]:
        """Return each replica's outputs in memory of their own, connected to the parameters."""
        _, *tensors = _LaunchNode.apply(self, devices, *self.recorded.sync.params)  # type: ignore[no-untyped-call]
        fresh = iter(tensors)
        outputs: list[Any] = tree.map_leaves(lambda x: _renewed(x, fresh), self.recorded.outputs)
        return outputs

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the parameters' gradients.

        Args:
            grads: Of the tensors that were returned, None for those that weren't used.
        """
        given = {i: g for i, g in enumerate(grads) if g is not None}
        # Outputs that share nothing each have a backward of their own, while no other launch has taken the memory.
        if not self._spent.isdisjoint(given) or (self.use.is_over and not self._owner.is_latest(self.use)):
            raise RuntimeError(
                "DataParallel: the graph of this output has been freed by an earlier backward. Pass retain_graph=True "
                "to that one, to go through it a second time."
            )
        is_kept = keeps_graph()
        is_eager = torch.is_grad_enabled() or are_batched(grads)
        totals = self._differentiable(given) if is_eager else self._go_backward(given)
        if not is_kept:
            self._spent.update(given)
            self.use.is_over = True  # not before: another thread's forward may take the memory at once
        return totals

    def _check_written(self, given: dict[int, Tensor]) -> None:
        written = self._find_written()
        if any(not written.isdisjoint(self.recorded.needed[i]) for i in given):
            raise _error_of_write()

    def _differentiable(self, given: dict[int, Tensor]) -> list[Tensor | None]:
        """Return gradients with a graph of their own, for ``create_graph=True``: a recording has none."""
        self._check_written(given)
        with self._modes.entered():
            slots = self._owner.run_again(self.recorded, self._generators, is_connected=True)
            outputs, seeds = [slots[i].tensor for i in given], list(given.values())
            params = self.recorded.sync.params
            return list(torch.autograd.grad(outputs, params, seeds, create_graph=True, allow_unused=True))

    def _go_backward(self, given: dict[int, Tensor]) -> list[Tensor | None]:
        recorded = self.recorded
        self._check_written(given)
        if tuple(given) != recorded.used:
            self._owner.note_pattern({recorded.slots[i].output for i in given})
        if recorded.backward is None or tuple(given) != recorded.used or self._has_replayed:
            return self._run_eagerly(given)
        self._has_replayed = True
        for seed, grad in zip(recorded.seeds, given.values()):
            comm.fill(seed, grad)
        recorded.sync.make_room()
        recorded.backward.replay()
        return recorded.sync.totals(recorded.reached)

    def _find_written(self) -> set[int]:
        """Return which of what is watched has been written since the launch."""
        return {
            i for i, (now, then) in enumerate(zip(versions_of(self.recorded.watched), self._versions)) if now != then
        }

    def _run_eagerly(self, given: dict[int, Tensor]) -> list[Tensor | None]:
        """Go backward through the graph of a forward that is run again."""
        recorded = self.recorded
        if self._again is None:
            written = self._find_written()
            self._are_lost = [now != then for now, then in zip(versions_of(recorded.sync.params), self._params)]
            with self._modes.entered():
                self._again = self._owner.run_again(recorded, self._generators)
            # What was written before is in this graph with a value that isn't the launch's.
            self._versions = [-1 if i in written else v for i, v in enumerate(versions_of(recorded.watched))]
        outputs = [self._again[i].tensor for i in given]
        recorded.sync.make_room()
        grads = find_grads(outputs, list(given.values()), recorded.leaves, keeps_graph=True)
        recorded.sync.add(grads)
        totals = recorded.sync.totals(reached(grads))
        if any(is_lost and t is not None for is_lost, t in zip(self._are_lost, totals)):
            raise _error_of_write()
        return totals


def _error_of_write() -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a "
        "parameter, a buffer or an input of the DataParallel module, between its forward and this backward."
    )


def find_grads(
    outputs: list[Tensor], seeds: Sequence[Tensor], leaves: Leaves, *, keeps_graph: bool
) -> list[list[Grads]]:
    """Return the gradients of a recording's leaves, for each bundle and device.

    Args:
        outputs: Of all replicas, as recorded.
        seeds: Their gradients.
        leaves: Of the recording.
        keeps_graph: Whether another backward may follow.
    Raises:
        CaptureError: a gradient is sparse.
    """
    flat = [t for row in leaves for tensors in row for t in tensors]
    each = iter(torch.autograd.grad(outputs, flat, seeds, retain_graph=keeps_graph, allow_unused=True))
    grads: list[list[Grads]] = [[[next(each) for _ in tensors] for tensors in row] for row in leaves]
    if any(g is not None and g.layout != torch.strided for row in grads for gs in row for g in gs):
        raise CaptureError("DataParallel: gradients must be dense, got a sparse one. Pass engine='threads'.")
    return grads


def reached(grads: Sequence[Sequence[Grads]]) -> list[bool]:
    """Tell for each parameter, in the order of the bundles, whether it has a gradient on any device."""
    return [any(g is not None for g in column) for row in grads for column in zip(*row)]


def _renewed(leaf: Any, fresh: Iterator[Tensor]) -> Any:
    """Return what a launch returns for one leaf of the outputs.

    Args:
        leaf: As recorded.
        fresh: Values of the slots that are left.
    """
    if isinstance(leaf, LinearCall):
        with queueing_on(leaf.device):
            return leaf.run([next(fresh) for _ in leaf.operands])
    return next(fresh) if isinstance(leaf, Tensor) else leaf


class _LaunchNode(torch.autograd.Function):
    """Connects what a launch returns to the parameters."""

    @staticmethod
    def forward(ctx: Any, launch: Launch, devices: Sequence[torch.device], *params: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.launch = launch
        ctx.streams = Streams(*devices)
        # Autograd runs a node where its first output is; see ``_Broadcast``.
        anchor = torch.empty(0, device=devices[0])
        slots = launch.recorded.slots
        found = [slot.tensor.detach() if slot.is_operand else slot.tensor.detach().clone() for slot in slots]
        ctx.mark_non_differentiable(*(t for t, slot in zip(found, slots) if not slot.requires_grad))
        return anchor, *found

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        with ctx.streams.current():
            return None, None, *ctx.launch.backward(grads)
