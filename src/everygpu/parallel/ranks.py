"""A model as one of several ranks': all start alike, and gradients are added up while backward goes on."""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from everygpu import comm, tree
from everygpu.devices.parse import may_share_gpus
from everygpu.errors import CallError, DeviceError
from everygpu.parallel.buckets import (
    REPLICA_BYTES,
    BucketPlan,
    fill_views,
    group_by_storage,
    group_tensors,
    plan_bucket,
    replica_bucket_bytes,
)
from everygpu.parallel.replicas.module_tree import ModuleTree
from everygpu.parallel.scatter.batch_weight import Weight, weigh_batch
from everygpu.ranks.group import Group, SpreadBatch, forward_of
from everygpu.torch_private.core import NO_BACKWARD, after_backward, backward_id, foreach_copy_, will_execute


def check_alike(group: Group, module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module of which every rank has one.

    Raises:
        RankError: on every rank, if the ranks' modules differ in names, shapes or dtypes; the message names the first.
    """
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    rows = {name: (tuple(t.shape), str(t.dtype)) for name, t in named.items()}
    group.check_same("parameters and buffers of the model", rows)
    return list(named.values())


def check_devices(group: Group, devices: Sequence[torch.device]) -> None:
    """Refuse ranks that share a GPU: NCCL can't have two of them there, and says so late and in words of its own."""
    mine = [str(torch.cuda.get_device_properties(d).uuid) for d in devices if d.type == "cuda"]
    if not group.uses_nccl or may_share_gpus():
        mine = []
    of_ranks: dict[str, list[int]] = {}
    for rank, found in enumerate(group.gather(mine)):
        for uuid in found:
            of_ranks.setdefault(uuid, []).append(rank)
    shared = next((ranks for ranks in of_ranks.values() if len(ranks) > 1), None)
    if shared is not None:
        raise DeviceError(
            f"DataParallel: every rank must have GPUs of its own, got one on ranks {shared[0]} and {shared[1]}. Leave "
            f"device_ids out, or pass [int(os.environ['LOCAL_RANK'])]."
        )


@torch.no_grad()
def copy_from_first(group: Group, tensors: Sequence[Tensor]) -> None:
    """Write rank 0's values into the other ranks' tensors."""
    for indices in group_tensors(tensors, lambda t: (t.dtype, t.device), REPLICA_BYTES):
        members = [tensors[i] for i in indices]
        flat = torch.cat([t.reshape(-1) for t in members])
        group.broadcast(flat)
        if group.rank:
            parts = torch.split(flat, [t.numel() for t in members])
            foreach_copy_(members, [part.view(t.shape) for part, t in zip(parts, members)])


Factor = float | Tensor
"""What a forward's gradients are multiplied by: how much of the mean they are."""

_STRIDED, _SPARSE = 1.0, 1024.0
"""Flags of a parameter's gradient."""

_ALIGNED = 8
"""Gradients begin at multiples of so many elements, as kernels of optimizers read them fastest."""


class RankGradients:
    """Has every ``backward`` give parameters the mean of all ranks' gradients, weighed by their rows.

    Buckets are added up beside what backward still computes, in one order on all ranks. What parameters have of
    earlier backwards is the same on all ranks, and stays as it is in a mean. Whoever keeps the output of a forward
    keeps this.

    Args:
        group: The ranks.
        params: Those that take gradients.
        bucket_bytes: Size at which a bucket is closed.
    Source:
        ``DistributedDataParallel``'s reducer, which weighs all ranks alike, searches the graph for parameters that take
        no part, and leaves the second of two backwards after two forwards alone, without a word.
    """

    def __init__(self, group: Group, params: Sequence[Tensor], bucket_bytes: int) -> None:
        self._group = group
        self.params = list(params)
        self.is_held = False
        """Backwards leave gradients as they are, for a later one to add up."""
        self._buckets = make_buckets(params, bucket_bytes)
        self._nodes = [get_gradient_edge(p).node for p in params]
        self._num_forwards = 0
        self._last: Factor = 1.0
        self._held: list[Factor] = []
        self._clear()
        self._handles: list[RemovableHandle] = []
        for index, bucket in enumerate(self._buckets):
            hook = _make_hook(weakref.proxy(self), index, bucket)  # parameters outlive this
            self._handles += [p.register_post_accumulate_grad_hook(hook) for p in bucket.params]  # type: ignore[no-untyped-call]
        weakref.finalize(self, _remove, self._handles)

    def _clear(self) -> None:
        self._reached: dict[int, Factor] = {}
        """Weights of the forwards whose outputs the backward that is running has come to."""
        self._adds: bool | None = None
        """Whether the gradients of the backward that is running are added up; None before the first."""
        self._share: Share | None = None
        self._awaited: weakref.ref[Any] | None = None
        self._left = self._buckets[::-1]
        for bucket in self._buckets:
            bucket.clear()

    def fits(self, params: Sequence[Tensor]) -> bool:
        """Tell whether these are the parameters it was made for."""
        return len(params) == len(self.params) and all(map(lambda p, q: p is q, params, self.params))

    def watch(self, output: Any, weight: Factor) -> None:
        """Take note of a forward's output, and of how much its gradients count beside other ranks'."""
        if backward_id() == NO_BACKWARD:  # else it computes again what a checkpoint has left out
            self._clear()  # a backward may have ended midway
        self._num_forwards += 1
        self._last, self._group.last_forward = weight, weakref.ref(self)
        for bucket in self._buckets:
            bucket.note_grads()
        reach = partial(self._reach, self._num_forwards, weight)
        for _, leaf in tree.leaves(output, ""):
            for tensor in tree.tensors_in(leaf):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(reach)

    def _reach(self, forward: int, weight: Factor, _: Any) -> None:
        """Count a forward among those of the backward that is running."""
        if not self._reached:
            self._check_backward()
            self._expect_end()
        self._reached[forward] = weight
        self._group.reached_in = backward_id()

    def _expect_end(self) -> None:
        """Have the backward that is running come to its end; one that fails lets go of what it was to call."""
        end, me = self._end, weakref.proxy(self)
        self._awaited = weakref.ref(end, lambda _: me._clear())
        after_backward(end)

    def _check_backward(self) -> None:
        """Refuse a backward whose gradients of parameters nobody would add up."""
        try:
            takes_part = any(will_execute(node) for node in self._nodes)
        except RuntimeError:
            what = "torch.autograd.grad"
        else:
            if not (takes_part and torch.is_grad_enabled()):
                return
            what = "create_graph=True"
        raise CallError(
            f"DataParallel: gradients of parameters by {what} can't be added up over ranks. Call backward(), or run "
            f"in one process."
        )

    def begin(self, device: torch.device) -> None:
        """Find out, with the first gradient of a bucket, whether those of this backward are to be added up."""
        if self._adds is None:
            self._adds = self._begin(device)

    def _begin(self, device: torch.device) -> bool:
        if not self._reached:
            self._expect_end()
            is_other = self._group.last_forward is None or self._group.last_forward() is not self
            if is_other or self._group.reached_in == backward_id():
                return False  # another wrapper's forward, or a TrainStep's
        if self.is_held:
            return False
        # Parameters wait for all forwards that use them, so these have been reached by now.
        weights = [*self._held, *(self._reached.values() or [self._last])]
        self._held = []
        self._share = Share(self._group, weights, device)
        return True

    def complete(self, index: int) -> None:
        """Send a bucket that has all of its gradients, once those before it are sent."""
        if self._adds:
            self._buckets[index].check()
            while self._left and self._left[-1].is_complete:
                self._left.pop().send(self._group, self._share)

    @torch.no_grad()
    def _end(self) -> None:
        """Send what is left, wait for the sums, and give them to the parameters."""
        if self.is_held:
            self._held += self._reached.values()
        elif self._adds:
            self._send_left()
        self._clear()

    def _send_left(self) -> None:
        while self._left:
            self._left.pop().send(self._group, self._share)
        finish(self._buckets)

    @contextmanager
    def adding_up(self) -> Iterator[None]:
        """Add up the gradients of a backward within, which its caller has weighed."""
        self._clear()
        for bucket in self._buckets:
            bucket.note_grads()
        self._adds = True
        try:
            yield
            with torch.no_grad():
                self._send_left()
        finally:
            self._clear()

    def add_up(self) -> None:
        """Add up the gradients that are there; a parameter that only others have one of gets theirs."""
        self._clear()
        self._send_left()
        self._clear()


def _make_hook(gradients: RankGradients, index: int, bucket: "Bucket") -> Callable[[Tensor], None]:
    """Make the hook of a bucket's parameters: each backward calls it for each of them, so it does little."""
    taken, num = bucket.taken, len(bucket.params)

    def note(p: Tensor) -> None:
        if not taken:
            gradients.begin(p.device)
        taken.append(p)
        if len(taken) >= num:
            gradients.complete(index)

    note.is_of_ranks = True  # type: ignore[attr-defined]
    return note


class Share:
    """This rank's share in the mean: its weight by all ranks', on the device."""

    def __init__(self, group: Group, weights: Sequence[Factor], device: torch.device) -> None:
        counted = sum(w for w in weights if not isinstance(w, Tensor))
        self._own = torch.full((), counted, dtype=torch.float64, device=device)  # no copy from the host, which waits
        for w in weights:
            if isinstance(w, Tensor):
                self._own += comm.copy(w, device)
        self._may_be_zero = not counted
        self._is_zero: Tensor | None = None
        self._total = self._own.clone()
        self._wait: Callable[[], None] | None = group.all_reduce(self._total)
        self._value = self._own

    def value(self) -> Tensor:
        """Return it, shape (), once all ranks' weights are added up."""
        if self._wait is not None:
            self._wait()
            self._wait = None
            self._value = self._own / self._total
            self._is_zero = self._value == 0 if self._may_be_zero else None
        return self._value

    def scale_(self, grad: Tensor) -> None:
        """Multiply a gradient by the share; that of a rank without rows, whose mean is nan, becomes zero."""
        grad.mul_(self.value())
        if self._is_zero is not None:
            grad.masked_fill_(self._is_zero, 0)


class Bucket:
    """Gradients that travel together, before a flag for each parameter: whether it has one."""

    def __init__(self, params: Sequence[Tensor], plan: BucketPlan) -> None:
        self._plan = plan
        self.params = [params[slot.index] for slot in plan.slots]
        self._places = [(slot.shape, slot.strides, slot.start) for slot in plan.slots]
        self._places.append((torch.Size([len(plan.slots)]), (1,), plan.numel))
        self._all_there: Tensor | None = None
        self.taken: list[Tensor] = []
        """Parameters whose gradients the backward that is running has completed."""
        self.clear()

    def clear(self) -> None:
        self._is_new = False
        self.taken.clear()
        self._views: list[Tensor] = []
        self.flags: Tensor | None = None
        """Of the gradients that were sent, where one is missing or sparse."""
        self._wait: Callable[[], None] | None = None

    def note_grads(self) -> None:
        """Note whether backward will make the gradients, which nobody else can refer to then."""
        self._is_new = all(p.grad is None for p in self.params)

    @property
    def is_complete(self) -> bool:
        return len(self.taken) >= len(self.params)

    def check(self) -> None:
        """Refuse gradients that change after they are complete."""
        if not len(set(map(id, self.taken))) == len(self.taken) == len(self.params):
            raise CallError(
                "DataParallel: a parameter got its gradient twice in one backward, as by reentrant checkpoints, after "
                "it was sent to other ranks. Call torch.utils.checkpoint.checkpoint with use_reentrant=False."
            )

    def send(self, group: Group, share: Share | None = None) -> None:
        """Begin to add the gradients up, those of all ranks multiplied by their shares."""
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
            fill_views(self._views, list(map(_to_strided, grads)))
            self.flags = self._views[-1]
            self.flags.copy_(torch.tensor(list(map(_kind, grads))), non_blocking=True)
        if share is not None:
            share.scale_(whole[:numel])
        self._wait = group.all_reduce(whole)

    def wait(self) -> bool:
        """Wait for the sums; tell whether there are any."""
        if self._wait is not None:
            self._wait()
        return self._wait is not None

    def finish(self, kinds: Iterator[float]) -> None:
        """Give the sums to the parameters; one that no rank has a gradient for keeps what it had."""
        if self._is_new and self.flags is None:
            for p, view in zip(self.params, self._views):
                p.grad = view  # the gradient becomes a part of the bucket, as DDP's may
            return
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


def make_buckets(params: Sequence[Tensor], bucket_bytes: int) -> list[Bucket]:
    """Put parameters side by side, in the order in which backward usually finishes them."""
    return [
        Bucket(params, plan_bucket(params, members, 1, together=together, unit=_ALIGNED))
        for members, together in group_by_storage(params, range(len(params))[::-1], bucket_bytes)
    ]


def finish(buckets: Sequence[Bucket]) -> None:
    """Wait for the sums of those buckets that were sent, and give them to the parameters."""
    sent = [bucket for bucket in buckets if bucket.wait()]
    flags = [bucket.flags for bucket in sent if bucket.flags is not None]
    kinds = iter(torch.cat(flags).tolist() if flags else ())  # the host waits once
    for bucket in sent:
        bucket.finish(kinds)


def _kind(grad: Tensor | None) -> float:
    """Return the flag of a gradient; added up over ranks, it tells whether one has it, and whether it is sparse."""
    return 0.0 if grad is None else _STRIDED if grad.layout is torch.strided else _SPARSE


def _to_strided(grad: Tensor | None) -> Tensor | None:
    return grad if grad is None or grad.layout is torch.strided else grad.to_dense()


def check_hooks(named: Mapping[str, Tensor]) -> None:
    """Refuse parameters whose hooks would see this rank's gradient alone."""
    for name, p in named.items():
        later = p._post_accumulate_grad_hooks
        if p._backward_hooks or (later and not all(hasattr(hook, "is_of_ranks") for hook in later.values())):
            raise CallError(
                f"DataParallel: a hook on parameter {name} would see the gradient of this rank's rows alone. Change "
                f"gradients after backward(), when they are those of all ranks, or remove the hook."
            )


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


class RankModel:
    """Keeps a model, and its gradients, equal on all ranks.

    Args:
        group: The ranks.
        dim: Where the rows of the batch are.
        num_devices: Of this rank.
        bucket_cap_mb: Size at which a bucket of gradients is closed, in MiB; None for the default.
        weight: Called with a batch, returns how much it counts beside other ranks'; its rows when left out.
        before: What was made for the same module before its options changed; backwards may still come to it.
    """

    def __init__(
        self,
        group: Group,
        dim: int,
        num_devices: int,
        bucket_cap_mb: float | None,
        weight: Weight | None,
        before: "RankModel | None" = None,
    ) -> None:
        self.group = group
        self._dim = dim
        self._num_devices = num_devices
        self._bucket_bytes = replica_bucket_bytes(bucket_cap_mb)
        self._weight = weight
        self._gradients: RankGradients | None = None if before is None else before._gradients
        self._is_held: bool = before is not None and before._is_held
        self._is_apart = False
        self._tree: ModuleTree | None = None
        self._alike: list[Tensor] = [] if before is None else before._alike
        """Parameters that had rank 0's values once."""

    def forward(self, function: Callable[..., Any], module: nn.Module, inputs: Any, kwargs: Any) -> Any:
        """Return a forward's output; layers compute over all ranks' batches, and gradients will be added up."""
        if self._is_apart:
            return function()
        if not torch.is_grad_enabled():
            with forward_of(SpreadBatch(self.group, 1.0)):
                return function()
        self.group.first_batch.compare(self.group, (inputs, kwargs))
        self.copy_buffers(module)
        weight = weigh_batch(
            self._weight,
            "DataParallel",
            inputs,
            kwargs,
            module=module,
            dim=self._dim,
            num_devices=self._num_devices,
        )
        weighed = self._begin_weighing(weight)
        with forward_of(SpreadBatch(self.group, self._later_weight(weight))):
            output = function()
        return weighed(output)

    def _later_weight(self, weight: float | Tensor) -> float | Tensor:
        """Return what gradients will be multiplied by after backward, beside other ranks'."""
        return weight

    def _begin_weighing(self, weight: float | Tensor) -> Callable[[Any], Any]:
        """Return what is called with a forward's output, and returns what gradients will come through."""
        gradients = self._current_gradients()

        def watch(output: Any) -> Any:
            gradients.watch(output, weight)
            return output

        return watch

    def _current_gradients(self) -> RankGradients:
        named = {name: p for name, p in self._params.items() if p.requires_grad}
        check_hooks(named)
        params = list(named.values())
        if self._gradients is None or not self._gradients.fits(params):
            self._gradients = RankGradients(self.group, params, self._bucket_bytes)
            self._gradients.is_held = self._is_held
        return self._gradients

    def copy_buffers(self, module: nn.Module) -> None:
        """Have all ranks begin with rank 0's buffers, in training: those that will be saved."""
        self.look_at(module)
        if module.training:
            copy_from_first(self.group, self._buffers)

    def look_at(self, module: nn.Module, *, is_wrapped_now: bool = False) -> None:
        """Find the module's tensors anew where others have taken their places; all ranks start with rank 0's.

        A copy of a wrapper starts when it is trained: one rank may evaluate it alone.
        """
        if self._tree is None or self._tree.modules[0] is not module or not self._tree.is_same():
            self._tree = ModuleTree(module)
            self._params, self._buffers = dict(module.named_parameters()), list(module.buffers())
            alike = set(map(id, self._alike))
            self._alike = [p for p in self._params.values() if id(p) in alike]
        has_new = len(self._alike) < len(self._params)
        if is_wrapped_now or (has_new and (self._alike or module.training)):
            copy_from_first(self.group, check_alike(self.group, module))
            self._alike = list(self._params.values())

    @contextlib.contextmanager
    def apart(self, module: nn.Module) -> Iterator[None]:
        """Leave gradients and buffers to the caller within, which weighs them by itself."""
        self._stand_aside(module)
        before, self._is_apart = self._is_apart, True
        try:
            with forward_of(SpreadBatch(self.group, 1.0)):
                yield
        finally:
            self._is_apart = before

    def _stand_aside(self, module: nn.Module) -> None:
        """Add up no gradients of the next backward."""
        self._gradients = None
        if torch.is_grad_enabled():
            self.look_at(module)
            check_hooks(self._params)
            self.group.last_forward = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of backwards within to the first one after it."""
        before = self._is_held
        self._hold(True)
        try:
            yield
        finally:
            self._hold(before)

    def _hold(self, is_held: bool) -> None:
        self._is_held = is_held
        if self._gradients is not None:
            self._gradients.is_held = is_held


def own_devices(group: Group | None) -> Sequence[int | str] | None:
    """Return the devices of a rank that names none: its own, unless it is the only one of its machine."""
    if group is None or group.local_size == 1:
        return None
    return [group.local_rank] if torch.cuda.is_available() else ["cpu"]
