"""Inputs that are on the replicas' devices already, from an earlier call or the Feeder: reuse their shards."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from everygpu import tree
from everygpu.parallel.buckets.copies import keep_requires_grad
from everygpu.parallel.buckets.memory import version_of
from everygpu.parallel.sharded.batch import ShardedBatch, has_shards


def reuse_shards(
    x: ShardedBatch, devices: Sequence[torch.device], rows: Sequence[int], dim: int
) -> list[Tensor] | None:
    """Return the shards of a batch that is split as the call is.

    Args:
        x: Shape (..., rows, ...).
        devices: One per replica that runs.
        rows: Rows per replica that runs.
        dim: The dimension of the rows.
    Returns:
        The shards themselves, so that a replica that writes into its input writes into the batch, as on one
        device. Copies on the same devices where a graph, a view or the joined tensor may read that memory. None
        when the batch is split in another way.
    """
    layout = x._layout
    is_fit = layout.devices == tuple(devices) and layout.sizes == tuple(rows) and x.shard_dim == dim % x.ndim
    if not is_fit or not has_shards(x):
        return None
    if x.requires_grad or x._memory.is_viewed or x._joined.is_view or x._joined.tensor is not None:
        with keep_requires_grad(x):
            return [s.clone() for s in x.shards]
    x._reused_versions = _versions(x)
    return [p.detach() for p in x._parts]


def note_writes(inputs: Any) -> None:
    """Increment the version of batches that replicas wrote through reused shards.

    A graph that saved the batch then raises torch's usual error instead of computing a wrong gradient.
    """
    for _, leaf in tree.leaves(inputs, ""):
        if isinstance(leaf, ShardedBatch) and leaf._reused_versions not in (None, _versions(leaf)):
            leaf._reused_versions = None
            increment_version(leaf)


def _versions(x: ShardedBatch) -> tuple[int, ...]:
    return tuple(map(version_of, x._parts))
