"""The drop-in layer: one module, every device."""

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from everygpu.devices.parse import DeviceLike, parse_devices
from everygpu.devices.seed import spread_seeds
from everygpu.errors import CallError
from everygpu.parallel.buckets.sizes import replica_bucket_bytes
from everygpu.parallel.compiler.eval_frame import not_compiled
from everygpu.parallel.engines.engine import Around, Engine, EngineContext, may_launch
from everygpu.parallel.engines.table import make_engine
from everygpu.parallel.engines.thread_state import fresh_casts
from everygpu.parallel.engines.threads import Workers
from everygpu.parallel.forward_lock import kept_lock
from everygpu.parallel.gather import Joiner, gather_outputs
from everygpu.parallel.method_calls import MethodCalls
from everygpu.parallel.options import check_options
from everygpu.parallel.ranks.model import RankModel, own_devices
from everygpu.parallel.ranks.start import check_devices, start_alike
from everygpu.parallel.replicas.placement import check_module, place_module, without_wrappers
from everygpu.parallel.replicas.replica_set import Leaves, ReplicaSet
from everygpu.parallel.scatter.batch_types import move_tree
from everygpu.parallel.scatter.counts import counted_rows, rows_of, weights_of
from everygpu.parallel.scatter.reuse import note_writes
from everygpu.parallel.scatter.scatter import Shard, scatter_call
from everygpu.parallel.scatter.split import ScatterSpec, Split, default_split, settle_split
from everygpu.parallel.transforms import check_transforms
from everygpu.parallel.verbs import log_fallback, overridden
from everygpu.ranks.group import join
from everygpu.watchdog.watch import watch_as_told


class DataParallel(MethodCalls):
    """Run a module on several devices at once, each on a share of the batch.

    Called like the module itself: the batch is cut into shards, replicas run side by side, and the result is
    what the module alone would have given on the whole batch; so are the gradients of its parameters and
    inputs. The optimizer, the training loop and the checkpoint stay as they are::

        model = everygpu.DataParallel(module)
        criterion(model(x), y).backward()

    It is a ``torch.nn.DataParallel`` for code that looks at it or makes a class of it: forward calls whichever of
    ``scatter``, ``replicate``, ``parallel_apply`` and ``gather`` is overridden, in torch's order.

    Args:
        module: Any ``torch.nn.Module``. It is the first replica itself: its buffers and attributes change as
            in a run on one device. It is moved to ``device_ids[0]`` if it is elsewhere, and taken out of a
            ``DataParallel`` of ours or torch's.
        device_ids: Ints (CUDA indices), names or ``torch.device``; all CUDA devices when left out, or the
            CPU. ``["cpu"] * n`` gives n replicas on the CPU.
        output_device: Where outputs go; ``device_ids[0]`` when left out. -1 is the CPU.
        dim: Where the rows of the batch are.
        split: ``"chunk"``: as ``torch.chunk``, which may leave the last devices idle; ``"even"``: shares
            differ by one row at most; a list of weights, one per device; ``"auto"``: weights by the devices'
            speed and free memory, measured now, or even shares where these are equal. Left out, what
            ``everygpu run --split`` says, else ``"chunk"``.
        gather: ``"sharded"``: outputs are ``ShardedBatch``es, whose rows stay on their devices until code
            needs the whole; ``"joined"``: plain tensors on ``output_device``.
        engine: ``"auto"``: on GPUs ``"graphs"`` where Dynamo proves that a recording does the same, looked for in the
            first steps; else ``"compile"`` if ``module`` went through ``torch.compile``, or ``"threads"``; see
            ``engine_in_use``. ``"threads"``: replicas run eagerly, each in a thread; ``"compile"``: they are compiled,
            and launched from one thread; ``"graphs"``: on GPUs, after a few forwards on batches of one shape, forward
            and backward are each recorded as a CUDA graph over all devices, and launched by one call from then on,
            until anything changes that they were made from, without a proof. Python code in the module, such as a
            print or a global variable, is then not run again; hooks keep a module from being recorded. Writes to frozen
            parameters that torch doesn't count, as ``teacher.weight.data.mul_(0.9)``, aren't seen: write under
            ``no_grad``, or call ``release`` after them. A launch goes backward once, from the outputs of the steps
            before: a model trained otherwise isn't recorded, or stops with a ``CaptureError`` that says so.
        buffers: ``"first"``: the module keeps the buffers as its own shard changed them; ``"mean"``: float
            buffers such as BatchNorm's statistics are averaged over the replicas, weighted by rows.
        strict_device: Raise when the module is not on ``device_ids[0]``, instead of moving it.
        bucket_cap_mb: Parameters, and gradients on their way back, travel in buckets of about this many MiB; 25 when
            left out. ``TrainStep`` takes its buckets' size from here, too: left out, 16, or more for large models.
        weight: Under torchrun: called with a batch, returns how much this rank's gradients count beside others', as the
            number of tokens that the loss is the mean of; the batch's rows when left out.
    Raises:
        ModuleError: ``module`` can't be replicated.
        DeviceError: a device is unknown, absent or named twice.
        RankError: under torchrun, on every rank: the ranks' modules differ in names, shapes or dtypes.
        PlacementError: the module is spread over several devices.
        OptionError: an option has no such value.
    Source:
        ``torch.nn.DataParallel``; the differences are listed in docs/differences.md.
    """

    _transient = frozenset(
        {"_replicas", "_outside", "_has_told", "_fresh", "_engine", "_threads", "_has_overrides", "_lock", "_ranks",
         "_first_parameter"}
    )  # fmt: skip

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        split: Split | None = None,
        gather: str = "sharded",
        engine: str = "auto",
        buffers: str = "first",
        strict_device: bool = False,
        bucket_cap_mb: float | None = None,
        weight: Callable[..., float | Tensor] | None = None,
    ) -> None:
        super().__init__()
        watch_as_told()
        group = join()
        module = without_wrappers(module, "DataParallel")
        check_module(module, "DataParallel")
        self.replica_devices = tuple(parse_devices(own_devices(group) if device_ids is None else device_ids))
        self.output_device = self.replica_devices[0] if output_device is None else output_device
        self.split = split = default_split() if split is None else split
        num = len(self.replica_devices)
        check_options(split, num, dim, engine=engine, gather=gather, buffers=buffers, bucket_cap_mb=bucket_cap_mb)
        self.dim = dim
        self.engine, self.bucket_cap_mb, self.weight_rule = engine, bucket_cap_mb, weight
        self.gather_rule, self.buffers_rule = gather, buffers
        self.strict_device = strict_device
        self.module = module
        place_module(module, self.replica_devices[0], "DataParallel", strict=strict_device)
        self.split = settle_split(split, self.replica_devices)
        if group is not None:
            check_devices(group, self.replica_devices)
            start_alike(group, self.module)
        self._prepare()

    def _prepare(self) -> None:
        self._replicas: ReplicaSet | None = None
        self._fresh: set[int] | None = None
        self._outside, self._has_told = None, False
        overrides = overridden(self)
        is_one = len(self.replica_devices) == 1
        self._has_overrides = "scatter" in overrides if is_one else bool(overrides)
        self._engine = self._make_engine(overrides)
        self._threads = self._engine if isinstance(self._engine, Workers) else Workers(len(self.replica_devices) - 1)
        self._lock = kept_lock(vars(self).get("_lock"))
        group = join()
        more = self.dim, len(self.replica_devices), self.bucket_cap_mb, self.weight_rule
        self._ranks = None if group is None else RankModel(group, *more, vars(self).get("_ranks"))
        # Looked at in every call on one device, where walking the module would cost more than all the rest.
        self._first_parameter = tuple(itertools.islice(self.module.parameters(), 1))

    def _make_engine(self, overrides: Sequence[str]) -> Engine:
        me = weakref.proxy(self)  # or this would hold itself
        context = EngineContext(
            module=lambda: me.module,
            devices=self.replica_devices,
            spec=lambda: ScatterSpec(devices=me.replica_devices, dim=me.dim, split=me.split),
            options=lambda: (me.split, me.dim, me.gather_rule, me.buffers_rule, me.output_device),
            run=lambda *call, around: me._forward_on(*call, around=around, gather=lambda *apart: apart),
            make_replicas=lambda make_leaves: me.make_replicas(make_leaves, fixed=True),
            has_ranks=join() is not None,
            bucket_cap_mb=self.bucket_cap_mb,
        )
        engine = make_engine(self.engine, context)
        if not overrides or isinstance(engine, Workers):
            return engine
        if len(self.replica_devices) > 1:
            log_fallback(self, overrides)
        return make_engine("threads", context)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on all devices; see the class."""
        if self._ranks is None:
            return self._forward_by_itself(inputs, kwargs)
        run = partial(self._forward_by_itself, inputs, kwargs)
        return self._ranks.forward(run, self.module, inputs, kwargs)

    def _forward_by_itself(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(self.replica_devices) > 1:
            check_transforms()
        elif not self._has_overrides and not (self._engine.launches and may_launch()):
            return self._forward_alone(inputs, kwargs)
        return self._one_at_a_time(self._forward_here, inputs, kwargs)

    def _forward_here(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._has_overrides:
            return self._run_verbs(inputs, kwargs)
        launched = self._engine.launch(inputs, kwargs)
        if len(self.replica_devices) > 1:
            if launched is not None:
                return gather_outputs(*launched)
            return self._forward_on(self._current_replicas(), inputs, kwargs, self._fresh)
        if launched is None:
            return self._forward_alone(inputs, kwargs)
        (output,), _ = launched
        return self._at_output_device(output)

    def _forward_on(
        self,
        replicas: ReplicaSet,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        fresh: set[int] | None = None,
        around: Around = nullcontext,
        gather: Callable[[list[Any], Joiner], Any] | None = None,
    ) -> Any:
        """Scatter, replicate, apply, gather: a recording calls the replicas within ``around``, and gathers later."""
        shards = scatter_call(inputs, kwargs, self.replica_devices, self.dim, self.split)
        positions, rows = [s.position for s in shards], rows_of(shards)
        modules = replicas.refresh(positions, fresh, rows)
        outputs = self._apply_to(modules, shards, around)
        note_writes((inputs, kwargs))
        self._settle_buffers(replicas, positions, rows)
        return (gather or self._gather)(outputs, self._joiner(shards, modules))

    def make_replicas(self, make_leaves: Callable[[], Leaves] | None = None, *, fixed: bool = False) -> ReplicaSet:
        """Make replicas of the module as it is now; see ``ReplicaSet``."""
        fixed = fixed or self._engine.is_fixed
        return ReplicaSet(
            self.module,
            self.replica_devices,
            strict_device=self.strict_device,
            fixed=fixed,
            make_leaves=make_leaves,
            bucket_bytes=replica_bucket_bytes(self.bucket_cap_mb),
        )

    def forward_with(self, replicas: ReplicaSet, *inputs: Any, **kwargs: Any) -> Any:
        """Run on replicas that the caller keeps, as ``TrainStep`` does."""
        if self._has_overrides:
            raise CallError(
                f"TrainStep: must be made after {' and '.join(overridden(self))} of the DataParallel are overridden. "
                f"Make a new TrainStep."
            )
        with nullcontext() if self._ranks is None else self._ranks.apart(self.module):
            return self._one_at_a_time(self._forward_on, replicas, inputs, kwargs)

    def _apply_to(self, replicas: list[nn.Module], shards: list[Shard], around: Around) -> list[Any]:
        positions = [s.position for s in shards]
        calls = [(replica, s.args, s.kwargs) for replica, s in zip(replicas, shards)]
        with fresh_casts(), around(replicas):
            spread_seeds(self.replica_devices)
            return self._engine.run(calls, [self.replica_devices[p] for p in positions], positions)

    def _gather(self, outputs: list[Any], joiner: Joiner) -> Any:
        return gather_outputs(self._engine.watch(outputs), joiner)

    def _joiner(self, shards: list[Shard], modules: list[nn.Module]) -> Joiner:
        weights = weights_of(shards) if self.gather_rule == "sharded" else None
        return Joiner(
            device=self._output_device,
            dim=self.dim,
            rows=weights,
            num_rows=counted_rows(shards),
            modules=tuple(modules),
        )

    def _forward_alone(self, inputs: Any, kwargs: Any, name: str | None = None) -> Any:
        """Run on one device: no shards, no threads, only what is elsewhere is moved."""
        device = self.replica_devices[0]
        if self._ranks is not None:
            spread_seeds(self.replica_devices)
        if any(p.device != device for p in self._first_parameter):
            place_module(self.module, device, "DataParallel", strict=self.strict_device)
        if kwargs or any(type(x) is not Tensor or x.device != device for x in inputs):
            inputs, kwargs = move_tree(inputs, device), move_tree(kwargs, device)
        if name is None:
            output = self._engine.run_alone((self.module, inputs, kwargs), device)
            if self._engine.launches and may_launch():
                (output,) = self._engine.watch([output])
        else:
            output = self._threads.run_alone((getattr(self.module, name), inputs, kwargs), device)
        return self._at_output_device(output)

    def _at_output_device(self, output: Any) -> Any:
        is_there = self._output_device == self.replica_devices[0]
        return output if is_there else move_tree(output, self._output_device)

    @not_compiled
    def _one_at_a_time(self, function: Callable[..., Any], *args: Any) -> Any:
        """Let one thread at a time use the replicas."""
        self._lock.check()
        if self._lock.is_forked():
            self._prepare()
        return self._lock.run(function, *args)

    @property
    def engine_in_use(self) -> str:
        """The engine that replicas run by now: ``"threads"``, ``"graphs"`` or ``"compile"``."""
        return self._engine.in_use

    @property
    def rank_model(self) -> RankModel | None:
        """What keeps the module and its gradients equal on all ranks; None without torchrun."""
        return self._ranks

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave gradients to the first backward after the block, to add micro-batches up by one exchange over ranks::

            with model.no_sync():
                loss_of(model(x1)).backward()
            loss_of(model(x2)).backward()

        Without torchrun it changes nothing. The gradient counts by the rows of all micro-batches together: give a rank
        as many rows in each.

        Source:
            ``DistributedDataParallel.no_sync``.
        """
        return nullcontext() if self._ranks is None else self._ranks.no_sync()

    def give_up_recording(self, reason: str) -> None:
        """Have another engine run what ``TrainStep`` won't record."""
        self._engine.give_up_recording(reason)

    def release(self) -> None:
        """Give up the replicas, their memory and their threads, after forwards in other threads; the next makes new."""
        self._lock.run_apart(self._end)

    def _end(self) -> None:
        self._engine.close()
        self._threads.close()
        self._prepare()

    def extra_repr(self) -> str:
        return f"device_ids={[str(d) for d in self.replica_devices]}, split={self.split!r}"
