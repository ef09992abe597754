"""Trained parameters that are connected to their copies bucket by bucket, where that is enough.

Replicas in threads are connected parameter by parameter. In helpers only a bucket's gradients matter as a whole: one
node of autograd for each bucket takes the place of two for each parameter and replica.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everygpu import comm
from everygpu.parallel.buckets.copies import sum_on
from everygpu.parallel.buckets.fixed_bucket import FixedBucket
from everygpu.parallel.buckets.grouping import group_by_storage
from everygpu.parallel.buckets.memory import versions_of
from everygpu.parallel.buckets.plan import BucketPlan
from everygpu.parallel.buckets.sizes import helper_bucket_bytes
from everygpu.parallel.buckets.slot_alias import make_twins
from everygpu.parallel.engines.processes.remote_call import RemoteCall
from everygpu.parallel.replicas.module_tree import has_hooks, is_dense
from everygpu.parallel.replicas.replica_set import Leaves, ReplicaSet


def is_direct(module: nn.Module) -> bool:
    """Tell whether all that is trained can be connected so: dense parameters, and no hook is to see each gradient."""
    trained, buffers = [p for p in module.parameters() if p.requires_grad], list(module.buffers())
    tensors = [*trained, *buffers]
    is_plain = all(map(is_dense, tensors)) and not any(has_hooks(t) for t in tensors)
    return bool(trained) and is_plain and not any(b.requires_grad for b in buffers)


class DirectParameters:
    """A module's trained parameters, and the copies that helpers compute with.

    Args:
        module: One for which ``is_direct`` holds.
        devices: One per replica.
        make_replicas: Makes replicas whose trained parameters are the copies.
        bucket_cap_mb: Size at which a bucket is closed, in MiB; None for the default.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        make_replicas: Callable[[Callable[[], Leaves]], ReplicaSet],
        bucket_cap_mb: float | None,
    ) -> None:
        self._module = module
        trained: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        self._device, others = devices[0], list(devices[1:])
        self._buckets: list[FixedBucket] = []
        self._twins: list[list[list[Tensor]]] = []  # by bucket and replica
        for members, together in group_by_storage(
            trained, range(len(trained)), helper_bucket_bytes(trained, bucket_cap_mb)
        ):
            params = [trained[i] for i in members]
            bucket = FixedBucket(params, self._device, others, keep_storage=together)
            self._buckets.append(bucket)
            self._twins.append([make_twins(params, slots) for slots in bucket.slots])
        self.replicas = make_replicas(self._leaves)

    def fits(self, module: nn.Module) -> bool:
        """Tell whether the module has the tensors it had, as they were."""
        return module is self._module and self.replicas.is_same()

    def begin(self) -> "DirectCalls":
        """Send the parameters for a call of all replicas."""
        self.replicas.forget()  # frozen parameters, too, as they may have been written through ``.data``
        for bucket in self._buckets:
            bucket.send()
        return DirectCalls(self, self._buckets)

    def twins(self, position: int) -> list[tuple[list[Tensor], BucketPlan]]:
        """Return a replica's copies, by bucket, and how their gradients lie in it."""
        return [(rows[position - 1], bucket.grad_plan) for rows, bucket in zip(self._twins, self._buckets)]

    def originals(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the originals that are behind copies, by the copies' ``id``."""
        ids = set(map(id, tensors))
        pairs = (
            (twin, p)
            for bucket, rows in zip(self._buckets, self._twins)
            for row in rows
            for twin, p in zip(row, bucket.originals)
        )
        return {id(twin): p for twin, p in pairs if id(twin) in ids}

    def _leaves(self) -> Leaves:
        return {
            id(p): [row[i] for row in rows]
            for bucket, rows in zip(self._buckets, self._twins)
            for i, p in enumerate(bucket.originals)
        }


class DirectCalls:
    """One forward of all helpers, as far as parameters are concerned.

    Args:
        parameters: Those it is connected to.
        buckets: Which have just been sent.
    """

    def __init__(self, parameters: DirectParameters, buckets: Sequence[FixedBucket]) -> None:
        self.parameters = parameters
        self._buckets = buckets
        self.anchors: list[Tensor] = []
        """For each bucket what outputs are connected to; none while autograd is off."""
        self.calls: list[weakref.ref[RemoteCall]] = []
        """Those whose outputs take gradients: they live as long as these."""
        self._versions = [bucket.versions for bucket in buckets]

    def connect(self, device: torch.device) -> None:
        """Make what outputs are connected to, unless autograd is off: before the first replica runs in this process.

        Autograd runs what was made last first, so that the first replica's backward doesn't wait for gradients.

        Args:
            device: Of the parameters.
        """
        if torch.is_grad_enabled():
            for k, bucket in enumerate(self._buckets):
                self.anchors.append(_Parameters.apply(self, k, device, *bucket.originals))  # type: ignore[no-untyped-call]

    def sum_bucket(self, bucket: int, device: torch.device) -> Sequence[Tensor | None]:
        """Add up what the helpers have sent ahead of a bucket's gradients."""
        plan = self._buckets[bucket].grad_plan
        calls = [call for ref in self.calls if (call := ref()) is not None]
        found = [arrived for call in calls if (arrived := call.arrived.pop(bucket, None)) is not None]
        if torch.is_grad_enabled():
            columns = [[g for g in column if g is not None] for column in zip(*(arrived.grads for arrived in found))]
            return [sum_on(column, device) if column else None for column in columns] or [None] * len(plan.slots)
        grads: list[Tensor | None] = [None] * len(plan.slots)
        flats = [comm.received(*arrived.copied) for arrived in found if arrived.copied is not None]
        if flats:
            total, present = comm.reduce(flats, device), map(any, zip(*(a.present for a in found if a.copied)))
            grads = [view if is_there else None for view, is_there in zip(plan.views(total), present)]
        for k, sparse in ((k, g) for arrived in found for k, g in arrived.sparse.items()):
            before = grads[k]
            grads[k] = sparse if before is None else sum_on([before, sparse], device)
        return grads

    def connected(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of a replica, with copies that are connected to the originals in place of those that aren't.

        Raises:
            RuntimeError: the originals have been written since the call.
        """
        originals = self.parameters.originals(tensors)
        if originals and [versions_of(bucket.originals) for bucket in self._buckets] != self._versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                "create_graph=True after the optimizer's step."
            )
        # Views, as torch warns of gradients that a node on another device gives to a leaf.
        return [comm.copy(p.view_as(p), t.device) if (p := originals.get(id(t))) is not None else t for t in tensors]


class _Parameters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, calls: DirectCalls, bucket: int, device: torch.device, *parameters: Tensor) -> Tensor:
        ctx.calls, ctx.bucket, ctx.device = calls, bucket, device
        return torch.empty(0, device=device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        return (None, None, None, *ctx.calls.sum_bucket(ctx.bucket, ctx.device))
