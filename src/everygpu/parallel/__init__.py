"""The way of a batch: scatter → replicate → apply → gather, and gradients back."""

from everygpu.parallel.data_parallel import DataParallel, data_parallel
from everygpu.parallel.engines.threads import parallel_apply
from everygpu.parallel.gather import gather
from everygpu.parallel.replicas.replica_set import replicate
from everygpu.parallel.scatter.batch_types import Rows, register_batch
from everygpu.parallel.scatter.scatter import scatter
from everygpu.parallel.scatter.split import Replicated
from everygpu.parallel.sharded.batch import ShardedBatch

__all__ = [
    "DataParallel",
    "Replicated",
    "Rows",
    "ShardedBatch",
    "data_parallel",
    "gather",
    "parallel_apply",
    "register_batch",
    "replicate",
    "scatter",
]
