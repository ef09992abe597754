"""A tensor whose rows stay on the devices that computed them.

The rules need the class, and the class runs the rules. This module binds the rules to the class, as DTensor
registers its operators' strategies; importing any module of the package runs it first.
"""

from everygpu.parallel.sharded.batch import ShardedBatch
from everygpu.parallel.sharded.dispatch import Dispatch
from everygpu.parallel.sharded.functions import function_for
from everygpu.parallel.sharded.rules import RULES, RuleTable, run_joined
from everygpu.parallel.sharded.views import VIEWS

ShardedBatch._dispatch = Dispatch(function_for=function_for, rules=RuleTable(RULES | VIEWS), run_joined=run_joined)
