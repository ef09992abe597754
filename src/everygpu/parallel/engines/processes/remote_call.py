"""One call of a replica in a helper, as a part of this process's autograd graph."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from everygpu import comm
from everygpu.parallel.engines.processes.generators import read_generators, set_cuda_state
from everygpu.parallel.engines.processes.helper_process import HelperProcess
from everygpu.parallel.engines.processes.messages import (
    Backward,
    BackwardDone,
    BucketDone,
    Failed,
    Forward,
    Returned,
    SparseGrad,
    lent_with,
)
from everygpu.parallel.engines.processes.module_sender import ModuleSender
from everygpu.parallel.engines.processes.nodes import ArrivalNode, Arrived, InputsNode, OutputsNode, ParametersNode
from everygpu.parallel.engines.processes.packing import describe_all, pack, unpack
from everygpu.parallel.engines.processes.recompute import Recomputation, copy_buffers
from everygpu.parallel.engines.processes.shared_tensors import SharedTensor
from everygpu.parallel.engines.thread_state import Modes
from everygpu.parallel.transforms import check_unbatched
from everygpu.torch_private.autograd import keeps_graph
from everygpu.torch_private.tensors import make_coalesced

if TYPE_CHECKING:
    from everygpu.parallel.engines.processes.direct import DirectCalls


class RemoteCall:
    """A call that a helper makes.

    Args:
        helper: Makes it.
        sender: Knows the replica.
        args: Positional arguments, on the helper's device.
        kwargs: Keyword arguments.
        direct: What connects the parameters bucket by bucket; None where each one is connected.
    """

    def __init__(
        self,
        helper: HelperProcess,
        sender: ModuleSender,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        direct: "DirectCalls | None" = None,
    ) -> None:
        self._direct = direct
        self.arrived: dict[int, Arrived] = {}
        """By bucket, what ``send_bucket`` has sent."""
        self.number = next(helper.numbers)
        self.helper = helper
        self._sender = sender
        self._call = (args, kwargs)
        self._modes = Modes.now([helper.device])
        # Held as long as the graph: this memory is in use.
        self.tensors = sender.tensors()
        self.inputs: list[Tensor] = []
        self._buckets: dict[int, BucketDone] = {}
        self._returned: Returned | None = None
        self._done: BackwardDone | None = None
        self._is_running = False
        self._failure: Failed | None = None
        self._recomputed: Recomputation | None = None
        self._grads: list[Tensor | None] = []
        self._keeps_graph = False
        self._num_used = 0
        self.has_graph = False

    def send(self) -> None:
        """Have the helper begin.

        Raises:
            CannotTravelError: the module, or an argument, can't be sent; the helper has been told nothing.
        """
        helper = self.helper
        arguments, self.inputs = pack(self._call, helper.exporter, {}, prepare=helper.exporter.own)
        update, self._kept = self._sender.update(self.tensors)
        told, kept = self._sender.update_globals(self.tensors, helper.told)
        self._kept += kept
        self._generators = read_generators(helper.device, helper.position)
        self._before = copy_buffers(self.tensors, self._sender.changing) if self._modes.records_grads else {}
        helper.calls[self.number] = self
        helper.send(
            Forward(
                call=self.number,
                keeping=helper.keep_house(),
                update=update,
                globals=told,
                settings=helper.changed_settings(),
                modes=self._modes,
                generators=self._generators,
                arguments=arguments,
                needs_grad=[t.requires_grad and self._modes.records_grads for t in self.inputs],
            )
        )

    def receive(self) -> Any:
        """Wait for what the replica has returned; it is connected to the replica's parameters and the arguments."""
        returned: Returned = self._await(lambda: self._returned)
        self._sender.has_answered = True
        self.helper.wait_for(returned.ready)
        self._kept = []
        self._sender.changing = {*(self._sender.changing or ()), *returned.changed}
        if returned.generators is not None:
            set_cuda_state(self.helper.device, returned.generators)
        increment_version([self.inputs[i] for i in returned.written])
        found = [self.helper.open(shared) for shared in returned.outputs.tensors]
        self.has_graph = any(returned.needs_grad)
        if self.has_graph:
            found = self._connect(found, returned.needs_grad)
        return unpack(returned.outputs, found, _nothing)

    def _connect(self, outputs: list[Tensor], needs_grad: Sequence[bool]) -> list[Tensor]:
        fresh = [t for t, needs in zip(outputs, needs_grad) if needs]
        connected = iter(OutputsNode.apply(self, fresh, *self._anchors()))  # type: ignore[no-untyped-call]
        return [next(connected) if needs else t for t, needs in zip(outputs, needs_grad)]

    def _anchors(self) -> list[Tensor]:
        """Return what the outputs depend on: a tensor for each bucket, and one for the arguments.

        Autograd runs the last first: what forward used last gets its gradients first.
        """
        device = self.helper.device
        anchors = [torch.empty(0, device=device, requires_grad=True)]
        needed = [t for t in self.inputs if t.requires_grad]
        if needed:
            anchors.append(InputsNode.apply(self, *needed))  # type: ignore[no-untyped-call]
        if self._direct is not None:
            self._direct.calls.append(weakref.ref(self))
            return anchors + [ArrivalNode.apply(self, k, t) for k, t in enumerate(self._direct.anchors)]  # type: ignore[no-untyped-call]
        for k, (members, _) in enumerate(self._sender.buckets):
            anchors.append(ParametersNode.apply(self, k, *(self.tensors[i] for i in members)))  # type: ignore[no-untyped-call]
        return anchors

    def begin_backward(self, grads: Sequence[Tensor | None]) -> None:
        """Have the helper run the backward; without buckets, wait for its end."""
        if self._is_running:  # for a backward that has failed in this process
            self._end_backward()
        self._decline_buckets()
        self._buckets, self._done, self._recomputed, self._num_used = {}, None, None, 0
        if torch.is_grad_enabled():
            self._recomputed = self._recompute(grads)
            return
        check_unbatched(grads)
        helper = self.helper
        self._grads = [None if g is None else helper.exporter.own(_dense(g)) for g in grads]
        shared = describe_all(self._grads, helper.exporter, lends=False)
        self._is_running = True
        self._keeps_graph = keeps_graph()
        keeping = helper.keep_house()
        helper.send(Backward(call=self.number, keeping=keeping, grads=shared, keeps_graph=self._keeps_graph))
        if not self._sender.buckets:
            self._end_backward()

    def grads_of_inputs(self) -> Sequence[Tensor | None]:
        """Return the gradients of the arguments that need them."""
        if self._recomputed is not None:
            return self._recomputed.take_inputs()
        done = self._end_backward()
        return [None if g is None else self.helper.open(g) for g in done.inputs]

    @property
    def is_first(self) -> bool:
        """Whether the replica has yet to return something for the first time."""
        return not self._sender.has_answered

    @property
    def awaits_backward(self) -> bool:
        """Whether a backward may still come."""
        return self.has_graph and (self._done is None or self._keeps_graph)

    def grads_of_bucket(self, bucket: int) -> list[Tensor | None]:
        """Wait for the gradients of a bucket's parameters."""
        members, plan = self._sender.buckets[bucket]
        if self._recomputed is not None:
            return self._recomputed.take(members)
        grads: list[Tensor | None] = [None] * len(members)
        found = self._wait_for_bucket(bucket)
        if found is None:
            return grads
        if found.flat is not None:
            flat = self.helper.open(found.flat)
            if all(found.present):
                self._sender.owners[bucket].send_ahead(flat)
            grads = [view if is_there else None for view, is_there in zip(plan.views(flat), found.present)]
        for k, sparse in found.sparse.items():
            grads[k] = self._open_sparse(sparse)
        return grads

    def send_bucket(self, bucket: int, device: torch.device) -> None:
        """Wait for the gradients of a bucket, and begin to copy them to a device."""
        members, _ = self._sender.buckets[bucket]
        if self._recomputed is not None:
            grads = self._recomputed.take(members)
            self.arrived[bucket] = Arrived(grads=[None if g is None else comm.copy(g, device) for g in grads])
            return
        found = self._wait_for_bucket(bucket)
        if found is not None:
            self.arrived[bucket] = Arrived(
                copied=None if found.flat is None else self._copy_flat(bucket, found.flat, device),
                present=found.present,
                sparse={k: comm.copy(self._open_sparse(g), device) for k, g in found.sparse.items()},
            )

    def _copy_flat(
        self, bucket: int, shared: SharedTensor, device: torch.device
    ) -> "tuple[Tensor, torch.cuda.Event | None]":
        flats, place = self._sender.flats, shared._replace(ticket=0)
        if bucket not in flats or flats[bucket][0] != place:
            flats[bucket] = place, self.helper.open(place, stays=True)
        flat = flats[bucket][1]
        copied = comm.copy_beside(flat, device) if flat.device != device else (flat.clone(), None)
        self.helper.importer.decline([shared])
        return copied

    def _wait_for_bucket(self, bucket: int) -> BucketDone | None:
        self._await(lambda: self._buckets.get(bucket) or self._done)
        found = self._buckets.pop(bucket, None)
        self._num_used += 1
        if self._num_used == len(self._sender.buckets):
            self._end_backward()  # the replica's memory may be written again
        if found is None:
            return None
        self.helper.wait_for(found.ready)
        return found

    def _open_sparse(self, grad: SparseGrad) -> Tensor:
        indices, values = map(self.helper.open, (grad.indices, grad.values))
        return make_coalesced(indices, values, grad.shape)

    def take(self, message: Any) -> None:
        """Take note of what the helper says of this call."""
        if isinstance(message, Returned):
            self._returned = message
        elif isinstance(message, BucketDone):
            self._buckets[message.bucket] = message
        elif isinstance(message, BackwardDone):
            self._done, self._is_running = message, False
            self.helper.wait_for(message.ready)
            increment_version([g for i in message.touched if (g := self.tensors[i].grad) is not None])
            self._grads = []
            if not self._keeps_graph:
                self.tensors = []
        else:
            self._failure, self._is_running = message, False

    def _end_backward(self) -> BackwardDone:
        done: BackwardDone = self._await(lambda: self._done)
        return done

    def _await(self, find: Callable[[], Any]) -> Any:
        """Read messages until there is what a function finds, and return that."""
        what = "forward" if self._returned is None else "backward"
        self.helper.read_until(lambda: self._failure is not None or find() is not None, what)
        failure, self._failure = self._failure, None
        if failure is not None:
            self.helper.raise_failure(failure, in_backward=self._returned is not None)
        return find()

    def _recompute(self, grads: Sequence[Tensor | None]) -> Recomputation:
        state = self._generators[0]
        before = state if isinstance(state, bytes) else None
        tensors = [self._before.get(i, t) for i, t in enumerate(self.tensors)]
        tensors = tensors if self._direct is None else self._direct.connected(tensors)
        return Recomputation(self._sender, tensors, self._call, self._modes, before, grads)

    def _decline_buckets(self) -> None:
        """Give back what a backward that has failed in this process didn't come to."""
        for found in self._buckets.values():
            self.helper.importer.decline(lent_with(found))

    def __del__(self) -> None:
        self._decline_buckets()
        if self.has_graph:
            self.helper.dropped.append(self.number)


def _dense(grad: Tensor) -> Tensor:
    """Return a gradient in memory of its own: what was expanded has several elements in one place."""
    return grad.resolve_conj().resolve_neg().contiguous()


def _nothing(kind: str, index: int) -> nn.Module:
    raise KeyError(kind, index)
