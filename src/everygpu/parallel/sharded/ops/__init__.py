"""Rules for torch's operations on the parts of a ``ShardedBatch``, by family.

A rule gives exactly what the operation would give on the joined tensor, or declines by returning
NotImplemented; then the joined tensor answers. Declining is always right.
"""

from everygpu.parallel.sharded.ops.concat import CONCAT
from everygpu.parallel.sharded.ops.losses import LOSSES
from everygpu.parallel.sharded.ops.matmul import MATMUL
from everygpu.parallel.sharded.ops.pointwise import POINTWISE
from everygpu.parallel.sharded.ops.reductions import REDUCTIONS
from everygpu.parallel.sharded.ops.views import VIEWS

RULES = {**POINTWISE, **REDUCTIONS, **MATMUL, **CONCAT, **VIEWS, **LOSSES}
"""Which operations run on the parts, and how."""
