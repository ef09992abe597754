"""Gradients that are added up over ranks while backward goes on."""

import contextlib
import operator
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from everygpu import tree
from everygpu.parallel.buckets.grouping import group_by_storage
from everygpu.parallel.buckets.plan import BucketPlan, plan_bucket
from everygpu.parallel.transforms import check_unbatched
from everygpu.ranks.claims import Claim
from everygpu.ranks.group import Group
from everygpu.ranks.sum import Sum
from everygpu.torch_private.autograd import NO_BACKWARD, after_backward, backward_id, will_execute


class RankGradients:
    """Has every backward give parameters the mean of all ranks' gradients, weighed by their rows.

    ``backward()`` adds bucket by bucket up beside what it still computes; ``torch.autograd.grad`` and
    ``create_graph=True`` tensor by tensor, as a part of the graph.

    Args:
        group: The ranks.
        params: Those that take gradients.
        bucket_bytes: Size at which a bucket is closed.
    Source:
        ``DistributedDataParallel``'s reducer, which leaves ``torch.autograd.grad`` and ``create_graph=True`` alone,
        weighs all ranks alike, and takes no parameter that gets no gradient.
    """

    def __init__(self, group: Group, params: Sequence[Tensor], bucket_bytes: int) -> None:
        self._group = group
        self.params = list(params)
        backwards = range(len(params))[::-1]  # as backward finishes them
        self._buckets = [
            _Bucket(params, plan_bucket(params, members, 1, together=together, unit=1))
            for members, together in group_by_storage(params, backwards, bucket_bytes)
        ]
        self._bucket_of = {id(params[slot.index]): bucket for bucket in self._buckets for slot in bucket.plan.slots}
        self._weights: list[float | Tensor] = []
        self._is_weight_used = True
        self._claim = Claim()
        self._num_forwards = 0
        self._reached: dict[int, float | Tensor] = {}
        """Weights of the forwards whose outputs the backward that is running has come to."""
        self._factor: _Factor | None = None
        self._num_sent = 0
        self._handles: list[RemovableHandle] = []
        me = weakref.proxy(self)  # parameters outlive this
        for p in self.params:
            before = partial(_call_before, me, p, get_gradient_edge(p).node)
            before.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch.save leaves it out unsaid
            self._handles.append(p.register_hook(before))  # type: ignore[no-untyped-call]
            self._handles.append(p.register_post_accumulate_grad_hook(partial(_call_after, me)))  # type: ignore[no-untyped-call]
        weakref.finalize(self, _remove, self._handles)

    def fits(self, params: Sequence[Tensor]) -> bool:
        """Tell whether these are the parameters it was made for."""
        return len(params) == len(self.params) and all(map(operator.is_, params, self.params))

    def weigh(self, weight: float | Tensor) -> None:
        """Take note of a forward: how much its gradients count beside other ranks'."""
        self._group.claims.take(self._claim, self.params)
        if backward_id() == NO_BACKWARD:  # else it computes again what a checkpoint has left out
            self._reached.clear()
            if self._factor is not None:
                self._finish(is_failed=True)
        if self._is_weight_used:
            self._weights, self._is_weight_used = [], False
        self._weights.append(weight)

    def watch(self, output: Any) -> None:
        """Take note of the last forward's output: a backward that doesn't come to it isn't weighed by its rows."""
        self._num_forwards += 1
        reach = partial(_call_reach, weakref.proxy(self), self._num_forwards, self._weights[-1])
        for _, leaf in tree.leaves(output, ""):
            for tensor in tree.tensors_in(leaf):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(reach)

    def reach(self, forward: int, weight: float | Tensor) -> None:
        """Count a forward among those of the backward that is running."""
        if not self._reached:
            after_backward(self._reached.clear)
        self._reached[forward] = weight

    def close(self) -> None:
        """Leave gradients alone from now on."""
        _remove(self._handles)

    def before(self, p: Tensor, node: Node, grad: Tensor | None) -> Tensor | None:
        """Set aside what the parameter has of earlier backwards; where ``backward`` won't write it, add up at once."""
        if id(p) in self._claim.lost:
            return None
        if grad is None:  # a Function that has the parameter among its inputs gives it none
            return None
        if torch.is_grad_enabled() or grad.layout is not torch.strided or not _will_accumulate(node):
            total: Tensor = _Total.apply(grad, self._begun(grad.device), self._group)  # type: ignore[no-untyped-call]
            return total
        self._bucket_of[id(p)].set_aside(p)
        return None

    def after(self, p: Tensor) -> None:
        """Take a gradient that is complete; send buckets that are, in the order that all ranks have."""
        bucket = self._bucket_of[id(p)]
        if id(p) not in self._claim.lost and bucket.take(p):
            factor = self._begun(p.device)
            while self._num_sent < len(self._buckets) and self._buckets[self._num_sent].is_complete:
                self._send_next(factor)

    def _begun(self, device: torch.device) -> "_Factor":
        """Begin to add up the ranks' weights, once in a backward."""
        if self._factor is None:
            self._is_weight_used = True
            # Parameters wait for all forwards that use them, so these have been reached by now.
            weights = list(self._reached.values()) or self._weights
            self._factor = _Factor(self._group, weights, device)
            after_backward(self._finish)
        return self._factor

    def _send_next(self, factor: "_Factor") -> None:
        self._buckets[self._num_sent].send(self._group, factor)
        self._num_sent += 1

    @torch.no_grad()
    def _finish(self, *, is_failed: bool = False) -> None:
        """Wait for the sums, and give parameters what they had before and them."""
        try:
            if is_failed:  # a backward has ended midway
                for bucket in self._buckets:
                    bucket.put_back()
            elif self._factor is not None and any(bucket.has_some for bucket in self._buckets):
                while self._num_sent < len(self._buckets):
                    self._send_next(self._factor)
                for bucket in self._buckets:
                    bucket.finish()
        finally:
            self._factor, self._num_sent = None, 0
            for bucket in self._buckets:
                bucket.clear()


class _Factor:
    """This rank's share in the mean: its weight by all ranks'."""

    def __init__(self, group: Group, weights: Sequence[float | Tensor], device: torch.device) -> None:
        parts = [torch.as_tensor(w, dtype=torch.float64, device=device) for w in weights or [1.0]]
        self._may_be_zero = any(isinstance(w, Tensor) for w in weights) or (bool(weights) and not any(weights))
        self._own = torch.stack(parts).sum()
        self._total = self._own.clone()
        self._work: Sum | None = group.all_reduce(self._total)
        self._share = self._own

    def scale_(self, grad: Tensor) -> None:
        """Multiply a gradient by the share; that of a rank without rows, whose mean is nan, becomes zero."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._share = self._own / self._total
        grad.mul_(self._share)
        if self._may_be_zero:
            grad.masked_fill_(self._share == 0, 0)


class _Bucket:
    """Gradients that travel together, before a flag for each parameter: whether it has one."""

    def __init__(self, params: Sequence[Tensor], plan: BucketPlan) -> None:
        self.plan = plan
        self._params = {slot.index: params[slot.index] for slot in plan.slots}
        self._index = {id(p): i for i, p in self._params.items()}
        self.clear()

    def clear(self) -> None:
        self._kept: dict[int, Tensor | None] = {}
        self._grads: dict[int, Tensor | None] = {}
        self._sent: tuple[Tensor, Sum] | None = None

    @property
    def has_some(self) -> bool:
        return bool(self._grads)

    @property
    def is_complete(self) -> bool:
        return len(self._grads) == len(self._params)

    def set_aside(self, p: Tensor) -> None:
        index = self._index[id(p)]
        if index not in self._kept:
            self._kept[index], p.grad = p.grad, None

    def put_back(self) -> None:
        for index, kept in self._kept.items():
            self._params[index].grad = kept

    def take(self, p: Tensor) -> bool:
        """Take a gradient; False where it was added up already."""
        index = self._index[id(p)]
        if index in self._kept:
            self._grads[index] = p.grad
        return index in self._kept

    def send(self, group: Group, factor: _Factor) -> None:
        device, slots = next(iter(self._params.values())).device, self.plan.slots
        make = torch.zeros if self.plan.has_gaps else torch.empty
        whole = make(self.plan.numel + len(slots), dtype=self.plan.dtype, device=device)
        flat, flags = whole[: self.plan.numel], whole[self.plan.numel :]
        self.plan.fill(flat, self._grads)
        factor.scale_(flat)
        if self.is_complete:
            flags.fill_(1)
        else:
            flags.copy_(torch.tensor([slot.index in self._grads for slot in slots]))
        self._sent = whole, group.all_reduce(whole)

    def finish(self) -> None:
        """Write the gradients; a parameter that no rank has one for keeps what it had."""
        if self._sent is None:
            return
        whole, work = self._sent
        work.wait()
        flat, flags = whole[: self.plan.numel], whole[self.plan.numel :]
        present = [True] * len(flags) if self.is_complete else flags.tolist()
        for slot, view, is_there in zip(self.plan.slots, self.plan.views(flat), present):
            p = self._params[slot.index]
            kept = self._kept.get(slot.index, p.grad)
            if is_there:
                p.grad = view if kept is None else kept.add_(view)
            else:
                p.grad = kept


class _Total(torch.autograd.Function):
    """The mean over ranks, which can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, factor: _Factor, group: Group) -> Tensor:
        ctx.factor, ctx.group = factor, group
        return _add_up(grad, factor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # What all ranks' losses say of the mean, each weighed, is what this rank's gradient is in it.
        return _Total.apply(grad, ctx.factor, ctx.group), None, None  # type: ignore[no-untyped-call]


def _add_up(grad: Tensor, factor: _Factor, group: Group) -> Tensor:
    check_unbatched([grad])
    is_sparse = grad.layout is not torch.strided
    total = grad.to_dense() if is_sparse else grad.clone(memory_format=torch.contiguous_format)
    factor.scale_(total)
    group.all_reduce(total).wait()
    return total.to_sparse(grad.sparse_dim()) if is_sparse else total


def _will_accumulate(node: Node) -> bool:
    """Tell whether the backward that is running writes a leaf's gradient, instead of returning it."""
    try:
        return will_execute(node)
    except RuntimeError:  # torch.autograd.grad
        return False


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _call_before(gradients: RankGradients, p: Tensor, node: Node, grad: Tensor | None) -> Tensor | None:
    return gradients.before(p, node, grad)


def _call_after(gradients: RankGradients, p: Tensor) -> None:
    gradients.after(p)


def _call_reach(gradients: RankGradients, forward: int, weight: float | Tensor, _: Any) -> None:
    with contextlib.suppress(ReferenceError):  # made anew since, for other parameters
        gradients.reach(forward, weight)
