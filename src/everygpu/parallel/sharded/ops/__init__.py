"""Rules for torch's operations on the parts of a ``ShardedBatch``, by family.

A rule returns exactly what the operation returns on the joined tensor, or NotImplemented; then the operation runs on
the joined tensor. Returning NotImplemented is always correct.
"""

from everygpu.parallel.sharded.ops.concat import CONCAT
from everygpu.parallel.sharded.ops.losses import LOSSES
from everygpu.parallel.sharded.ops.matmul import MATMUL
from everygpu.parallel.sharded.ops.pointwise import POINTWISE
from everygpu.parallel.sharded.ops.reductions import REDUCTIONS
from everygpu.parallel.sharded.ops.views import VIEWS

RULES = {**POINTWISE, **REDUCTIONS, **MATMUL, **CONCAT, **VIEWS, **LOSSES}
"""From each operation that runs on the parts to its rule."""
