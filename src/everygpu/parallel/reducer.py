"""Gradients of several ranks: reduced in buckets, as soon as these are whole, in one order on all ranks."""

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from everygpu import tree
from everygpu.errors import CallError, RankError
from everygpu.parallel.buckets import BucketPlan, fill_views, group_by_storage, plan_bucket
from everygpu.ranks.group import Group
from everygpu.torch_private.core import after_backward, backward_id, foreach_copy_, will_execute

_STRIDED, _SPARSE = 1.0, 1024.0
"""Flags of a parameter's gradient."""

_ALIGNED = 8
"""Gradients begin at multiples of so many elements, as kernels of optimizers read them fastest."""


class AnyBucket(Protocol):
    """What ``BucketQueue`` sends."""

    num_left: int
    """Parameters that are still without a gradient of the backward that is running."""
    is_sent: bool

    def start_reduction(self, group: Group) -> None:
        """Start its all-reduce."""


class BucketQueue:
    """Sends the buckets of one backward in order, each as soon as all of its gradients are there.

    A backward within the backward, as of a reentrant checkpoint or in a Function's own backward, may add to a gradient
    several times: from the first one on, buckets wait for the end. ``task`` is the outer backward, see ``backward_id``,
    or None until that is known.

    ``find`` returns the buckets, in the same order on all ranks; called when the first one is whole, or at the end.
    """

    def __init__(self, group: Group, find: Callable[[], Sequence[AnyBucket]], task: int | None) -> None:
        self._group = group
        self._find = find
        self._left: list[AnyBucket] | None = None
        self._is_late = False
        self.task = task

    def on_grad(self, bucket: AnyBucket) -> None:
        """Note that a parameter of a bucket has its gradient."""
        if bucket.is_sent:
            raise CallError(
                "ranks: a parameter got one more gradient from a backward within the backward, after its gradients "
                "were sent to the other ranks. Use the parameter only in the part that goes backward by itself, or "
                "only outside of it; for activation checkpoints pass use_reentrant=False."
            )
        bucket.num_left -= 1
        if backward_id() != self.task:
            self._is_late = True
        if bucket.num_left == 0 and not self._is_late:
            # A bucket that is whole early waits for those before it: ranks' backwards finish buckets in different
            # orders, and a communicator pairs the n-th reduction of one rank with the n-th of another.
            left = self._remaining()
            while left and left[-1].num_left == 0:
                left.pop().start_reduction(self._group)

    def send_rest(self) -> None:
        """Send those that are left, whole or not."""
        left = self._remaining()
        while left:
            left.pop().start_reduction(self._group)

    def _remaining(self) -> list[AnyBucket]:
        if self._left is None:
            self._left = list(self._find())[::-1]
        return self._left


class ReduceBucket:
    """Gradients that travel together, before a flag for each parameter: whether it has one."""

    def __init__(self, params: Sequence[Tensor], plan: BucketPlan) -> None:
        self._plan = plan
        self.params = [params[slot.index] for slot in plan.slots]
        self._places = (*plan.places, (torch.Size([len(plan.slots)]), (1,), plan.numel))
        self._all_there: Tensor | None = None
        self.begin()

    def begin(self, *, is_mean: bool = True) -> None:
        """Start with the gradients of another backward, to be averaged over ranks, or added."""
        self._is_mean = is_mean
        self.num_left = len(self.params)
        self.is_sent = False
        # Backward will make the gradients, which nobody else can refer to then.
        self._is_new = all(p.grad is None for p in self.params)
        self._views: list[Tensor] = []
        self.flags: Tensor | None = None
        """Of the gradients that were sent, where one is missing or sparse."""
        self._wait: Callable[[], None] | None = None

    def start_reduction(self, group: Group) -> None:
        """Start the all-reduce of the parameters' gradients."""
        if group.sums_by_tree and not self._is_new:
            raise CallError(
                "DataParallel: with num_replicas under torchrun, gradients are summed batch by batch, got some of an "
                "earlier batch. Call optimizer.zero_grad() before each backward."
            )
        grads = [p.grad for p in self.params]
        is_whole = all(g is not None and g.layout is torch.strided for g in grads)
        device, numel = self.params[0].device, self._plan.numel
        make = torch.empty if is_whole and not self._plan.has_gaps else torch.zeros
        whole = make(numel + len(grads), dtype=self._plan.dtype, device=device)
        self._views = list(itertools.starmap(whole.as_strided, self._places))
        if is_whole:
            if self._all_there is None:
                self._all_there = torch.ones(len(grads), dtype=whole.dtype, device=device)
            foreach_copy_(self._views, [*grads, self._all_there])  # type: ignore[list-item]
        else:
            fill_views(self._views, [g if g is None or g.layout is torch.strided else g.to_dense() for g in grads])
            self.flags = self._views[-1]
            self.flags.copy_(torch.tensor(list(map(_kind, grads))), non_blocking=True)
        self.is_sent = True
        # On GPUs the communicator's stream waits for the current one, which has filled the memory; ``wait`` has the
        # current one wait for the sum. The host waits for neither.
        self._wait = group.all_reduce(whole, is_mean=self._is_mean)

    def wait(self) -> bool:
        """Wait for the result; return whether there is one."""
        if self._wait is not None:
            self._wait()
        return self._wait is not None

    def finish(self, kinds: Iterator[float]) -> None:
        """Give the results to the parameters; one that no rank has a gradient for keeps what it had."""
        if self._is_new and self.flags is None:
            for p, view in zip(self.params, self._views):
                p.grad = view  # the gradient becomes a part of the bucket, as DDP's may
        else:
            self._write(kinds)
        self._views, self._wait, self.flags = [], None, None

    def _write(self, kinds: Iterator[float]) -> None:
        pairs = []
        for p, view in zip(self.params, self._views):
            kind = _STRIDED if self.flags is None else next(kinds)
            if p.grad is not None and p.grad.layout is not torch.strided:
                p.grad = view.to_sparse(p.grad.sparse_dim())
            elif p.grad is not None and not self._is_new:
                pairs.append((p.grad, view))
            elif kind:
                p.grad = view if p.grad is not None or kind < _SPARSE else view.to_sparse(1)
        if pairs:
            foreach_copy_([grad for grad, _ in pairs], [view for _, view in pairs])


def finish(buckets: Sequence[ReduceBucket]) -> None:
    """Wait for the results of those buckets that were sent, and give them to the parameters."""
    sent = [bucket for bucket in buckets if bucket.wait()]
    flags = [bucket.flags for bucket in sent if bucket.flags is not None]
    kinds = iter(torch.cat(flags).tolist() if flags else ())  # the host waits once
    for bucket in sent:
        bucket.finish(kinds)


def _kind(grad: Tensor | None) -> float:
    """Return the flag of a gradient; reduced over ranks it says whether one has it, and whether it is sparse."""
    return 0.0 if grad is None else _STRIDED if grad.layout is torch.strided else _SPARSE


class BucketedGrads:
    """The gradients of some parameters, in buckets."""

    def __init__(self, group: Group, bucket_bytes: int) -> None:
        self.group = group
        self.bucket_bytes = bucket_bytes
        self.params: list[Tensor] = []
        self.buckets: list[ReduceBucket] = []
        self._layout: list[Any] = []
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles)

    def follow(self, params: Sequence[Tensor]) -> None:
        """Make buckets for the parameters of now, unless those that there are fit them."""
        layout = _layout(params)
        if tree.are_same(params, self.params) and layout == self._layout:
            return
        _remove(self._handles)
        self.params, self._layout = list(params), layout
        # In the order in which backward usually finishes them.
        self.buckets = [
            ReduceBucket(params, plan_bucket(params, members, 1, together=together, unit=_ALIGNED))
            for members, together in group_by_storage(params, range(len(params))[::-1], self.bucket_bytes)
        ]
        for bucket in self.buckets:
            hook = GradHook(weakref.ref(self), bucket)
            self._handles += [p.register_post_accumulate_grad_hook(hook) for p in bucket.params]  # type: ignore[no-untyped-call]

    def on_grad(self, bucket: ReduceBucket) -> None:
        """Note that a parameter of a bucket has a gradient of the backward that is running."""
        raise NotImplementedError


class GradHook:
    """Called by each backward for each parameter of a bucket, so it does little."""

    __slots__ = ("_bucket", "_grads")

    def __init__(self, grads: "weakref.ref[BucketedGrads]", bucket: ReduceBucket) -> None:
        self._grads, self._bucket = grads, bucket

    def __call__(self, _: Tensor) -> None:
        grads = self._grads()  # parameters outlive it
        if grads is not None:
            grads.on_grad(self._bucket)


_getters: list[Callable[[Tensor], Any]] = [*map(operator.attrgetter, ("dtype", "shape", "device")), Tensor.stride]


def _layout(params: Sequence[Tensor]) -> list[Any]:
    """Return what buckets are laid out by: it runs in every forward."""
    return [list(map(get, params)) for get in _getters]


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


class SummedGrads(BucketedGrads):
    """Parameters' own gradients, which the caller has weighted, added over ranks."""

    def __init__(self, group: Group, bucket_bytes: int) -> None:
        super().__init__(group, bucket_bytes)
        self._queue: BucketQueue | None = None

    def on_grad(self, bucket: ReduceBucket) -> None:
        if self._queue is not None:
            self._queue.on_grad(bucket)

    @contextmanager
    def adding_up(self, loss: Tensor) -> Iterator[None]:
        """All-reduce the gradients of a backward from ``loss``, within the block."""
        self._queue = queue = self._begin()
        try:
            with noting_task(queue, loss):
                yield
            self._finish(queue)
        finally:
            self._queue = None

    def add_up(self) -> None:
        """All-reduce the gradients; a parameter with gradients only on other ranks gets theirs."""
        self._finish(self._begin())

    def _begin(self) -> BucketQueue:
        for bucket in self.buckets:
            bucket.begin(is_mean=False)
        return BucketQueue(self.group, lambda: self.buckets, None)

    @torch.no_grad()
    def _finish(self, queue: BucketQueue) -> None:
        queue.send_rest()
        finish(self.buckets)


@contextmanager
def noting_task(queue: BucketQueue, loss: Tensor) -> Iterator[None]:
    """Note in a queue which backward begins at ``loss``."""

    def note(_: Any) -> None:
        queue.task = backward_id()

    handle = None if loss.grad_fn is None else loss.grad_fn.register_prehook(note)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


class Anchor:
    """A leaf that takes part in forwards, and gets no gradient.

    Whether a backward comes to it says whether that adds to leaves' ``.grad``, and goes through such a forward.
    """

    def __init__(self) -> None:
        self.leaf = torch.zeros((), requires_grad=True, device="cpu")
        self._node = get_gradient_edge(self.leaf).node

    def is_reached(self) -> bool:
        """Whether the backward that is running comes to it."""
        return will_execute(self._node)


class ModelGrads(BucketedGrads):
    """The gradients of a wrapped model, which a ``Reducer`` averages over ranks."""

    def __init__(self, reducer: "Reducer", module: nn.Module, bucket_bytes: int) -> None:
        super().__init__(reducer.group, bucket_bytes)
        self._reducer = reducer
        self.module = weakref.ref(module)
        self.number = -1
        self.is_held = False
        """Backwards leave gradients as they are, for a later one to average."""
        self.is_pending = False
        """A backward has left gradients so."""
        self.anchor = Anchor()

    def takes_part(self) -> bool:
        """Whether the backward that is running is to average gradients of this model, as far as can be known before."""
        return not self.is_held and (self.is_pending or self.anchor.is_reached())

    def on_grad(self, bucket: ReduceBucket) -> None:
        if self._reducer.is_paused:
            return
        if self.is_held:
            self.is_pending = True
        else:
            self._reducer.current().on_grad(self, bucket)

    def on_output_grad(self) -> bool:
        """Note that backward has come to an output; return whether it adds to gradients of leaves.

        Raises:
            CallError: it returns gradients of parameters, or makes a graph of them: nobody would average these.
        """
        if not self._reducer.accumulates(self.anchor):
            return False
        if not (self.is_held or self._reducer.is_paused):
            self._reducer.current()
        return True


class Reducer:
    """Averages gradients over ranks when a backward ends: of every wrapped model that it has reached on any rank.

    Whatever is in ``.grad`` then is averaged, whichever forward it came from, or none: what other backwards have left
    there is the same on all ranks, and so is its mean. Each forward weights the gradients that enter its outputs by
    itself, see ``WeightedForward``, so that nothing has to be known of forwards here.

    Source:
        ``DistributedDataParallel``'s reducer, one per model: it searches the graph for parameters
        that take no part, and leaves the second of two backwards after two forwards alone, without a warning.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.anchor = Anchor()
        """Of models without a parameter that takes gradients."""
        self.is_paused = False
        """Somebody else reduces the gradients of the backward that is running."""
        self._models: weakref.WeakValueDictionary[int, ModelGrads] = weakref.WeakValueDictionary()
        self._numbers: list[int] = []
        """Of the models, as all ranks know them."""
        self._next_number = 0
        self._running: Backward | None = None
        self._awaited: weakref.ref[Any] | None = None
        self._known: tuple[int, bool] = (-1, False)

    @staticmethod
    def of(group: Group) -> "Reducer":
        """Return the group's own."""
        if group.reducer is None:
            group.reducer = Reducer(group)
        found: Reducer = group.reducer
        return found

    def grads_of(self, module: nn.Module, bucket_bytes: int) -> ModelGrads:
        """Return what averages a module's gradients, known to all ranks from now on; all ranks call it together."""
        found = next((m for m in self._models.values() if m.module() is module), None)
        if found is None:
            found = ModelGrads(self, module, bucket_bytes)
        else:
            del self._models[found.number]
        found.bucket_bytes = bucket_bytes
        found.number, self._next_number = self._next_number, self._next_number + 1
        self._models[found.number] = found
        living = self.group.gather(list(self._models))  # garbage is collected at other times on other ranks
        self._numbers = sorted(set().union(*living), reverse=True)
        return found

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the gradients of backwards within to the caller."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def accumulates(self, anchor: Anchor) -> bool:
        """Whether the backward that is running adds to ``.grad`` of leaves, as that through a forward's anchor."""
        task = backward_id()
        if self._known[0] != task:
            self._known = task, anchor.is_reached() or self._has_param_inputs()
            if self._known[1] and torch.is_grad_enabled():
                raise CallError(
                    "DataParallel: gradients of parameters by create_graph=True can't be averaged over ranks. Call "
                    "backward() without it, or run in one process."
                )
        return self._known[1]

    def _has_param_inputs(self) -> bool:
        """Whether parameters are among the leaves that ``backward(inputs=...)`` was called for."""
        params = [p for m in self._models.values() for p in m.params]
        try:
            return any(will_execute(get_gradient_edge(p).node) for p in params if p.requires_grad)
        except RuntimeError as error:
            raise CallError(
                "DataParallel: gradients of parameters by torch.autograd.grad can't be averaged over ranks. Call "
                "backward(), or run in one process."
            ) from error

    def current(self) -> "Backward":
        """Return the backward that is running, which will call back when it ends."""
        if self._running is None:
            self._running = Backward(self.group, {n: self._models.get(n) for n in self._numbers})
            end = self._finalize_backward
            # A backward that fails lets go of what it was to call.
            me = weakref.proxy(self)
            self._awaited = weakref.ref(end, lambda _: me._forget())
            after_backward(end)
        return self._running

    def _forget(self) -> None:
        self._running = self._awaited = None

    @torch.no_grad()
    def _finalize_backward(self) -> None:
        running = self._running
        self._forget()
        if running is not None:
            running.finalize()


class Backward:
    """One backward that is running, and the models that it may reach: by number, in the order in which their buckets
    are sent; None for one that is gone on this rank.
    """

    def __init__(self, group: Group, models: dict[int, ModelGrads | None]) -> None:
        self._group = group
        self._models = models
        self._reached = {n for n, model in models.items() if model is not None and model.takes_part()}
        for model in models.values():
            for bucket in () if model is None else model.buckets:
                bucket.begin()
        # Ranks' hosts exchange flags during backward; a single model needs no agreement.
        self._agreed = self._ask() if len(models) > 1 else None
        self._found: list[ReduceBucket] | None = None
        self._queue = BucketQueue(group, self._early, backward_id())

    def on_grad(self, model: ModelGrads, bucket: ReduceBucket) -> None:
        """Note that a parameter has its gradient."""
        self._reached.add(model.number)
        self._queue.on_grad(bucket)

    def finalize(self) -> None:
        """Average what is in the gradients of all models that any rank has reached."""
        self._queue.send_rest()
        buckets = list(self._early())
        if self._agreed is not None:  # some may have been reached by parameters alone
            late = [bucket for bucket in self._buckets_of(self._ask()()) if not bucket.is_sent]
            BucketQueue(self._group, lambda: late, None).send_rest()
            buckets += late
        finish(buckets)

    def _ask(self) -> Callable[[], list[int]]:
        """Begin to ask which models any rank has reached."""
        return self._group.begin_max([n in self._reached for n in self._models])

    def _early(self) -> list[ReduceBucket]:
        """Return the buckets of models through whose forwards this backward goes."""
        if self._found is None:
            self._found = self._buckets_of([1] * len(self._models) if self._agreed is None else self._agreed())
        return self._found

    def _buckets_of(self, flags: Sequence[int]) -> list[ReduceBucket]:
        found: list[ReduceBucket] = []
        for model, flag in zip(self._models.values(), flags):
            if flag and model is None:
                raise RankError(
                    "ranks: another rank's backward came to a DataParallel that this rank has let go of. Have all "
                    "ranks train the same models."
                )
            if flag and model is not None:
                model.is_pending = False
                found += model.buckets
        return found
