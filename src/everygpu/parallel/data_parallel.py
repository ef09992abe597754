"""``DataParallel``: one module, every device."""

import difflib
import functools
import logging
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn import DataParallel as TorchDataParallel

from everygpu._watchdog import watch_if_requested
from everygpu.devices.parse import DeviceLike, device_id, parse_devices, parse_target
from everygpu.devices.seed import OwnRandom, RandomOf, ReplicaRandom, spread_seeds
from everygpu.devices.visible import report_no_gpu
from everygpu.errors import CallError, CopyError, DeviceError, ModuleError, OptionError
from everygpu.parallel.batch_norm import normalizes_shares
from everygpu.parallel.buckets import check_bucket_cap, replica_bucket_bytes
from everygpu.parallel.call import Call, PerReplica, ScatteredArgs, check_transforms
from everygpu.parallel.cuda_graphs.captured_forward import CapturedForward
from everygpu.parallel.engines import table
from everygpu.parallel.engines.engine import Engine, may_replay
from everygpu.parallel.engines.thread_state import fresh_casts
from everygpu.parallel.engines.threads import Workers, apply_once
from everygpu.parallel.forward_lock import ForwardLock
from everygpu.parallel.fully_sharded.model import ShardedRankModel, is_sharded
from everygpu.parallel.fully_sharded.options import Sharding, check_ranks, read_options
from everygpu.parallel.fully_sharded.wrap import share_out
from everygpu.parallel.gather import Joiner, gather_outputs
from everygpu.parallel.ranks import RankModel, check_devices, own_devices
from everygpu.parallel.replicas.module_tree import check_module, place_module, without_wrappers
from everygpu.parallel.replicas.replica_set import ReplicaLeaves, ReplicaSet
from everygpu.parallel.replicas.same_bits import check_num_replicas, share_replicas
from everygpu.parallel.scatter.batch_types import move_tree
from everygpu.parallel.scatter.batch_weight import weight_shares
from everygpu.parallel.scatter.denominator import LabelCheck, seeing_losses
from everygpu.parallel.scatter.scatter import scatter_call
from everygpu.parallel.scatter.split import ScatterSpec, Split, check_split, default_split, resolve_split
from everygpu.parallel.wrapper import ModuleWrapper
from everygpu.ranks.group import Group, init_group
from everygpu.torch_private.compiler import not_compiled

METHODS = ("scatter", "replicate", "parallel_apply", "gather")
GATHER_RULES = ("sharded", "joined")
BUFFER_RULES = ("first", "mean")

logger = logging.getLogger("everygpu")


class DataParallel(ModuleWrapper, TorchDataParallel):  # type: ignore[type-arg]
    """Run a module on several devices at once, each on a share of the batch.

    Call it like the module. It cuts the batch into shards and runs the replicas side by side. Outputs and gradients
    equal those of the module alone on the whole batch. Optimizer, training loop and checkpoints stay as they are::

        model = everygpu.DataParallel(module)
        criterion(model(x), y).backward()

    ``isinstance(model, torch.nn.DataParallel)`` is true. A subclass may override ``scatter``, ``replicate``,
    ``parallel_apply`` and ``gather``, which forward calls in torch's order.

    Args:
        module: Any ``torch.nn.Module``. It is the first replica itself, so its buffers and attributes change as in a
            run on one device. It is moved to ``device_ids[0]``, and taken out of another ``DataParallel``.
        device_ids: Ints (CUDA indices), names or ``torch.device``. By default all CUDA devices, or the CPU if there
            are none. ``["cpu"] * n`` gives n replicas on the CPU.
        output_device: Where outputs go, by default ``device_ids[0]``; -1 is the CPU.
        dim: The dimension of the rows.
        split: ``"chunk"`` cuts as ``torch.chunk`` does, which may leave the last devices idle. ``"even"``: shares
            differ by at most one row. A list: one weight per device. ``"auto"``: weights by the devices' speed and
            free memory, measured now. The default is what ``everygpu run --split`` sets, or ``"chunk"``.
        gather: ``"sharded"`` returns ``ShardedBatch``es, whose rows stay on their devices until code needs the whole.
            ``"joined"`` returns plain tensors on ``output_device``.
        engine: ``"threads"`` runs replicas eagerly, each in a thread. ``"compile"`` compiles them and launches them
            from one thread. ``"capture"``, on GPUs, captures forward and backward as a CUDA graph each over all
            devices, after a few forwards on batches of one shape, and then replays them with one call. ``"auto"``, the
            default, captures if Dynamo proves that this is the same; otherwise it is ``"compile"`` if ``module`` went
            through ``torch.compile``, or ``"threads"``. ``engine_in_use`` says which. A replay runs no Python code of
            the module, such as a print. It goes backward once, from the same outputs as the steps before: a model
            trained otherwise isn't captured, or raises a ``CaptureError``. ``"capture"`` leaves modules with hooks
            eager, and doesn't see writes to frozen parameters that torch doesn't count, such as
            ``teacher.weight.data.mul_(0.9)``: write under ``no_grad``, or call ``release`` afterwards.
        buffers: ``"first"`` keeps the buffers of the first replica. ``"mean"`` averages float buffers, such as
            BatchNorm's statistics, over the replicas, weighted by rows.
        strict_device: Raise if the module isn't on ``device_ids[0]``, instead of moving it.
        num_replicas: How many replicas share a batch, whatever the number of devices, which must divide it. Losses and
            parameters are then the same, bit for bit, on 1, 2, 4 or 8 devices with ``num_replicas=8``; see
            docs/same-bits.md. By default one per device.
        bucket_cap_mb: The size in MiB of buckets of parameters and gradients, by default 25. ``TrainStep`` also uses
            it; by default its buckets have 12, or more for large models.
        weight: Called with the arguments of a share, returns how much that share counts among replicas and ranks, such
            as the number of tokens that its loss is the mean of. By default torch's ``cross_entropy`` and ``nll_loss``
            count what they divided by, and everything else counts rows.
        shard: For models that don't fit on one GPU, with one process per GPU: what is sharded over them.
            ``"parameters"``: parameters, gradients and optimizer state; a block's parameters are whole while it runs.
            ``"gradients"``: the same, but parameters are whole from forward to backward, which is faster and larger.
            ``"optimizer"``: the same, and within ``no_sync`` gradients stay whole and are all-reduced once per update.
            Create the optimizer afterwards. By default every process has the whole model.
        wrap: With ``shard``: the classes of the model's blocks, such as ``[Block]``; by default they are found.
        precision: With ``shard``: ``"bf16"`` computes in bfloat16; parameters, optimizer state and gradient sums keep
            the model's dtype, or ``float32`` for sums of 16-bit gradients. ``"fp32"`` or None computes in that dtype.
        checkpoint_activations: With ``shard``: ``"blocks"`` recomputes the activations of blocks in backward.
    Raises:
        ModuleError: ``module`` can't be replicated.
        DeviceError: a device is unknown, absent or named twice.
        RankError: on every rank, if the ranks' modules differ in names, shapes or dtypes; or for ``shard`` in a single
            process.
        OptimizerError: with ``shard``, an optimizer was created from the model before.
        PlacementError: the module is spread over several devices.
        OptionError: an option has no such value.
    Source:
        ``torch.nn.DataParallel``; docs/differences.md lists the differences. ``shard`` is torch's FSDP2,
        ``torch.distributed.fsdp.fully_shard``.
    """

    _transient = frozenset(
        {"_replicas", "_has_reported", "_fresh", "_engine", "_threads", "_has_overrides", "_lock", "_ranks",
         "_random_of", "_ids", "_first_parameter", "_label_check"}
    )  # fmt: skip
    replica_devices: tuple[torch.device, ...]
    """One per replica; ``device_ids`` names them as torch does."""
    num_replicas: int | None = None
    replicas_per_device: int = 0
    """Of ``num_replicas``, by which all sums are by a tree over these; 0 where that was left out, or is 1."""

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
        num_replicas: int | None = None,
        bucket_cap_mb: float | None = None,
        weight: Callable[..., float | Tensor] | None = None,
        shard: str | None = None,
        wrap: Sequence[type[nn.Module]] | None = None,
        precision: str | None = None,
        checkpoint_activations: str | None = None,
    ) -> None:
        # Not torch's own, which moves the module and knows no CPU. What follows it in a subclass is called, as there.
        # By a name of this file's, as ``torch.nn.DataParallel = everygpu.DataParallel`` makes libraries' classes ours.
        super(TorchDataParallel, self).__init__()
        watch_if_requested()
        group = init_group()
        module = without_wrappers(module, "DataParallel")
        check_module(module, "DataParallel")
        num_ranks = 1 if group is None else group.size
        check_num_replicas(
            num_replicas, split=split, shard=shard, engine=engine, buffers=buffers, num_ranks=num_ranks, module=module
        )
        self.num_replicas = num_replicas
        self.replica_devices = self._devices_of(own_devices(group) if device_ids is None else device_ids)
        self.output_device = self.replica_devices[0] if output_device is None else output_device
        self.split = split = default_split() if split is None else split
        if not isinstance(split, str) or split != "auto":
            check_split(split, len(self.replica_devices))
        _check_options(engine=engine, gather=gather, buffers=buffers, dim=dim)
        check_bucket_cap(bucket_cap_mb, "DataParallel")
        self.dim = dim
        self.engine, self.bucket_cap_mb, self.weight_rule = engine, bucket_cap_mb, weight
        self.gather_rule, self.buffers_rule = gather, buffers
        self.strict_device = strict_device
        sharding = read_options(
            shard, wrap=wrap, precision=precision, checkpoint_activations=checkpoint_activations, engine=engine
        )
        self._ranks: RankModel | None = None if sharding is None else self._share_out(group, module, sharding)
        self.module = module
        if sharding is None:
            place_module(module, self.replica_devices[0], "DataParallel", strict=strict_device)
        self.split = resolve_split(split, self.replica_devices)
        if group is not None and sharding is None:
            check_devices(group, self.replica_devices)
        self._prepare()
        if self._ranks is not None and sharding is None:
            self._ranks.look_at(self.module, is_wrapped_now=True)
        if device_ids is None and self.replica_devices[0].type == "cpu":
            report_no_gpu()
        self._look_for_batch_norm(group)

    def _look_for_batch_norm(self, group: Group | None) -> None:
        if (group is not None or len(self.replica_devices) > 1) and normalizes_shares(self.module):
            is_on_cpu = self.replica_devices[0].type == "cpu"
            _warn_of_batch_norm(logging.INFO if is_on_cpu else logging.WARNING)

    def _share_out(self, group: Group | None, module: nn.Module, sharding: Sharding) -> ShardedRankModel:
        group = check_ranks(group, sharding, self.replica_devices)
        check_devices(group, self.replica_devices)
        old = share_out(group, module, self.replica_devices[0], sharding)
        model = ShardedRankModel(group, self.dim, self.weight_rule, module, sharding, old)
        if callable(getattr(module, "generate", None)):
            model.call_as_forward("generate")
        return model

    def _devices_of(self, device_ids: Any) -> tuple[torch.device, ...]:
        """Return each replica's device."""
        if self.num_replicas is None:
            return _replica_devices(device_ids)
        devices = _replica_devices(device_ids, may_repeat=True)
        group = init_group()
        size = share_replicas(self.num_replicas, len(devices), 1 if group is None else group.size)
        if group is not None:
            group.sums_by_tree = True
        self.replicas_per_device = size if self.num_replicas > 1 else 0
        return tuple(d for d in devices for _ in range(size))

    def _prepare(self) -> None:
        self._ids = self.device_ids
        self._replicas: ReplicaSet | None = None
        self._label_check = LabelCheck("DataParallel")
        self._fresh: set[int] | None = None  # within ``frozen``: the replicas that are up to date
        self._has_reported = False
        overrides = overridden(self)
        is_one = len(self.replica_devices) == 1
        self._has_overrides = "scatter" in overrides if is_one else bool(overrides)
        group = init_group()
        before = vars(self).get("_ranks")
        if not isinstance(before, ShardedRankModel):
            more = self.dim, len(self.replica_devices), self.bucket_cap_mb, self.weight_rule
            self._ranks = None if group is None else RankModel(group, *more, before)
        self._random_of: RandomOf | None = ReplicaRandom if self.replicas_per_device and not overrides else None
        self._engine = self._make_engine(overrides)
        me: Any = weakref.proxy(self)
        workers = Workers(len(self.replica_devices) - 1, lambda *replicas: me._random_for(*replicas))
        self._threads = self._engine if isinstance(self._engine, Workers) else workers
        self._threads.runs_at_once = "replicate" in overrides
        self._lock = ForwardLock.kept(vars(self).get("_lock"))
        # Looked at in every call on one device, where walking the module would cost more than all the rest.
        first = next(self.module.parameters(), None)
        self._first_parameter: Callable[[], Tensor | None] = (lambda: None) if first is None else weakref.ref(first)

    def _make_engine(self, overrides: Sequence[str]) -> Engine:
        me: Any = weakref.proxy(self)  # or this would hold itself
        engine = table.make_engine("threads" if is_sharded(self) else self.engine, me)
        if not overrides or isinstance(engine, Workers):
            return engine
        if len(self.replica_devices) > 1:
            self._log_overrides(overrides)
        return table.make_engine("threads", me)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on all devices; see the class."""
        run = self._forward_alone if self._is_alone() else self._run
        if self._ranks is None:
            return run(inputs, kwargs)
        return self._ranks.forward(run, self.module, inputs, kwargs)

    def call_method(self, name: str, /, *inputs: Any, pad_value: float | None = None, **kwargs: Any) -> Any:
        """Call a method of the module on all devices, each with a share of the batch, as forward is called::

            tokens = model.call_method("generate", ids, max_new_tokens=20, pad_value=0)

        Replicas are brought up to date first, and run in threads, whatever the engine.

        Args:
            name: Of the method.
            *inputs: Positional arguments; cut by rows as forward's are.
            pad_value: Pads outputs whose sizes differ between replicas in dimensions other than the rows: a
                replica's ``generate`` stops when all of its rows have ended.
            **kwargs: Keyword arguments; also cut by rows.
        Returns:
            What the method returns for the whole batch.
        Raises:
            CallError: the module has no such method.
            GatherError: outputs differ in sizes, and there is no ``pad_value``.
            Exception: what the method raised; its ``__cause__`` names the replica.
        """
        _check_method(self.module, name)
        if isinstance(self._ranks, ShardedRankModel):
            self._ranks.call_as_forward(name)
        alone = self._is_alone(name)
        run = self._forward_alone if alone else self._run
        if self._ranks is None:
            return run(inputs, kwargs, name, pad_value)
        return self._ranks.forward(run, self.module, inputs, kwargs, name, pad_value)

    def forward_with(
        self,
        replicas: ReplicaSet,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        captured: CapturedForward | None = None,
    ) -> Any:
        """Run on replicas that the caller keeps, as ``TrainStep`` does, or replay a capture of them."""
        if self._has_overrides:
            raise CallError(
                f"TrainStep: must be made after {' and '.join(overridden(self))} of the DataParallel are overridden. "
                f"Make a new TrainStep."
            )
        with nullcontext() if self._ranks is None else self._ranks.apart(self.module):
            return self._run(inputs, kwargs, replicas=replicas, captured=captured)

    def _is_alone(self, method: str | None = None) -> bool:
        """Whether the module is called as it is, on one device; refuse transforms on several."""
        if len(self.replica_devices) > 1:
            check_transforms()
            return False
        may_capture = method is None and self._engine.replays and may_replay()
        return not self._has_overrides and not may_capture

    @not_compiled
    def _run(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: str | None = None,
        pad_value: float | None = None,
        replicas: ReplicaSet | None = None,
        leave: Callable[[Any], Any] | None = None,
        captured: CapturedForward | None = None,
    ) -> Any:
        """Scatter, replicate, apply and gather; a capture replays all but the last. One thread at a time.

        ``leave`` is what gradients of each replica's output come in through.
        """
        if self._lock.is_inside():  # it would wait forever
            raise CallError("DataParallel: forward can't be called from within its own forward. Call the inner module.")
        if self._lock.is_forked():
            self._prepare()
        with self._lock.lock, self._lock.inside():
            has_captures = self._engine.replays and method is None and replicas is None
            source = captured or (self._engine if has_captures else None)
            outputs = None if source is None else source.replay(inputs, kwargs)
            if len(self.replica_devices) == 1:
                if outputs is not None:
                    return self._at_output_device(outputs[0] if leave is None else leave(outputs[0]))
                if self._has_overrides:
                    args, kwargs_of = self.scatter(inputs, kwargs, self._ids)
                    inputs, kwargs = tuple(args[0]) if args else (), kwargs_of[0] if kwargs_of else {}
                return self._forward_alone(inputs, kwargs, method, leave=leave, captured=captured)
            if outputs is None:
                with _noting_code(captured):
                    outputs = self._run_replicas(inputs, kwargs, method, pad_value, replicas)
                if source is not None:
                    outputs[:] = source.watch(list(outputs))
            if leave is not None:
                outputs[:] = map(leave, outputs)
            return self.gather(outputs, self.output_device)

    def _run_replicas(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: str | None = None,
        pad_value: float | None = None,
        replicas: ReplicaSet | None = None,
    ) -> PerReplica:
        """Scatter a call and apply our replicas, or those given, to its shares; return what each returned."""
        args, kwargs_of = self.scatter(inputs, kwargs, self._ids)
        if not args and not kwargs_of:
            args, kwargs_of = ((),), ({},)
        call: Call | None = getattr(args, "call", None)
        positions = range(len(args)) if call is None else call.positions
        self._lock.rows = rows = () if call is None or call.rows is None else call.rows
        if replicas is None:
            is_whole = len(positions) == len(self._ids)
            ids = self._ids if is_whole else [self._ids[p] for p in positions[: len(self._ids)]]
            modules = self.replicate(self.module, ids)
        else:
            modules = PerReplica(replicas.refresh(positions, None, rows), replicas=replicas)
        calls = modules if method is None else [getattr(m, method) for m in modules]
        with seeing_losses(() if self._engine.compiles else modules):
            kept = getattr(modules, "replicas", None) if self.num_replicas is not None else None
            with nullcontext() if kept is None else kept.first_in_place():
                outputs = self.parallel_apply(calls, args, kwargs_of)
        for lent in self._lock.lent:
            lent.note_writes()
        self._average_buffers(modules, call)
        if call is None or len(outputs) != len(positions):
            call = Call(positions=tuple(positions), args=args, kwargs=kwargs_of, rows=None, weights=None)
        call.modules, call.method, call.pad_value = tuple(modules), method, pad_value
        call.label_check = self._label_check if self._label_check.is_due() else None
        return PerReplica(outputs, call)

    def _forward_alone(
        self,
        inputs: Any,
        kwargs: Any,
        method: str | None = None,
        _: float | None = None,
        leave: Callable[[Any], Any] | None = None,
        captured: CapturedForward | None = None,
    ) -> Any:
        """Run on one device: no shards, no threads, only what is elsewhere is moved."""
        device = self.replica_devices[0]
        if self._ranks is not None and self.num_replicas is None:
            spread_seeds(self.replica_devices)
        first = self._first_parameter()
        if first is None and (first := next(self.module.parameters(), None)) is not None:  # of now: one may be replaced
            self._first_parameter = weakref.ref(first)
        if first is not None and first.device != device:
            place_module(self.module, device, "DataParallel", strict=self.strict_device)
        if kwargs or any(type(x) is not Tensor or x.device != device for x in inputs):
            inputs, kwargs = move_tree(inputs, device), move_tree(kwargs, device)
        random = self._random_for([device], [0])
        with nullcontext() if random is None else random.turn(0), _noting_code(captured):
            if method is None:
                output = self._engine.run_alone((self.module, inputs, kwargs), device)
            else:
                output = self._threads.run_alone((getattr(self.module, method), inputs, kwargs), device)
        if method is None:
            source = captured or (self._engine if self._engine.replays and may_replay() else None)
            if source is not None:
                (output,) = source.watch([output])
        return self._at_output_device(output if leave is None else leave(output))

    def _at_output_device(self, output: Any) -> Any:
        is_there = self._output_device == self.replica_devices[0]
        return output if is_there else move_tree(output, self._output_device)

    # The four verbs of ``torch.nn.DataParallel``, to call and to override.

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
        is_ours = device_ids is self._ids
        devices = self.replica_devices if is_ours else [parse_target(device) for device in device_ids]
        is_call = type(inputs) is tuple
        fits = isinstance(self.split, str) or len(self.split) == len(devices)
        split = self.split if fits else "chunk"
        call = scatter_call(inputs if is_call else (inputs,), kwargs or {}, devices, self.dim, split)
        if not is_ours and (own := self._positions_of(devices)):
            call.positions = tuple(own[p] for p in call.positions)
        self._lock.lent = call.lent if self._lock.is_inside() else ()  # an override may return other lists
        if self.weight_rule is not None and len(call.positions) > 1 and self.gather_rule == "sharded":
            weight_shares(call, self.weight_rule, self.replica_devices[0])
        return ScatteredArgs(call.args if is_call else (a[0] for a in call.args), call), call.kwargs

    def replicate(self, module: nn.Module, device_ids: Sequence[DeviceLike]) -> list[nn.Module]:
        """Bring replicas of a module up to date, and return one per device; the first is the module itself.

        Args:
            module: To be replicated.
            device_ids: Devices, as for ``scatter``.
        Source:
            ``torch.nn.DataParallel.replicate``. Within forward, replicas of the wrapped module persist.
        """
        is_ours = device_ids is self._ids
        devices = self.replica_devices if is_ours else [parse_target(device) for device in device_ids]
        positions = range(len(devices)) if is_ours else self._positions_of(devices)
        if positions is None or module is not self.module:
            return ReplicaSet(module, devices).refresh(range(len(devices)))
        if self._lock.is_inside():
            if self._replicas is None or self._replicas.module is not module:
                self._replicas = self.make_replicas()
                self._fresh = None if self._fresh is None else set()
            replicas, fresh, rows = self._replicas, self._fresh, self._lock.rows
        elif self._ranks is None:
            replicas, fresh, rows = self.make_replicas(), None, ()
        else:
            raise CallError(
                "replicate: under torchrun, gradients are averaged by DataParallel's forward, got a call outside of "
                "it. Override scatter or gather, and leave forward to DataParallel."
            )
        return PerReplica(replicas.refresh(positions, fresh, rows), replicas=replicas)

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
        call: Call | None = getattr(inputs, "call", None)
        positions = range(len(replicas)) if call is None else call.positions
        devices = [self.replica_devices[p] for p in positions[: len(self.replica_devices)]]
        args = [tuple(i) if isinstance(i, (tuple, list)) else (i,) for i in inputs]
        more = list(kwargs or [{}] * len(args))
        with fresh_casts(caches=self.num_replicas is None):
            if self.num_replicas is None:
                spread_seeds(self.replica_devices)
            if self._lock.is_inside() and 0 < len(replicas) == len(args) == len(more) == len(devices):
                engine = self._engine if isinstance(replicas, PerReplica) else self._threads
                return PerReplica(engine.run(list(zip(replicas, args, more)), devices, positions), call)
            if not self._lock.is_inside() and self._engine is not self._threads and not self._has_reported:
                self._has_reported = True
                self._log_overrides(["forward"])
            at_once = self._threads.runs_at_once
            outputs = PerReplica(apply_once(replicas, args, more, devices or None, at_once=at_once), call)
        self._average_buffers(replicas, call)
        return outputs

    def gather(self, outputs: Sequence[Any], output_device: DeviceLike) -> Any:
        """Join what the replicas returned.

        Args:
            outputs: One per replica, of equal structure.
            output_device: Where joined tensors are, or their ``ShardedBatch`` is; -1 is the CPU.
        Raises:
            GatherError: the outputs can't be joined.
        Source:
            ``torch.nn.DataParallel.gather``.
        """
        device = self._output_device if output_device == self.output_device else parse_target(output_device)
        call: Call | None = getattr(outputs, "call", None)
        return gather_outputs(
            list(outputs), Joiner(device=device, dim=self.dim, call=call, is_sharded=self.gather_rule == "sharded")
        )

    def _positions_of(self, devices: Sequence[torch.device]) -> Sequence[int] | None:
        """Return the replicas on these devices, each once; None if there are none."""
        free = dict(enumerate(self.replica_devices))
        found = []
        for device in devices:
            position = next((p for p, d in free.items() if d == device), None)
            if position is None:
                return None
            found.append(position)
            del free[position]
        return found

    def _average_buffers(self, modules: Sequence[Any], call: Call | None) -> None:
        replicas = getattr(modules, "replicas", None)
        if self.buffers_rule == "mean" and replicas is not None:
            positions = [replicas.position_of(m) for m in modules]
            replicas.average_buffers(positions, (call and call.rows) or (1,) * len(positions))

    # Replicas.

    def make_replicas(
        self, make_leaves: Callable[[], ReplicaLeaves] | None = None, *, fixed: bool = False
    ) -> ReplicaSet:
        """Make replicas of the module as it is now; see ``ReplicaSet``."""
        return ReplicaSet(
            self.module,
            self.replica_devices,
            strict_device=self.strict_device,
            fixed=fixed,
            make_leaves=make_leaves,
            bucket_bytes=replica_bucket_bytes(self.bucket_cap_mb),
            num_together=self.replicas_per_device,
        )

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Promise that the module doesn't change within, so that it is sent to the devices only once.

            with model.frozen(), torch.no_grad():
                for batch in loader:
                    model(batch)

        Parameters, buffers, modes and attributes must stay as they are at the first forward. Forwards that capture
        gradients are computed as usual.
        """
        before, self._fresh = self._fresh, set()
        try:
            yield
        finally:
            self._fresh = before

    def release(self) -> None:
        """Give up the replicas, their memory and their threads, after forwards in other threads; the next makes new."""
        self._lock.run_apart(self._end)

    def _end(self) -> None:
        self._engine.close()
        self._threads.close()
        self._prepare()

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave gradients to the first backward after the block, to add micro-batches up by one exchange over ranks::

            with model.no_sync():
                loss_of(model(x1)).backward()
            loss_of(model(x2)).backward()

        Without torchrun it changes nothing. The gradient counts by the rows of all micro-batches together: give a rank
        as many rows in each.

        Raises:
            CallError: with ``num_replicas``, whose sums are by batch.
        Source:
            ``DistributedDataParallel.no_sync``.
        """
        if self._ranks is not None and self.num_replicas is not None:
            raise CallError(
                "no_sync: with num_replicas gradients are summed over ranks after each batch. Leave it out."
            )
        return nullcontext() if self._ranks is None else self._ranks.no_sync()

    def _random_for(self, devices: Sequence[torch.device], positions: Sequence[int]) -> OwnRandom | None:
        """Return the random numbers of some replicas; None where they draw from their devices' generators."""
        if self._random_of is None:
            return None
        first = 0
        if self._ranks is not None:
            self._ranks.check_generators()
            first = self._ranks.group.rank * len(self.replica_devices)
        return self._random_of(devices, [first + p for p in positions])

    @contextmanager
    def _drawing_by(self, random_of: RandomOf) -> Iterator[None]:
        """Have replicas that draw random numbers of their own draw others within, as in a capture."""
        before = self._random_of
        self._random_of = None if before is None else random_of
        try:
            yield
        finally:
            self._random_of = before

    def stop_capturing(self, reason: str) -> None:
        """Switch to another engine, as ``TrainStep`` won't capture."""
        self._engine.stop_capturing(reason)

    def _log_overrides(self, overrides: Sequence[str]) -> None:
        logger.warning(
            "DataParallel: replicas run in threads, whatever the engine, as %s has its own %s.",
            type(self).__qualname__,
            " and ".join(overrides),
        )

    # These attributes are for code that was written for ``torch.nn.DataParallel``.

    @property
    def engine_in_use(self) -> str:
        """The engine that replicas run by now: ``"threads"``, ``"capture"`` or ``"compile"``."""
        return self._engine.in_use

    @property
    def _route(self) -> ScatterSpec:
        """How batches are cut, and over which devices."""
        return ScatterSpec(devices=self.replica_devices, dim=self.dim, split=self.split)

    @property
    def _capture_options(self) -> tuple[Any, ...]:
        """The options that a capture depends on."""
        return self.split, self.dim, self.gather_rule, self.buffers_rule, self.output_device, self.weight_rule

    @property
    def rank_model(self) -> RankModel | None:
        """What keeps the module and its gradients equal on all ranks; None without torchrun."""
        return self._ranks

    @property  # type: ignore[override]
    def device_ids(self) -> list[int | torch.device]:
        """The replicas' devices: ints for CUDA, as of ``torch.nn.DataParallel``, else ``torch.device``."""
        return [device_id(device) for device in self.replica_devices]

    @device_ids.setter
    def device_ids(self, value: Sequence[DeviceLike]) -> None:
        self.replica_devices = self._devices_of(value)
        if "_lock" in vars(self):
            self.release()

    @property  # type: ignore[override]
    def output_device(self) -> int | torch.device:
        """Where outputs go: an int for CUDA, as of ``torch.nn.DataParallel``, else a ``torch.device``."""
        return device_id(self._output_device)

    @output_device.setter
    def output_device(self, value: DeviceLike) -> None:
        self._output_device = parse_target(value)

    @property
    def output_device_obj(self) -> torch.device:
        """``output_device`` as a ``torch.device``."""
        return self._output_device

    @property
    def src_device_obj(self) -> torch.device:  # type: ignore[override]
        """The device of the module's parameters and buffers."""
        return self.replica_devices[0]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "gather" and isinstance(value, str):
            raise OptionError(
                f"DataParallel: gather must be a method, as torch.nn.DataParallel's, got {value!r}. Set gather_rule."
            )
        super().__setattr__(name, value)
        if name in METHODS and "_lock" in vars(self):
            self.release()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name in METHODS and "_lock" in vars(self):
            self.release()

    def __getstate__(self) -> dict[str, Any]:
        if is_sharded(self):
            raise CopyError(
                "DataParallel: a model that is sharded over ranks can't be copied or pickled. Save it by "
                "everygpu.save(path, model=model), which loads into any other."
            )
        return super().__getstate__()

    def __prepare_scriptable__(self) -> NoReturn:
        raise ModuleError(
            "DataParallel: torch.jit.script needs a module without the wrapper, got a DataParallel. Script the module "
            "itself: torch.jit.script(model.module)."
        )

    def extra_repr(self) -> str:
        return f"device_ids={[str(d) for d in self.replica_devices]}, split={self.split!r}"


@functools.cache
def _warn_of_batch_norm(level: int) -> None:
    logger.log(
        level,
        "DataParallel: batch normalization takes its statistics from each replica's share of the batch, so results "
        "differ from one GPU's. everygpu.SyncBatchNorm.convert(module) takes them from the whole batch.",
    )


def overridden(wrapper: DataParallel) -> tuple[str, ...]:
    """Return which of the four verbs are a subclass's, or this object's own."""
    own = vars(wrapper)
    return tuple(v for v in METHODS if v in own or getattr(type(wrapper), v) is not getattr(DataParallel, v))


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Run a module on several devices once::

        output = everygpu.parallel.data_parallel(module, x)

    Args:
        module: Any ``torch.nn.Module``; see ``DataParallel``.
        inputs: Positional arguments: a tuple, or a single value.
        device_ids: As for ``DataParallel``.
        output_device: As for ``DataParallel``.
        dim: Where the rows of the batch are.
        module_kwargs: Keyword arguments.
    Returns:
        What the module returns for the whole batch.
    Raises:
        EveryGPUError: as ``DataParallel`` does.
    Source:
        ``torch.nn.parallel.data_parallel``. Replicas are made for this one call: in a loop, keep a
        ``DataParallel``.
    """
    model = DataParallel(module, device_ids, output_device, dim, engine="threads")
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    try:
        return model(*args, **(module_kwargs or {}))
    finally:
        model.release()


def _replica_devices(device_ids: Any, *, may_repeat: bool = False) -> tuple[torch.device, ...]:
    if isinstance(device_ids, SupportsIndex) and not isinstance(device_ids, bool):
        index = operator.index(device_ids)
        several = f", {list(range(index))} for {index} GPUs" if index > 1 else ""
        raise DeviceError(f"device_ids={index} is no list. Pass [{index}] for GPU {index} alone{several}.")
    return tuple(parse_devices(device_ids, may_repeat=may_repeat))


def _check_options(*, engine: Any, gather: Any, buffers: Any, dim: Any) -> None:
    for name, value, values in (
        ("engine", engine, table.ENGINES),
        ("gather", gather, GATHER_RULES),
        ("buffers", buffers, BUFFER_RULES),
    ):
        if value not in values:
            raise OptionError(f"DataParallel: {name} must be one of {values}, got {value!r}.")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise OptionError(f"DataParallel: dim must be an int, got {dim!r}.")


def _noting_code(captured: CapturedForward | None) -> AbstractContextManager[None]:
    """Have what a forward runs within be known when it is captured."""
    return nullcontext() if captured is None else captured.capture.running_eagerly()


def _check_method(module: nn.Module, name: str) -> None:
    if not callable(getattr(module, name, None)):
        names = [n for n in dir(module) if not n.startswith("_")]
        close = difflib.get_close_matches(
            name, names, 1, 0.75
        )  # 'genrate' is like 'generate', not like 'get_parameter'
        advice = f"Did you mean {close[0]!r}?" if close else "Define it in the module's class."
        raise CallError(f"call_method: {type(module).__qualname__} must have the method, got {name!r}. {advice}")
