"""The forward and the backward of all replicas, each recorded as one CUDA graph."""

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everygpu import tree
from everygpu.comm.streams import current_stream
from everygpu.errors import CaptureError
from everygpu.parallel import switches
from everygpu.parallel.buckets.memory import Grads, Use
from everygpu.parallel.cuda_graphs.forward_proof import ForwardProof, ForwardProofs
from everygpu.parallel.cuda_graphs.launch import Launch, Leaves, RecordedPass, reached
from everygpu.parallel.cuda_graphs.multi_gpu_graph import MultiGpuGraph
from everygpu.parallel.cuda_graphs.record_backward import go_backward
from everygpu.parallel.cuda_graphs.recordable import (
    check_graph,
    check_outputs,
    find_unsupported_tensor,
    find_used,
    find_watched,
)
from everygpu.parallel.cuda_graphs.recorder import Capture
from everygpu.parallel.cuda_graphs.recurrent_dropout import draw_seeds
from everygpu.parallel.cuda_graphs.replica_call import ReplicaCall
from everygpu.parallel.cuda_graphs.rewind import Rewind
from everygpu.parallel.cuda_graphs.slots import Slot, slots_of, without_graph
from everygpu.parallel.cuda_graphs.static_batch import StaticBatch
from everygpu.parallel.cuda_graphs.transfer.backends import GradReducer
from everygpu.parallel.cuda_graphs.transfer.parameter_sync import ParameterSync
from everygpu.parallel.engines.engine import Outputs, RunOn
from everygpu.parallel.engines.scheduler import whole_forward
from everygpu.parallel.replicas.replica_set import Leaves as Twins
from everygpu.parallel.replicas.replica_set import ReplicaSet
from everygpu.parallel.scatter.split import ScatterSpec
from everygpu.torch_private.autograd import is_transforming


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """What a recording is made with."""

    leaves: Leaves
    sums: list[GradReducer]
    """For each bundle."""
    rewind: Rewind


class RecordedForward:
    """Records a model's forward after a few of a kind, with its backward, and launches both from then on.

    Outputs and gradients are copied out of the recording's memory, so that users can keep them. A large product at the
    end, such as logits, is left out of the recording; see ``deferred_linear``. Until a launch's backward is over, its
    activations need that memory: another forward runs eagerly meanwhile.

    Args:
        module: Gives the module to run now.
        run: Runs replicas on a call's arguments.
        make_replicas: Makes replicas whose parameters are leaves.
        options: Gives what a recording depends on besides.
        route: How batches are cut.
        bucket_bytes: Size at which a group of parameters is closed.
        proves: Record only what Dynamo proves to be the same in a recording.
    """

    def __init__(
        self,
        module: Callable[[], nn.Module],
        run: RunOn,
        make_replicas: Callable[[Callable[[], Twins] | None], ReplicaSet],
        options: Callable[[], Hashable],
        route: ScatterSpec,
        bucket_bytes: int,
        *,
        proves: bool = False,
    ) -> None:
        self._route, self._proves = route, proves
        self._proofs = ForwardProofs()
        self._module = module
        self._make_replicas = make_replicas
        self._options = options
        self._devices = route.devices
        self._bucket_bytes = bucket_bytes
        self._replicas: ReplicaSet | None = None
        self._modules: list[nn.Module] = []
        self._sync: ParameterSync | None = None
        self._use: weakref.ref[Use] | None = None
        self._call = ReplicaCall(module, run)
        self._may_defer = switches.is_on(switches.DEFERS_LINEAR)
        # Which outputs the last backward began at, and how often that has changed.
        self._used: set[int] = set()
        self._num_patterns = 0
        self._differentiated_again: set[int] = set()  # outputs, by create_graph=True
        self._generators: list[Any] = []  # their states before a launch
        # Nothing that this holds refers back to it: when a model is dropped, its memory is free at once.
        self._me = weakref.proxy(self)
        self.capture: Capture[Outputs] = Capture(
            self._me,
            "DataParallel",
            route,
            level=logging.DEBUG if proves else logging.WARNING,
            sends_frozen=proves,
            gives_up=proves,
        )
        """Makes recordings, drops them, and says why no forward will be recorded any more, if so."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outputs | None:
        """Run a call by its recording, making one if it is time to; None where it has to run eagerly."""
        use = None if self._use is None else self._use()
        is_recordable = torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not is_transforming()
        if not is_recordable or (use is not None and not use.is_over):
            return None
        return self.capture.run((args, kwargs, ()))

    def watch(self, outputs: list[Any]) -> None:
        """Note which outputs of an eager call are used: a recording's backward will begin at these.

        Gradients also reach an output that others were computed from, used or not; launches tell these apart.
        """
        if torch.is_grad_enabled() and not self._num_patterns:
            self._used = used = set()
            again = self._differentiated_again

            def note(i: int) -> None:
                used.add(i)
                if torch.is_grad_enabled():
                    again.add(i)

            tensors = [x for _, x in tree.leaves(outputs, "out") if isinstance(x, Tensor)]
            for i, t in enumerate(tensors):
                if t.requires_grad and not t.is_leaf:  # a leaf is the user's own, and no recording returns one
                    t.register_hook(lambda _, i=i: note(i))  # type: ignore[no-untyped-call]

    # ``Recordable``, for ``Capture``.

    def roots(self) -> list[nn.Module]:
        return [self._module()]

    def state(self) -> Hashable:
        # Dropping recordings waits for the GPUs: other streams may not write where earlier ones have yet to read.
        return self._options(), self._num_patterns, tuple(map(current_stream, self._devices))

    def unsupported_reason(self) -> str | None:
        return find_unsupported_tensor(self._module())

    def prepare(self) -> _Prepared:
        # Replicas accept another parameter that fits in place of one; ParameterSync is for the very tensors.
        fits = self._sync is not None and self._sync.fits(self._trained())
        if self._replicas is None or self._replicas.module is not self._module() or not fits:
            self._replicas = self._make_replicas(lambda me=self._me: me._make_twins())  # type: ignore[misc]
        self._replicas.forget()  # frozen parameters are sent now, and no more unless by launches
        self._modules = self._replicas.refresh(range(len(self._devices)))
        leaves = [b.leaves() for b in self.sync.groups]
        rewind = Rewind(self._module(), self._devices, [row[0] for row in leaves], self.sync.sent())
        return _Prepared(leaves=leaves, sums=self.sync.make_reducers(), rewind=rewind)

    def record(self, graph: MultiGpuGraph, batch: StaticBatch, prepared: _Prepared) -> RecordedPass:
        proof = self._prove(batch) if self._proves else None
        draw_seeds(self.roots(), self._devices)
        outputs, joiner = graph.record(lambda: self._forward(batch, prepared))
        check_outputs(outputs)
        slots = slots_of(outputs)
        # From all of them: what a recorded backward doesn't begin at may be used after a launch.
        check_graph([slot.tensor for slot in slots], self.sync.params, prepared.leaves, self._module())
        kept = {id(t): t for m in self._modules for t in (*m.parameters(), *m.buffers())}
        watched, needed = find_watched([slot.tensor for slot in slots], [*kept.values(), *batch.tensors()])
        used = find_used(slots, self._used, is_known=self._num_patterns > 0)
        begun = [slots[i].tensor for i in used]
        seeds = [torch.zeros_like(t) for t in begun]
        backward, grads = self._record_backward(graph, prepared, begun, seeds) if used else (None, [])
        assert self._replicas is not None  # noqa: S101 - ``prepare`` has made them
        return RecordedPass(
            outputs=without_graph(outputs),
            joiner=joiner,
            slots=[slot.detached() for slot in slots],
            used=used,
            seeds=seeds,
            leaves=prepared.leaves,
            sums=prepared.sums,
            sync=self.sync,
            backward=backward,
            reached=reached(grads),
            watched=watched,
            needed=needed,
            batch=batch,
            replicas=self._replicas,
            guards=self.capture.guards,
            rewind=prepared.rewind,
            has_deferred=self._call.has_deferred,
            proof=proof,
        )

    def try_otherwise(self) -> bool:
        """Record the last products too; False where the last attempt has done so."""
        has_deferred, self._call.has_deferred, self._may_defer = self._call.has_deferred, False, False
        return has_deferred

    def give_up(self, reason: str) -> None:
        self._replicas, self._modules, self._sync, self._use = None, [], None, None

    def begin(self, recorded: RecordedPass) -> bool:
        if recorded.proof is not None and not recorded.proof.holds():
            self.capture.forget()
            return False
        self._generators = recorded.rewind.generators()
        return True

    def finish(self, recorded: RecordedPass) -> Outputs:
        launch = Launch(self, recorded, self._generators)
        self._use = weakref.ref(launch.use)
        return launch.run(self._devices), recorded.joiner

    # What is recorded.

    def _trained(self) -> list[Tensor]:
        return [p for p in self._module().parameters() if p.requires_grad]

    def _make_twins(self) -> Twins:
        self._sync = ParameterSync(self._trained(), self._devices, self._bucket_bytes)
        return self._sync.twins()

    @property
    def sync(self) -> ParameterSync:
        """What moves the parameters, made with the replicas for a recording."""
        assert self._sync is not None  # noqa: S101 - ``prepare`` has made it
        return self._sync

    def _forward(self, batch: StaticBatch, prepared: _Prepared) -> Outputs:
        """Send the parameters and run the replicas."""
        assert self._replicas is not None  # noqa: S101 - ``prepare`` has made them
        prepared.rewind.keep_buffers()
        if self._proves:
            self._replicas.forget()  # by each launch frozen parameters are sent, too, as in threads
        self.sync.send()
        where = self.sync, prepared.leaves, prepared.rewind.homes
        return self._call.run(self._replicas, batch, *where, may_defer=self._may_defer)

    def run_again(self, recorded: RecordedPass, generators: Sequence[Any], *, is_connected: bool = False) -> list[Slot]:
        """Run the forward of a recording eagerly, from what a launch started from; its outputs have their graph.

        Args:
            recorded: What was launched.
            generators: Their states before.
            is_connected: The graph leads to the parameters, not to the recording's leaves.
        Raises:
            CaptureError: the module has changed since.
        """
        replicas = recorded.replicas
        with recorded.rewind.rewound(generators), whole_forward():
            if replicas.module is not self._module() or not self.capture.is_current(recorded.guards):
                raise CaptureError(
                    "DataParallel: going backward in a way that isn't recorded takes the module as it was in forward, "
                    "got another one, or with other attributes. Pass engine='threads'."
                )
            replicas.forget()
            recorded.batch.rewind()
            if is_connected:
                return slots_of(self._call.run_connected(self._make_replicas(None), recorded))
            return slots_of(self._call.run_again(replicas, recorded))

    def _prove(self, batch: StaticBatch) -> ForwardProof:
        """Return the proof that a launch does what the forward would do.

        Raises:
            CaptureError: there is none.
        """
        if self._differentiated_again:
            raise CaptureError("gradients are differentiated again (create_graph=True), which a recording can't do")
        proof = self._proofs.find(self.roots()[0], batch.read(), self._route, is_first=not self.capture.has_recordings)
        if isinstance(proof, str):
            raise CaptureError(proof)
        return proof

    def _record_backward(
        self, graph: MultiGpuGraph, prepared: _Prepared, outputs: list[Tensor], seeds: list[Tensor]
    ) -> tuple[MultiGpuGraph, list[list[Grads]]]:
        """Record the backward from some outputs in the memory of the forward's graph."""
        backward, leaves, sums = graph.next(), prepared.leaves, prepared.sums
        try:
            grads = backward.record(lambda: go_backward(outputs, seeds, leaves, sums, self._devices))
        finally:
            graph.has_replaced_generators |= backward.has_replaced_generators
        for total in sums:
            total.write_tables()
            total.forget()
        return backward, grads

    def is_latest(self, use: Use) -> bool:
        """Tell whether nothing was launched since."""
        return self._use is not None and self._use() is use

    def note_pattern(self, used: set[int]) -> None:
        """Have the next recording's backward begin at these outputs."""
        self._used = used
        self._num_patterns += 1
