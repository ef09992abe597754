"""A tensor whose rows stay on the devices that computed them.

The class and its rules need each other: importing any module of this package binds the rules to the class here,
as DTensor registers its operators' strategies.
"""

from everygpu.parallel.sharded.batch import Dispatch, ShardedBatch
from everygpu.parallel.sharded.fallback import run_joined
from everygpu.parallel.sharded.functions import function_for
from everygpu.parallel.sharded.ops import RULES

ShardedBatch._dispatch = Dispatch(function_for=function_for, rules=RULES, run_joined=run_joined)
