"""The way of a batch: scatter → replicate → apply → gather, and gradients back."""

from everygpu.parallel.apply import parallel_apply as parallel_apply
from everygpu.parallel.data_parallel import DataParallel as DataParallel
from everygpu.parallel.data_parallel import data_parallel as data_parallel
from everygpu.parallel.gather import gather as gather
from everygpu.parallel.replicate import replicate as replicate
from everygpu.parallel.scatter import scatter as scatter
from everygpu.parallel.sharded_batch import ShardedBatch as ShardedBatch
from everygpu.parallel.split import Replicated as Replicated
