"""The four verbs of ``torch.nn.DataParallel``, as methods to call and to override, and calls that run by them."""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from everygpu.devices.parse import DeviceLike, parse_target
from everygpu.devices.seed import spread_seeds
from everygpu.errors import CallError, OptionError
from everygpu.parallel.compiler.eval_frame import not_compiled
from everygpu.parallel.drop_in import DropIn
from everygpu.parallel.engines.engine import Engine
from everygpu.parallel.engines.thread_state import fresh_casts
from everygpu.parallel.engines.threads import Workers, parallel_apply
from everygpu.parallel.forward_lock import ForwardLock
from everygpu.parallel.gather import Joiner, gather_outputs
from everygpu.parallel.ranks.model import RankModel
from everygpu.parallel.replicas.replica_set import ReplicaSet
from everygpu.parallel.scatter.counts import ReplicaOutputs, ScatteredArgs, counted_rows, rows_of, weights_of
from everygpu.parallel.scatter.reuse import note_writes
from everygpu.parallel.scatter.scatter import scatter_call
from everygpu.parallel.scatter.split import Split

VERBS = ("scatter", "replicate", "parallel_apply", "gather")

logger = logging.getLogger("everygpu")


class Verbs(DropIn):
    """Gives a wrapper the four verbs. A subclass sets what is annotated here, and runs forwards by ``_run_verbs`` where
    one of the four is overridden.
    """

    dim: int
    split: Split
    gather_rule: str
    buffers_rule: str
    _engine: Engine
    _threads: Workers
    _has_told: bool
    """Whether a log line says that replicas run in threads."""
    _lock: ForwardLock
    _ranks: RankModel | None
    _replicas: ReplicaSet | None
    _fresh: set[int] | None
    """Within ``frozen``: the replicas that are up to date."""
    _has_overrides: bool
    _outside: tuple[int, ReplicaSet] | None
    """The thread that replicates outside of forward, and its replicas."""

    if TYPE_CHECKING:

        def make_replicas(self) -> ReplicaSet: ...
        def _forward_alone(self, inputs: Any, kwargs: Any, name: str | None) -> Any: ...
        def _one_at_a_time(self, function: Any) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "gather" and isinstance(value, str):
            raise OptionError(
                f"DataParallel: gather must be a method, as torch.nn.DataParallel's, got {value!r}. Set gather_rule."
            )
        super().__setattr__(name, value)
        self._follow_override(name)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._follow_override(name)

    def _follow_override(self, name: str) -> None:
        if name in VERBS and "_lock" in vars(self):
            self.release()

    # The four verbs.

    def scatter(self, inputs: Any, kwargs: Mapping[str, Any] | None, device_ids: Sequence[DeviceLike]) -> Any:
        """Cut a call's arguments into one share per replica, each on its device.

        Args:
            inputs: Positional arguments; a tuple.
            kwargs: Keyword arguments, if there are any.
            device_ids: Devices, as ints, names or ``torch.device``; -1 is the CPU.
        Returns:
            Positional arguments of each replica that runs, and their keyword arguments.
        Raises:
            SplitError: the arguments can't be cut.
        Source:
            ``torch.nn.DataParallel.scatter``.
        """
        devices = [parse_target(device) for device in device_ids]
        is_call = type(inputs) is tuple
        fits = isinstance(self.split, str) or len(self.split) == len(devices)
        split = self.split if fits else "chunk"
        shards = scatter_call(inputs if is_call else (inputs,), kwargs or {}, devices, self.dim, split)
        args = ScatteredArgs(s.args if is_call else s.args[0] for s in shards)
        own = self._positions_of(devices) or range(len(devices))
        args.positions = tuple(own[s.position] for s in shards)
        args.rows, args.weights, args.counted = rows_of(shards), weights_of(shards), counted_rows(shards)
        return args, tuple(s.kwargs for s in shards)

    def replicate(self, module: nn.Module, device_ids: Sequence[DeviceLike]) -> list[nn.Module]:
        """Bring replicas of a module up to date, and return one per device; the first is the module itself.

        Args:
            module: To be replicated.
            device_ids: Devices, as for ``scatter``.
        Source:
            ``torch.nn.DataParallel.replicate``. Replicas of the wrapped module persist.
        """
        devices = [parse_target(device) for device in device_ids]
        positions = self._positions_of(devices)
        if positions is None or module is not self.module:
            return ReplicaSet(module, devices).refresh(range(len(devices)))
        return self._replicas_here().refresh(positions, self._fresh if self._lock.is_inside() else None)

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Call each replica with its arguments, all at once.

        Args:
            replicas: One per call; modules, or their methods.
            inputs: Positional arguments of each: a tuple or a list; anything else is the only one.
            kwargs: Keyword arguments of each, if there are any.
        Returns:
            What each replica returned.
        Raises:
            OptionError: there are not as many arguments as replicas.
            Exception: what a replica raised; its ``__cause__`` names the replica.
        Source:
            ``torch.nn.DataParallel.parallel_apply``.
        """
        is_known = isinstance(inputs, ScatteredArgs)
        positions = inputs.positions if is_known else range(len(replicas))  # type: ignore[attr-defined]
        devices = [self.replica_devices[p] for p in positions[: len(self.replica_devices)]]
        args = [tuple(i) if isinstance(i, (tuple, list)) else (i,) for i in inputs]
        more = list(kwargs or [{}] * len(args))
        with fresh_casts():
            spread_seeds(self.replica_devices)
            if self._lock.is_inside() and 0 < len(replicas) == len(args) == len(more) == len(devices):
                outputs = ReplicaOutputs(self._threads.run(list(zip(replicas, args, more)), devices, positions))
            else:
                if not self._lock.is_inside() and self._engine is not self._threads and not self._has_told:
                    self._has_told = True
                    log_fallback(self, ["forward"])
                outputs = ReplicaOutputs(parallel_apply(replicas, args, more, devices or None))
                if not self._lock.is_inside() and self._outside is not None:
                    self._settle_replicas(self._outside[1], replicas, inputs.rows if is_known else None)  # type: ignore[attr-defined]
        outputs.follow(inputs if is_known else None)  # type: ignore[arg-type]
        return outputs

    def gather(self, outputs: Sequence[Any], output_device: DeviceLike) -> Any:
        """Join what the replicas returned.

        Args:
            outputs: Of each replica, alike in structure.
            output_device: Where joined tensors are, or their ``ShardedBatch`` is; -1 is the CPU.
        Raises:
            GatherError: the outputs can't be joined.
        Source:
            ``torch.nn.DataParallel.gather``.
        """
        known = outputs if isinstance(outputs, ReplicaOutputs) else ReplicaOutputs()
        weights = known.weights if self.gather_rule == "sharded" else None
        more = {"num_rows": known.counted, **known.joins}
        joiner = Joiner(device=parse_target(output_device), dim=self.dim, rows=weights, **more)
        return gather_outputs(list(outputs), joiner)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Promise that the module doesn't change within, so that it is sent to the devices only once.

            with model.frozen(), torch.no_grad():
                for batch in loader:
                    model(batch)

        Parameters, buffers, modes and attributes must stay as they are at the first forward. Forwards that record
        gradients are as ever.
        """
        before, self._fresh = self._fresh, set()
        try:
            yield
        finally:
            self._fresh = before

    # How a call runs by them.

    @not_compiled
    def _run_verbs(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], name: str | None = None, **joins: Any) -> Any:
        """Run a call by the four methods, in the order of ``torch.nn.DataParallel``.

        Args:
            inputs: Positional arguments.
            kwargs: Keyword arguments.
            name: Of the replicas' method to call; they are called themselves when left out.
            **joins: Further options of the ``Joiner``.
        """
        ids = self.device_ids
        args, kwargs_of = self.scatter(inputs, kwargs, ids)
        if not args and not kwargs_of:
            args, kwargs_of = ((),), ({},)
        if len(ids) == 1:
            return self._forward_alone(tuple(args[0]), kwargs_of[0] if kwargs_of else {}, name)
        known = args if isinstance(args, ScatteredArgs) else None
        positions = range(len(args)) if known is None else known.positions
        replicas = self.replicate(self.module, [ids[p] for p in positions[: len(ids)]])
        calls = replicas if name is None else [getattr(replica, name) for replica in replicas]
        outputs = ReplicaOutputs(self.parallel_apply(calls, args, kwargs_of))
        note_writes((inputs, kwargs))
        known = known if known is not None and len(outputs) == len(known) else None
        self._settle_replicas(self._replicas, replicas, None if known is None else known.rows)
        outputs.follow(known)
        outputs.joins = joins
        return self.gather(outputs, self.output_device)

    def _settle_replicas(self, known: ReplicaSet | None, replicas: Sequence[Any], rows: tuple[int, ...] | None) -> None:
        """Settle the buffers of replicas, if they are those that are known."""
        found = [] if known is None else [known.position_of(replica) for replica in replicas]
        positions = [p for p in found if p is not None]
        if known is not None and positions and len(positions) == len(replicas):
            self._settle_buffers(known, positions, rows or (1,) * len(positions))

    def _settle_buffers(self, replicas: ReplicaSet, positions: Sequence[int], rows: Sequence[int]) -> None:
        if self.buffers_rule == "mean":
            replicas.average_buffers(positions, rows)

    def _positions_of(self, devices: Sequence[torch.device]) -> list[int] | None:
        """Return the replicas on these devices, each once; None where there are none."""
        free = dict(enumerate(self.replica_devices))
        found = []
        for device in devices:
            position = next((p for p, d in free.items() if d == device), None)
            if position is None:
                return None
            found.append(position)
            del free[position]
        return found

    def _current_replicas(self) -> ReplicaSet:
        if self._replicas is None or self._replicas.module is not self.module:
            self._replicas = self.make_replicas()
            self._fresh = None if self._fresh is None else set()
        return self._replicas

    def _replicas_here(self) -> ReplicaSet:
        """Return the replicas that this thread may use: forward's within it; else those of one thread, or new ones."""
        if self._lock.is_inside():
            return self._current_replicas()
        if self._ranks is not None:
            raise CallError(
                "replicate: under torchrun, gradients are added up by DataParallel's forward, got a call outside of "
                "it. Override scatter or gather, and leave forward to DataParallel."
            )
        me = threading.get_ident()
        if self._outside is None or self._outside[1].module is not self.module:
            self._outside = me, self.make_replicas()
        owner, replicas = self._outside
        return replicas if owner == me else self.make_replicas()


def overridden(wrapper: Verbs) -> tuple[str, ...]:
    """Return which of the four verbs are a subclass's, or this object's own."""
    own = vars(wrapper)
    return tuple(v for v in VERBS if v in own or getattr(type(wrapper), v) is not getattr(Verbs, v))


def log_fallback(wrapper: Verbs, overrides: Sequence[str]) -> None:
    """Say that replicas run in threads, as methods are overridden."""
    logger.warning(
        "DataParallel: replicas run in threads, whatever the engine, as %s has its own %s.",
        type(wrapper).__qualname__,
        " and ".join(overrides),
    )
