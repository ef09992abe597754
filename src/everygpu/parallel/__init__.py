"""The way of a batch: scatter → replicate → apply → gather, and gradients back."""

from everygpu.parallel.data_parallel import DataParallel as DataParallel
from everygpu.parallel.data_parallel import data_parallel as data_parallel
from everygpu.parallel.engines.threads import parallel_apply as parallel_apply
from everygpu.parallel.gather import gather as gather
from everygpu.parallel.replicas.replica_set import replicate as replicate
from everygpu.parallel.scatter.batch_types import Rows as Rows
from everygpu.parallel.scatter.batch_types import register_batch as register_batch
from everygpu.parallel.scatter.scatter import scatter as scatter
from everygpu.parallel.scatter.split import Replicated as Replicated
from everygpu.parallel.sharded.batch import ShardedBatch as ShardedBatch
