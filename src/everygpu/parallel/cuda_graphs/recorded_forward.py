"""The forward and the backward of all replicas, each recorded as one CUDA graph."""

import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from everygpu import comm, tree
from everygpu.errors import EveryGPUError
from everygpu.keys import compiled_original
from everygpu.parallel.buckets.bucket import Grads, Streams
from everygpu.parallel.cuda_graphs.capture_lock import lease_streams
from everygpu.parallel.cuda_graphs.deferred_linear import DeferredLinears, LinearCall
from everygpu.parallel.cuda_graphs.deferred_tensor import DeferredTensor, DeferredTensorError, refusals_heeded
from everygpu.parallel.cuda_graphs.multi_gpu_graph import MultiGpuGraph, on_recording_streams
from everygpu.parallel.cuda_graphs.ready_events import ReadyEvents
from everygpu.parallel.cuda_graphs.recorder import Capture
from everygpu.parallel.cuda_graphs.static_batch import PLAIN_TYPES, StaticBatch
from everygpu.parallel.cuda_graphs.transfer.backends import GradReducer
from everygpu.parallel.cuda_graphs.transfer.parameter_sync import ParameterSync
from everygpu.parallel.engines.thread_state import current_stream, queueing_on
from everygpu.parallel.gather import Joiner
from everygpu.parallel.replicas.module_tree import is_dense
from everygpu.parallel.replicas.replica_set import Leaves as Twins
from everygpu.parallel.replicas.replica_set import ReplicaSet
from everygpu.parallel.scatter.split import ScatterSpec
from everygpu.torch_private.autograd import is_transforming, keeps_graph, set_versions

Outputs = tuple[list[Any], Joiner]
"""What each replica returned, and how that is joined."""

Leaves = list[list[list[Tensor]]]
"""For each bundle and device, what gradients are taken of."""

Around = Callable[[list[nn.Module]], AbstractContextManager[Any]]
"""Gives what replicas are called within."""


class RunOn(Protocol):
    """Runs replicas on a call's arguments."""

    def __call__(
        self, replicas: ReplicaSet, args: tuple[Any, ...], kwargs: dict[str, Any], /, *, around: Around
    ) -> Outputs:
        """Return what they returned."""


class _Slot(NamedTuple):
    """A tensor that a recording returns, or that goes into a product that its launches return."""

    tensor: Tensor
    """It has the value of the last launch, and is connected to the leaves."""
    output: int
    """Which of the tensors in the outputs it is for."""
    is_lent: bool
    """The product is computed of the recording's own memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """What a recording is made with."""

    leaves: Leaves
    sums: list[GradReducer]
    """For each bundle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """A forward, and the backward from the outputs that were used."""

    outputs: list[Any]
    """Of each replica, with a ``LinearCall`` for each that launches compute afterwards."""
    joiner: Joiner
    slots: list[_Slot]
    """Of the outputs, in order."""
    used: tuple[int, ...]
    """Which of the slots the recorded backward takes gradients of."""
    seeds: list[Tensor]
    """Where it finds them."""
    leaves: Leaves
    sums: list[GradReducer]
    """What adds the gradients up: the recorded backward uses its memory."""
    exchange: ParameterSync
    """What it was made with; the parameters may have another since."""
    backward: MultiGpuGraph | None
    reached: list[bool]
    """For each parameter whether it gets a gradient, on any device."""
    watched: list[Tensor]
    """What backward may have saved, and Python may write between launches."""
    versions: list[int]
    """How often they had been written when they were recorded."""


class _Use:
    """A graph's interest in what a launch has left for its backward, which ends with that or with the graph."""

    is_over = False


class RecordedForward:
    """Records a model's forward after a few of a kind, with its backward, and launches both from then on.

    What a launch returns is copied out of the recording's memory, as are the gradients: users keep them as they like.
    A large product at the end, such as logits, is left out of the recording; see ``last_product``.
    While a backward is to come, the memory is its: another forward then runs as it is.

    Args:
        module: Gives the module to run now.
        run: Runs replicas on a call's arguments.
        make_replicas: Makes replicas whose parameters are leaves.
        options: Gives what a recording depends on besides.
        route: How batches are cut.
    """

    def __init__(
        self,
        module: Callable[[], nn.Module],
        run: RunOn,
        make_replicas: Callable[[Callable[[], Twins]], ReplicaSet],
        options: Callable[[], Hashable],
        route: ScatterSpec,
    ) -> None:
        self._module = module
        self._run = run
        self._make_replicas = make_replicas
        self._options = options
        self._devices = route.devices
        self._replicas: ReplicaSet | None = None
        self._modules: list[nn.Module] = []
        self._exchange: ParameterSync | None = None
        self._use: weakref.ref[_Use] | None = None
        # Whether recordings may leave the last products out, and whether the last one did.
        self._may_postpone = True
        self._has_postponed = False
        # Which outputs the last backward began at, and how often that has changed.
        self._used: set[int] = set()
        self._num_patterns = 0
        # Nothing that this holds refers back to it: when a model is dropped, its memory is free at once.
        self._me = weakref.proxy(self)
        self._streams = lease_streams(self)
        self._capture: Capture[Outputs] = Capture(
            self._me, "DataParallel", route, level=logging.WARNING, streams=self._streams
        )

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outputs | None:
        """Run a call by its recording, making one if it is time to; None where it has to run as it is."""
        use = None if self._use is None else self._use()
        if not _records_gradients() or (use is not None and not use.is_over) or is_transforming():
            return None
        return self._capture.run((args, kwargs, ()))

    def watch(self, outputs: list[Any]) -> None:
        """See which outputs of a call that runs as it is are used: a recording's backward will be for these.

        Gradients also reach an output that others were computed from, whether it is used or not. A launch knows better.
        """
        if torch.is_grad_enabled() and not self._num_patterns:
            self._used = used = set()
            for i, t in enumerate(_tensors(outputs)):
                if t.requires_grad and not t.is_leaf:  # a leaf is the user's own, and no recording returns one
                    t.register_hook(lambda _, i=i: used.add(i))  # type: ignore[no-untyped-call]

    # How ``Capture`` sees it.

    def roots(self) -> list[nn.Module]:
        return [self._module()]

    def state(self) -> Hashable:
        # Dropping recordings waits for the GPUs: other streams may not write where earlier ones have yet to read.
        return self._options(), self._num_patterns, tuple(map(current_stream, self._devices))

    def unsupported_reason(self) -> str | None:
        module = self._module()
        for name, t in (*module.named_parameters(), *module.named_buffers()):
            if not is_dense(t):
                return f"{name} is no plain dense tensor"
        return None

    def prepare(self) -> _Prepared:
        # Replicas take on another parameter that fits in place of one; an exchange is of the very tensors.
        fits = self._exchange is not None and self._exchange.fits(self._trained())
        if self._replicas is None or self._replicas.module is not self._module() or not fits:
            self._replicas = self._make_replicas(lambda me=self._me: me._make_twins())  # type: ignore[misc]
        self._replicas.forget()  # frozen parameters are sent now, and no more
        self._modules = self._replicas.refresh(range(len(self._devices)))
        exchange = self.exchange
        return _Prepared(leaves=[b.leaves() for b in exchange.bundles], sums=exchange.make_reducers())

    def record(self, graph: MultiGpuGraph, batch: StaticBatch, prepared: _Prepared) -> _Recorded:
        outputs, joiner = graph.record(lambda: self._forward(batch, prepared.leaves))
        _check(outputs)
        slots = _slots(outputs)
        # From all of them: what a recorded backward doesn't begin at may be used after a launch.
        _check_graph([slot.tensor for slot in slots], self.exchange.params)
        return self._record_backward(graph, batch, prepared, slots, outputs, joiner)

    def try_otherwise(self) -> bool:
        """Record the last products too; False where the last attempt did."""
        has_postponed, self._has_postponed, self._may_postpone = self._has_postponed, False, False
        return has_postponed

    def give_up(self) -> None:
        self._replicas, self._modules, self._exchange, self._use = None, [], None, None

    def begin(self, recorded: _Recorded) -> bool:
        return True

    def finish(self, recorded: _Recorded) -> Outputs:
        launch = _Launch(self, recorded, [t._version for t in recorded.watched])
        self._use = weakref.ref(launch.use)
        _, *tensors = _Graph.apply(launch, self._devices, *recorded.exchange.params)  # type: ignore[no-untyped-call]
        fresh = iter(tensors)
        return tree.map_leaves(lambda x: _renewed(x, fresh), recorded.outputs), recorded.joiner

    # What is recorded.

    def _trained(self) -> list[Tensor]:
        return [p for p in self._module().parameters() if p.requires_grad]

    def _make_twins(self) -> Twins:
        self._exchange = ParameterSync(self._trained(), self._devices)
        return self._exchange.twins()

    @property
    def exchange(self) -> ParameterSync:
        """What moves the parameters; there is one once replicas were made for a recording."""
        assert self._exchange is not None  # noqa: S101 - ``prepare`` has made it
        return self._exchange

    def _forward(self, batch: StaticBatch, leaves: Leaves) -> Outputs:
        assert self._replicas is not None  # noqa: S101 - ``prepare`` has made them
        args, kwargs, _ = batch.read()
        at_home = {id(p): t for b, row in zip(self.exchange.bundles, leaves) for p, t in zip(b.originals, row[0])}
        with _in_place_of(self._module(), at_home):
            return self._run_replicas(self._replicas, args, kwargs)

    def _run_replicas(self, replicas: ReplicaSet, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outputs:
        """Send the parameters and run the replicas, without the last products where these may be left out."""
        self.exchange.send()
        self._has_postponed = False
        if not self._may_postpone:
            return self._run(replicas, args, kwargs, around=nullcontext)
        products = DeferredLinears()
        try:
            with refusals_heeded():
                outputs, joiner = self._run(replicas, args, kwargs, around=partial(self._watched, products))
        finally:
            self._has_postponed = products.were_any
        outputs = products.take(outputs)
        products.check()
        return outputs, joiner

    def _watched(self, products: DeferredLinears, replicas: Sequence[nn.Module]) -> AbstractContextManager[None]:
        return products.watched(replicas, are_compiled=compiled_original(self._module()) is not None)

    def _record_backward(
        self,
        graph: MultiGpuGraph,
        batch: StaticBatch,
        prepared: _Prepared,
        slots: list[_Slot],
        outputs: list[Any],
        joiner: Joiner,
    ) -> _Recorded:
        tensors = [slot.tensor for slot in slots]
        used = tuple(i for i, slot in enumerate(slots) if slot.output in self._used and slot.tensor.requires_grad)
        seeds = [torch.zeros_like(tensors[i]) for i in used]
        backward = graph.next() if used else None
        grads: list[list[Grads]] = []
        if backward is not None:
            try:
                grads = backward.record(lambda: self._begin_backward([tensors[i] for i in used], seeds, prepared))
            finally:
                graph.has_replaced_generators |= backward.has_replaced_generators
            for total in prepared.sums:
                total.settle()
        kept = {id(t): t for m in self._modules for t in (*m.parameters(), *m.buffers())}
        watched = [t for t in (*kept.values(), *batch.tensors()) if not t.is_inference()]
        return _Recorded(
            outputs=outputs,
            joiner=joiner,
            slots=slots,
            used=used,
            seeds=seeds,
            leaves=prepared.leaves,
            sums=prepared.sums,
            exchange=self.exchange,
            backward=backward,
            reached=_reached(grads),
            watched=watched,
            versions=[t._version for t in watched],
        )

    def _begin_backward(self, outputs: list[Tensor], seeds: Sequence[Tensor], prepared: _Prepared) -> list[list[Grads]]:
        """Go backward while recording, with each bundle's additions beside what is left of it."""
        marks = ReadyEvents(self._devices)
        with _marked(marks, prepared.leaves):
            grads = self.find_grads(outputs, seeds, prepared.leaves)
        for b, (total, row) in enumerate(zip(prepared.sums, grads)):
            for replica in total.take(row):
                marks.forget(b, replica)
        marks.run_beside({b: total.run for b, total in enumerate(prepared.sums)})
        return grads

    def find_grads(self, outputs: list[Tensor], seeds: Sequence[Tensor], leaves: Leaves) -> list[list[Grads]]:
        """Return the gradients of the leaves, for each bundle and device.

        Args:
            outputs: Of all replicas, as recorded.
            seeds: Their gradients.
            leaves: Of the recording.
        """
        flat = [t for row in leaves for tensors in row for t in tensors]
        # The graph stays, for backwards that can't be launched.
        each = iter(torch.autograd.grad(outputs, flat, seeds, retain_graph=True, allow_unused=True))
        grads: list[list[Grads]] = [[[next(each) for _ in tensors] for tensors in row] for row in leaves]
        if any(g is not None and g.layout != torch.strided for row in grads for gs in row for g in gs):
            raise EveryGPUError("DataParallel: gradients must be dense, got sparse ones")
        return grads

    def on_recording_streams(self) -> AbstractContextManager[None]:
        """Queue what is launched within on the streams of the recording; see the function."""
        return on_recording_streams(self._devices, self._streams)

    def is_latest(self, use: _Use) -> bool:
        """Tell whether nothing was launched since."""
        return self._use is not None and self._use() is use

    def note_pattern(self, used: set[int]) -> None:
        """Have the next recording's backward begin at these outputs."""
        self._used = used
        self._num_patterns += 1


class _Launch:
    """A forward that was launched, and how it goes backward.

    Args:
        owner: Whose it is.
        recorded: What was launched.
        versions: How often what is watched had been written then.
    """

    def __init__(self, owner: RecordedForward, recorded: _Recorded, versions: list[int]) -> None:
        self.recorded = recorded
        self.use = _Use()
        self._owner = owner
        self._versions = versions
        self._spent: set[int] = set()
        """Outputs that a backward began at which freed the graph."""

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
        totals = self._go_backward(given)
        if not is_kept:
            self._spent.update(given)
            self.use.is_over = True  # not before: another thread's forward may take the memory at once
        return totals

    def _go_backward(self, given: dict[int, Tensor]) -> list[Tensor | None]:
        recorded = self.recorded
        written = [t._version for t in recorded.watched]
        if recorded.backward is None or tuple(given) != recorded.used or written != self._versions:
            return self._run_as_it_is(given, written)
        for seed, grad in zip(recorded.seeds, given.values()):
            comm.fill(seed, grad)
        recorded.exchange.make_room()
        recorded.backward.replay()
        return recorded.exchange.totals(recorded.reached)

    def _run_as_it_is(self, given: dict[int, Tensor], written: list[int]) -> list[Tensor | None]:
        """Go backward through the graph that the recording was made with: its memory has this launch's values.

        Autograd sees as written what was written since the launch, not since the recording.
        """
        recorded = self.recorded
        if tuple(given) != recorded.used:
            self._owner.note_pattern({recorded.slots[i].output for i in given})
        outputs = [recorded.slots[i].tensor for i in given]
        recorded.exchange.make_room()  # on the user's stream, whose memory it will be
        counted = zip(recorded.versions, written, self._versions)
        as_seen = [then + now - launched for then, now, launched in counted]
        with _versions_set(recorded.watched, as_seen, written), self._owner.on_recording_streams():
            grads = self._owner.find_grads(outputs, list(given.values()), recorded.leaves)
            recorded.exchange.add(grads)
        return recorded.exchange.totals(_reached(grads))


@contextmanager
def _in_place_of(module: nn.Module, others: Mapping[int, Tensor]) -> Iterator[None]:
    """Have a module and those below it use other tensors for their parameters, by these' ``id``."""
    tables = [
        (m._parameters, name, p) for m in module.modules() for name, p in m._parameters.items() if id(p) in others
    ]
    for table, name, p in tables:
        table[name] = others[id(p)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for table, name, p in tables:
            if table.get(name) is others[id(p)]:
                table[name] = p


@contextmanager
def _versions_set(tensors: list[Tensor], versions: list[int], afterwards: list[int]) -> Iterator[None]:
    set_versions(tensors, versions)
    try:
        yield
    finally:
        set_versions(tensors, afterwards)


class _Graph(torch.autograd.Function):
    """Connects what a launch returns to the parameters."""

    @staticmethod
    def forward(ctx: Any, launch: _Launch, devices: Sequence[torch.device], *params: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.launch = launch
        ctx.streams = Streams(*devices)
        # Autograd runs a node where its first output is; see ``_Broadcast``.
        anchor = torch.empty(0, device=devices[0])
        slots = launch.recorded.slots
        found = [slot.tensor.detach() if slot.is_lent else slot.tensor.detach().clone() for slot in slots]
        ctx.mark_non_differentiable(*(t for t, slot in zip(found, slots) if not slot.tensor.requires_grad))
        return anchor, *found

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise EveryGPUError(
                "DataParallel: create_graph=True needs gradients that are no recording's. "
                "Pass engine='threads' for second derivatives."
            )
        with ctx.streams.current():
            return None, None, *ctx.launch.backward(grads)


@contextmanager
def _marked(marks: ReadyEvents, leaves: Leaves) -> Iterator[None]:
    """Take note of the moments of a backward within."""
    handles = []
    for b, row in enumerate(leaves):
        for j, tensors in enumerate(row):
            note = marks.counter(b, j, tensors)
            handles += [t.register_hook(lambda _, t=t, note=note: note(t)) for t in tensors]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _slots(outputs: list[Any]) -> list[_Slot]:
    """List the tensors of a recording's outputs; in place of a product those that go into it."""
    found: list[_Slot] = []
    leaves = [x for _, x in tree.leaves(outputs, "out") if isinstance(x, (Tensor, LinearCall))]
    for i, x in enumerate(leaves):
        tensors = x.operands if isinstance(x, LinearCall) else [x]
        found += [_Slot(t, i, isinstance(x, LinearCall)) for t in tensors]
    return found


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


def _tensors(outputs: list[Any]) -> list[Tensor]:
    return [x for _, x in tree.leaves(outputs, "out") if isinstance(x, Tensor)]


def _check(outputs: list[Any]) -> None:
    """Refuse what a launch can't return anew."""
    for path, x in tree.leaves(outputs, "out"):
        is_array = type(x) is Tensor and x.layout == torch.strided
        if not is_array and type(x) not in (*PLAIN_TYPES, LinearCall):
            raise EveryGPUError(f"DataParallel: outputs must be tensors or numbers, got {type(x).__name__} at {path}")


def _check_graph(outputs: list[Tensor], params: list[Tensor]) -> None:
    """Refuse what has no gradients of leaves, or none that a bundle can add up."""
    originals = set(map(id, params))
    for node in _nodes(outputs):
        variable = node.variable if node.name() == _ACCUMULATION else None  # type: ignore[attr-defined]
        if id(variable) in originals:
            raise EveryGPUError("DataParallel: a parameter is used that is in a plain attribute of a module")
        if isinstance(variable, DeferredTensor):
            raise DeferredTensorError("an autograd function was given what isn't there yet")
        if node.name() == "CheckpointFunctionBackward":
            raise EveryGPUError("DataParallel: checkpoints must have use_reentrant=False")
        if getattr(node, "_saved_sparse", False):
            raise EveryGPUError("DataParallel: gradients must be dense, those of an embedding are sparse")


_ACCUMULATION = "torch::autograd::AccumulateGrad"


def _nodes(outputs: list[Tensor]) -> set[Node]:
    """Collect the graph that tensors are connected to."""
    found: set[Node] = set()
    left = [get_gradient_edge(t).node for t in outputs if t.requires_grad]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += [n for n, _ in node.next_functions if n is not None]
    return found


def _reached(grads: Sequence[Sequence[Grads]]) -> list[bool]:
    """Tell for each parameter, in the order of the bundles, whether it has a gradient on any device."""
    return [any(g is not None for g in column) for row in grads for column in zip(*row)]


def _records_gradients() -> bool:
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
