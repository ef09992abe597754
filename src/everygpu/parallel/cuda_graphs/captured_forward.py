"""The forward and the backward of all replicas, each captured as one CUDA graph."""

import functools
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from everygpu import tree
from everygpu.comm.streams import current_stream
from everygpu.errors import CaptureError
from everygpu.parallel.buckets import Grads, Use, is_plain, replica_bucket_bytes
from everygpu.parallel.call import PerReplica
from everygpu.parallel.cuda_graphs.capture import Capturable, Capture
from everygpu.parallel.cuda_graphs.host_rng import draw_seeds
from everygpu.parallel.cuda_graphs.multi_gpu_graph import MultiGpuGraph, ReadyEvents
from everygpu.parallel.cuda_graphs.reached_state import PLAIN
from everygpu.parallel.cuda_graphs.replay import (
    DIFFERENTIATED_AGAIN,
    OTHER_OUTPUTS,
    OUTPUTS_WATCHED,
    SECOND_BACKWARD,
    ForwardGraphs,
    Gradients,
    Leaves,
    Opaque,
    ReducedGradients,
    Replay,
)
from everygpu.parallel.cuda_graphs.static_batch import StaticBatch
from everygpu.parallel.cuda_graphs.transfer import GradReducer, ParameterSync, why_not_sent
from everygpu.parallel.engines.engine import Wrapper
from everygpu.parallel.replicas.module_tree import is_dense
from everygpu.parallel.replicas.remap import in_place_of
from everygpu.parallel.replicas.replica_set import ReplicaLeaves as Twins
from everygpu.parallel.replicas.replica_set import ReplicaSet
from everygpu.parallel.scatter.denominator import denominator_of
from everygpu.parallel.sharded.functions import mark_alias
from everygpu.parallel.sharded.layout import DeviceWeights
from everygpu.torch_private.core import after_backward, backward_id, is_transforming

_ACCUMULATION = "torch::autograd::AccumulateGrad"


def find_unsupported_tensor(module: nn.Module) -> str | None:
    """Name a parameter or buffer that can't be part of a capture."""
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        if not is_dense(t):
            return f"{name} is no plain dense tensor"
    return None


def seal_outputs(outputs: list[Any]) -> list[Any]:
    """Return outputs that a replay can rebuild: ``Opaque`` replaces objects with tensors in them.

    Raises:
        CaptureError: one can't be rebuilt.
    """
    sealed: list[Any] = tree.map_leaves(_seal, outputs)
    return sealed


def _seal(x: Any) -> Any:
    if (type(x) is Tensor and x.layout == torch.strided) or type(x) in PLAIN:
        return x
    try:
        if isinstance(x, Tensor):
            raise TypeError(f"of layout {x.layout}")
        return Opaque(x)
    except Exception as error:
        raise CaptureError(
            f"DataParallel: outputs must be dense tensors, numbers or strings, or objects of these to be captured, got "
            f"a {type(x).__name__} ({error}). Pass engine='threads'."
        ) from error


def check_graph(outputs: list[Tensor], params: list[Tensor], leaves: Leaves, module: nn.Module) -> None:
    """Refuse an autograd graph that reaches a parameter in whose place leaves were to be used, another tensor whose
    gradient a replay would lose, a reentrant checkpoint or a sparse gradient.
    """
    originals = set(map(id, params))
    known = {id(t) for rows in leaves for row in rows for t in row}
    for node in _nodes(outputs):
        if node.name() == _ACCUMULATION:
            _check_leaf(node, originals, known, module)
        if node.name() == "CheckpointFunctionBackward":
            raise CaptureError(
                "DataParallel: activation checkpoints must be non-reentrant, got a reentrant one. "
                "Call torch.utils.checkpoint.checkpoint with use_reentrant=False."
            )
        if getattr(node, "_saved_sparse", False):
            raise CaptureError(
                "DataParallel: gradients must be dense, got an embedding with sparse=True. Pass sparse=False."
            )


def _check_leaf(node: Any, originals: Collection[int], known: Collection[int], module: nn.Module) -> None:
    # More than of a leaf that only its graph refers to, as one that forward makes to differentiate by: no code can read
    # the gradient of that.
    is_held = _num_references(node) > _num_references(get_gradient_edge(torch.empty(0, requires_grad=True)).node)
    leaf = node.variable
    if id(leaf) in originals:
        raise CaptureError(
            "DataParallel: every parameter in forward must be a registered one, got one from a plain attribute "
            "of a module. Register it with register_parameter."
        )
    if is_held and id(leaf) not in known:
        name = next((f"buffer {name}" for name, b in module.named_buffers() if b is leaf), "another")
        raise CaptureError(
            f"DataParallel: what requires a gradient in forward must be a parameter of the module, got "
            f"{name} of shape {tuple(leaf.shape)}, whose gradient a capture would lose. Register it in the module as "
            f"an nn.Parameter, or as a part of an nn.Module"
        )


def _num_references(node: Any) -> int:
    """Count what refers to a leaf: how many references are torch's own depends on its version."""
    return sys.getrefcount(node.variable)


def find_watched(outputs: list[Tensor], written: list[Tensor]) -> list[Tensor]:
    """Find which tensors, that Python may write, the graph behind outputs has saved for its backward."""
    saved = {t.untyped_storage().data_ptr() for node in _nodes(outputs) for t in _saved_by(node)}
    return [t for t in written if not t.is_inference() and t.untyped_storage().data_ptr() in saved]


def _saved_by(node: Node) -> Iterator[Tensor]:
    for name in _names_of_saved(type(node)):
        try:
            found = getattr(node, name)
        except (RuntimeError, AttributeError):  # freed
            continue
        for saved in found if isinstance(found, (tuple, list)) else [found]:
            yield from (t for t in _value_of(saved) if is_dense(t))


def _value_of(saved: Any) -> list[Tensor]:
    """Return what a node has saved, without unpacking it: checkpoints would run their part of forward again."""
    found: list[Tensor] = []

    def take(t: Tensor) -> Tensor:
        found.append(t)
        return t

    # Refused where something is packed already, such as by a checkpoint, and where nothing was saved.
    with suppress(RuntimeError):
        saved.register_hooks(take, lambda t: t)
    return found


@functools.cache
def _names_of_saved(kind: type[Node]) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a capture is made with."""

    params: list[Tensor]
    leaves: Leaves
    """In their place."""
    reducers: Sequence[GradReducer] = ()
    """For each bundle."""
    homes: Sequence[Sequence[Tensor]] = ()
    """Where the first device's leaves were made: other forwards may move the module's parameters elsewhere."""


class CapturedForward(Capturable[PerReplica]):
    """Captures a model's forward after a few of a kind, with its backward, and replays both from then on.

    Outputs and gradients are copied out of the capture's memory, so that users can keep them. Until a replay's
    backward is over, its activations need that memory: another forward runs eagerly meanwhile. A replay goes backward
    once, as the forwards before were seen to: where these go backward in several ways, nothing is captured.

    Args:
        wrapper: Whose module runs.
        proves: Capture only what Dynamo proves to be the same in a capture.
    """

    def __init__(self, wrapper: Wrapper, *, proves: bool = False) -> None:
        self._wrapper = wrapper
        route = wrapper._route
        self._devices = route.devices
        self._places = route.devices[:: wrapper.replicas_per_device or 1]
        """The devices, each once, where replicas share one."""
        self._proves = proves
        self._replicas: ReplicaSet | None = None
        self._modules: list[nn.Module] = []
        self._sync: ParameterSync | None = None
        self._use: weakref.ref[Use] | None = None
        self._used: dict[int, frozenset[int]] = {}
        """The outputs that backwards begin at, by how many there are: a small batch may have fewer replicas."""
        self._refused: str | None = None
        """Why a captured backward wouldn't do."""
        # Nothing that this holds refers back to it: when a model is dropped, its memory is free at once.
        self._me = weakref.proxy(self)
        self.capture = self._make_capture(proves)
        """Makes captures, drops them, and says why no forward will be captured any more, if so."""
        self.was_replayed = False
        """Whether the last call was."""

    def _make_capture(self, proves: bool) -> Capture[PerReplica]:
        return Capture(
            self._me,
            "DataParallel",
            self._wrapper._route,
            level=logging.DEBUG if proves and len(self._devices) > 1 else logging.WARNING,  # the engine says it
            proves=proves,
            is_promised=not proves,
            gives_up=proves,
            by_replica=self._wrapper.replicas_per_device > 0,
        )

    def replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PerReplica | None:
        """Replay a call's capture, making one if it is time to; None where it has to run eagerly."""
        use = None if self._use is None else self._use()
        is_capturable = torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not is_transforming()
        outputs = None
        if is_capturable and self._used and (use is None or use.is_over):
            outputs = self.capture.run((args, kwargs, ()))
        self.was_replayed = outputs is not None
        return outputs

    def watch(self, outputs: list[Any]) -> list[Any]:
        """Return an eager call's outputs, which note how backward goes through them: it must do the same in a capture.

        They are aliases: gradients also reach an output that others were computed from, used or not.
        """
        if not torch.is_grad_enabled() or self.capture.reason is not None:
            return outputs
        num = sum(isinstance(x, Tensor) for _, x in tree.leaves(outputs, "out"))
        if self.capture.has_graphs and num in self._used:
            return outputs
        used: set[int] = set()
        backwards: set[int] = set()
        indices = itertools.count()
        are_several = num > len(outputs)

        def note(i: int) -> None:
            used.add(i)
            if backward_id() not in backwards:
                backwards.add(backward_id())
                after_backward(lambda: self._note_backward(num, frozenset(used), len(backwards)))
            if torch.is_grad_enabled():
                self._refused = self._refused or DIFFERENTIATED_AGAIN

        def on_watch() -> None:
            if are_several:
                self.refuse(OUTPUTS_WATCHED)

        def alias(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            i = next(indices)
            if not x.requires_grad or x.is_leaf:  # a leaf is the user's own, and no capture returns one
                return x
            y = x.view_as(x)
            mark_alias(y.grad_fn, on_watch)
            y.register_hook(lambda _: note(i))  # type: ignore[no-untyped-call]
            return y

        found: list[Any] = tree.map_leaves(alias, outputs)
        return found

    def _note_backward(self, num: int, used: frozenset[int], num_backwards: int) -> None:
        if num_backwards > 1:
            self._refused = self._refused or SECOND_BACKWARD
        elif self._used.setdefault(num, used) != used:
            self._refused = self._refused or OTHER_OUTPUTS

    def refuse(self, reason: str) -> None:
        """Capture no more, as backward goes another way than a captured one."""
        self._refused = reason
        self.capture.forget()

    # ``Capturable``, for ``Capture``.

    def roots(self) -> list[nn.Module]:
        return [self._wrapper.module]

    def state(self) -> Hashable:
        # Dropping captures waits for the GPUs: other streams may not write where earlier ones have yet to read.
        return self._wrapper._capture_options, tuple(map(current_stream, self._devices))

    def others(self) -> list[Any]:
        return [option for option in self._wrapper._capture_options if callable(option)]

    def unsupported_reason(self) -> str | None:
        if self._wrapper.replicas_per_device > 1 and not all(map(is_plain, self._trained())):
            return "replicas that share a GPU's parameters can't use them where they are in memory"
        return find_unsupported_tensor(self._wrapper.module) or why_not_sent(self._trained(), self._places)

    def needs_proof(self) -> bool:
        if self._refused is not None:
            raise CaptureError(self._refused)
        return self._proves

    def prepare(self) -> Prepared:
        # Replicas accept another parameter that fits in place of one; ParameterSync is for the very tensors.
        fits = self._sync is not None and self._sync.fits(self._trained())
        if self._replicas is None or self._replicas.module is not self._wrapper.module or not fits:
            self._replicas = self._wrapper.make_replicas(lambda me=self._me: me._make_twins(), fixed=True)  # type: ignore[misc]
        self._replicas.forget()  # frozen parameters are sent now, and no more unless by replays
        self._modules = self._replicas.refresh(range(len(self._devices)))
        leaves = [b.leaves() for b in self.sync.groups]
        homes = [[t.data for t in row[0]] for row in leaves]
        return Prepared(params=self.sync.params, leaves=leaves, reducers=self.sync.make_reducers(), homes=homes)

    def capture_work(self, graph: MultiGpuGraph, batch: StaticBatch, prepared: Prepared) -> ForwardGraphs:
        draw_seeds(self.roots(), self._devices)
        with self._wrapper._drawing_by(graph.random_of):
            found = graph.capture(lambda: _see_denominators(self._forward(batch, prepared)))
        call, outputs = found.call, seal_outputs(list(found))
        assert call is not None  # noqa: S101 - replicas' own outputs know it
        if not isinstance(call.weights, DeviceWeights) and call.weights not in (call.rows, (1,) * len(outputs), None):
            raise CaptureError("weight= returns numbers, which a capture would keep: return tensors, as mask.sum()")
        leaves = [x for _, x in tree.leaves(outputs, "out")]
        slots = [x for x in leaves if isinstance(x, Tensor)]
        if len(slots) not in self._used:
            raise CaptureError("no backward has gone through a batch of this size yet")
        used = tuple(i for i in sorted(self._used[len(slots)]) if slots[i].requires_grad)
        num_plain = len(slots)
        slots += [t for x in leaves if isinstance(x, Opaque) for t in x.tensors]
        check_graph(slots, prepared.params, prepared.leaves, self._wrapper.module)
        seen = {i: denominator_of(slots[i]) for i in used}
        denominators = {i: total for i, total in seen.items() if total is not None}
        begun = [slots[i] for i in used]
        kept = {id(t): t for m in self._modules for t in (*m.parameters(), *m.buffers())}
        watched = find_watched(begun, [*kept.values(), *batch.tensors()])
        seeds = [torch.zeros_like(t) for t in begun]
        backward = graph.new_in_same_pool()
        try:
            gradients = backward.capture(lambda: self._backward(begun, seeds, prepared))
        finally:
            graph.has_replaced_generators |= backward.has_replaced_generators
        for reducer in prepared.reducers:
            reducer.finish()
        return ForwardGraphs(
            outputs=tree.map_leaves(lambda x: x.detach() if isinstance(x, Tensor) else x, outputs),
            call=replace(call, args=(), kwargs=(), modules=()),
            slots=[t.detach() for t in slots],
            denominators=denominators,
            num_plain=num_plain,
            differentiable=[t.requires_grad for t in slots],
            used=used,
            seeds=seeds,
            backward=backward,
            gradients=gradients,
            watched=watched,
        )

    def give_up(self, reason: str) -> None:
        self._replicas, self._modules, self._sync, self._use = None, [], None, None

    def begin(self, captured: ForwardGraphs) -> bool:
        if self._replicas is not None:
            self._replicas.send_forgotten()  # an optimizer may have stepped what is frozen here
        return True

    def finish(self, captured: ForwardGraphs) -> PerReplica:
        replay = Replay(captured, self.refuse)
        self._use = weakref.ref(replay.use)
        outputs, call = replay.run(self._devices), replace(captured.call)
        if isinstance(call.weights, DeviceWeights):  # in the capture's memory
            call.weights = DeviceWeights(call.weights.tensor.clone())
        return PerReplica(outputs, call)

    # What is captured.

    def _trained(self) -> list[Tensor]:
        return [p for p in self._wrapper.module.parameters() if p.requires_grad]

    def _make_twins(self) -> Twins:
        size, by_tree = replica_bucket_bytes(self._wrapper.bucket_cap_mb), self._wrapper.replicas_per_device > 0
        self._sync = ParameterSync(self._trained(), self._places, size, by_tree=by_tree)
        return self._sync.twins()

    @property
    def sync(self) -> ParameterSync:
        """What moves the parameters, made with the replicas for a capture."""
        assert self._sync is not None  # noqa: S101 - ``prepare`` has made it
        return self._sync

    def _forward(self, batch: StaticBatch, prepared: Prepared) -> PerReplica:
        """Send the parameters and run the replicas, with leaves in place of the first one's."""
        assert self._replicas is not None  # noqa: S101 - ``prepare`` has made them
        if self._proves:
            self._replicas.forget()  # each replay also sends frozen parameters, as the threads engine does
        self.sync.send()
        args, kwargs, _ = batch.read()
        groups = list(zip(self.sync.groups, prepared.leaves, prepared.homes))
        for group, row, home in groups:
            group.put_back(row, home)
        at_home = {id(p): t for group, row, _ in groups for p, t in zip(group.originals, row[0])}
        with in_place_of(self._wrapper.module, at_home):
            return self._wrapper._run_replicas(args, kwargs, replicas=self._replicas)

    def _backward(self, outputs: list[Tensor], seeds: Sequence[Tensor], prepared: Prepared) -> Gradients:
        """Go backward from outputs and add the gradients up."""
        events, leaves, reducers = ReadyEvents(self._places), prepared.leaves, prepared.reducers
        with events.watching(leaves, _on_gradient):
            grads = _find_grads(outputs, seeds, leaves)
        for b, (reducer, row) in enumerate(zip(reducers, grads)):
            for replica in reducer.take(row):
                events.forget(b, replica)
        events.run_overlapped({b: reducer.run for b, reducer in enumerate(reducers)})
        return ReducedGradients(self.sync, reducers, _reached(grads))


def _see_denominators(outputs: PerReplica) -> PerReplica:
    """Have what has to be computed for them be captured."""
    for _, x in tree.leaves(list(outputs), "out"):
        if isinstance(x, Tensor):
            denominator_of(x)
    return outputs


def _on_gradient(t: Tensor, note: Callable[[Tensor], None]) -> RemovableHandle:
    return t.register_hook(lambda _: note(t))  # type: ignore[no-any-return, no-untyped-call]


def _find_grads(outputs: list[Tensor], seeds: Sequence[Tensor], leaves: Leaves) -> list[list[Grads]]:
    """Return the gradients of a capture's leaves, for each bundle and device."""
    flat = [t for row in leaves for tensors in row for t in tensors]
    each = iter(torch.autograd.grad(outputs, flat, seeds, allow_unused=True))
    grads: list[list[Grads]] = [[[next(each) for _ in tensors] for tensors in row] for row in leaves]
    if any(g is not None and g.layout != torch.strided for row in grads for gs in row for g in gs):
        raise CaptureError("DataParallel: gradients must be dense, got a sparse one. Pass engine='threads'.")
    return grads


def _reached(grads: Sequence[Sequence[Grads]]) -> list[bool]:
    """Return for each parameter, in the order of the bundles, whether it has a gradient on any device."""
    return [any(g is not None for g in column) for row in grads for column in zip(*row)]
