"""The call of all replicas that is recorded."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from everygpu.keys import compiled_original
from everygpu.parallel.cuda_graphs.deferred_linear import DeferredLinears
from everygpu.parallel.cuda_graphs.deferred_tensor import refusals_heeded
from everygpu.parallel.cuda_graphs.launch import Leaves, RecordedPass
from everygpu.parallel.cuda_graphs.static_batch import StaticBatch
from everygpu.parallel.cuda_graphs.transfer.parameter_sync import ParameterSync
from everygpu.parallel.engines.engine import Outputs, RunOn
from everygpu.parallel.replicas.replica_set import ReplicaSet
from everygpu.parallel.replicas.substitution import in_place_of
from everygpu.torch_private.modes import with_torch_function


class ReplicaCall:
    """Calls replicas on a recording's batch, with leaves in place of the parameters.

    Args:
        module: Gives the module to run now.
        run: Runs replicas on a call's arguments.
    """

    def __init__(self, module: Callable[[], nn.Module], run: RunOn) -> None:
        self._module = module
        self._run = run
        self.has_deferred = False
        """Whether the last call left products out."""

    def run(
        self,
        replicas: ReplicaSet,
        batch: StaticBatch,
        sync: ParameterSync,
        leaves: Leaves,
        homes: Sequence[Sequence[Tensor]],
        *,
        may_defer: bool,
    ) -> Outputs:
        """Run the replicas.

        Args:
            replicas: With twins of the parameters.
            batch: What they are called with.
            sync: Knows the parameters.
            leaves: What stands in place of those on the first device.
            homes: Where these were made; see ``Rewind``.
            may_defer: Leave the last products out where that pays.
        """
        args, kwargs, _ = batch.read()
        at_home = {id(p): t for b, row in zip(sync.groups, leaves) for p, t in zip(b.originals, row[0])}
        for group, row, home in zip(sync.groups, leaves, homes):
            group.put_back(row, home)
        with in_place_of(self._module(), at_home):
            return self._run_on(replicas, args, kwargs, may_defer=may_defer)

    def run_again(self, replicas: ReplicaSet, recorded: RecordedPass) -> list[Any]:
        """Run the replicas that were recorded; return what they returned."""
        where = recorded.sync, recorded.leaves, recorded.rewind.homes
        with with_torch_function():
            return self.run(replicas, recorded.batch, *where, may_defer=recorded.has_deferred)[0]

    def run_connected(self, replicas: ReplicaSet, recorded: RecordedPass) -> list[Any]:
        """Run replicas whose parameters are connected to the module's."""
        args, kwargs, _ = recorded.batch.read()
        with with_torch_function():  # which a ShardedBatch's own functions, such as a backward's, are without
            return self._run_on(replicas, args, kwargs, may_defer=recorded.has_deferred)[0]

    def _run_on(
        self, replicas: ReplicaSet, args: tuple[Any, ...], kwargs: dict[str, Any], *, may_defer: bool
    ) -> Outputs:
        self.has_deferred = False
        if not may_defer:
            return self._run(replicas, args, kwargs, around=nullcontext)
        deferred = DeferredLinears()
        try:
            with refusals_heeded():
                outputs, joiner = self._run(replicas, args, kwargs, around=partial(self._deferring, deferred))
        finally:
            self.has_deferred = deferred.were_any
        outputs = deferred.take(outputs)
        deferred.check()
        return outputs, joiner

    def _deferring(self, deferred: DeferredLinears, replicas: Sequence[nn.Module]) -> AbstractContextManager[None]:
        return deferred.watched(replicas, are_compiled=compiled_original(self._module()) is not None)
