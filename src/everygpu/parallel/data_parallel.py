"""The drop-in layer: one module, every device."""

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from everygpu.devices import parse_device, parse_devices, spread_seeds
from everygpu.devices.p2p import reach_each_other
from everygpu.devices.parse import DeviceLike
from everygpu.errors import CallError, OptionError
from everygpu.keys import align_keys, compiled_original, unwrap
from everygpu.parallel.buckets.sizes import check_bucket_cap, replica_bucket_bytes
from everygpu.parallel.compiler.eval_frame import not_compiled
from everygpu.parallel.compiler.split_graph import SplitPolicy
from everygpu.parallel.cuda_graphs.recorded_forward import Around, RecordedForward
from everygpu.parallel.engines.compiled import CompiledReplicas
from everygpu.parallel.engines.thread_state import fresh_casts
from everygpu.parallel.engines.threads import Workers
from everygpu.parallel.gather import Joiner, gather_outputs
from everygpu.parallel.replicas.attributes import TABLES
from everygpu.parallel.replicas.placement import check_module, check_process, place_module, without_wrappers
from everygpu.parallel.replicas.replica_set import Leaves, ReplicaSet
from everygpu.parallel.scatter.reuse import note_writes
from everygpu.parallel.scatter.scatter import Shard, move_tree, scatter_call
from everygpu.parallel.scatter.split import ScatterSpec, Split, check_split, default_split, settle_split

# Which wrappers' forwards the present call is inside of, in this thread and in the replicas' threads.
_running: ContextVar[frozenset[object]] = ContextVar("everygpu_running", default=frozenset())

BUFFER_RULES = ("first", "mean")
# What a copy or a pickle makes anew. None of it is the module's, even if that has attributes of these names.
_TRANSIENT = (
    *("_replicas", "_fresh", "_may_record", "_recorder", "_workers", "_turn", "_call", "_first_parameter", "_pid"),
)

ENGINES = ("auto", "threads", "compile", "graphs")
_AUTO = {
    False: "replicas run eagerly, each in a thread, as the module didn't go through torch.compile. With "
    'engine="compile" one thread launches them all; with engine="graphs", or everygpu.TrainStep, no Python at all',
    True: "replicas are compiled, as the module went through torch.compile, and launched from one thread",
}
"""What is chosen, and why, by whether the module is compiled."""

GATHER_RULES = ("sharded", "joined")

logger = logging.getLogger("everygpu")


class DataParallel(nn.Module):
    """Run a module on several devices at once, each on a share of the batch.

    Called like the module itself: the batch is cut into shards, replicas run side by side, and the result is
    what the module alone would have given on the whole batch; so are the gradients of its parameters and
    inputs. The optimizer, the training loop and the checkpoint stay as they are.

    Args:
        module: Any ``torch.nn.Module``. It is the first replica itself: its buffers and attributes change as
            in a run on one device. It is moved to ``device_ids[0]`` if it is elsewhere, and taken out of a
            ``DataParallel`` of ours or torch's.
        device_ids: Ints (CUDA indices), names or ``torch.device``; all CUDA devices when left out, or the
            CPU. ``["cpu"] * n`` gives n replicas on the CPU.
        output_device: Where outputs go; ``device_ids[0]`` when left out.
        dim: Where the rows of the batch are.
        split: ``"chunk"``: as ``torch.chunk``, which may leave the last devices idle; ``"even"``: shares
            differ by one row at most; a list of weights, one per device; ``"auto"``: weights by the devices'
            speed and free memory, measured now, or even shares where these are equal. Left out, what
            ``everygpu run --split`` says, else ``"chunk"``.
        gather: ``"sharded"``: outputs are ``ShardedBatch``es, whose rows stay on their devices until someone
            asks for the whole; ``"joined"``: plain tensors on ``output_device``.
        engine: ``"threads"``: replicas run eagerly, each in a thread; ``"compile"``: they are compiled, and
            launched from one thread; ``"auto"``: compiled if ``module`` went through ``torch.compile``;
            ``"graphs"``: on GPUs, after a few forwards on batches of one shape, forward and backward are each
            recorded as a CUDA graph over all devices, and launched by one call from then on, until anything changes
            that they were made from. Python code in the module, such as a print or a global variable, is then not
            run again; hooks keep a module from being recorded. Writes to frozen parameters that torch doesn't count,
            as ``teacher.weight.data.mul_(0.9)``, aren't seen: write under ``no_grad``, or call ``release`` after them.
        buffers: ``"first"``: the module keeps the buffers as its own shard changed them; ``"mean"``: float
            buffers such as BatchNorm's statistics are averaged over the replicas, weighted by rows.
        strict_device: Raise when the module is not on ``device_ids[0]``, instead of moving it.
        bucket_cap_mb: Parameters, and gradients on their way back, travel in buckets of about this many MiB; 25 when
            left out. ``TrainStep`` takes its buckets' size from here, too: left out, 16, or more for large models.
    Raises:
        ModuleError: ``module`` can't be replicated.
        DeviceError: a device is unknown, absent or named twice; this is one of several processes, as of torchrun.
        PlacementError: the module is spread over several devices.
        OptionError: an option has no such value.
    Source:
        ``torch.nn.DataParallel``; the differences are listed in docs/differences.md.
    """

    module: nn.Module
    wraps_a_module = True
    """Marks the class for ``everygpu.keys.unwrap``."""

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
    ) -> None:
        super().__init__()
        check_process("DataParallel")
        module = without_wrappers(module, "DataParallel")
        check_module(module, "DataParallel")
        self.device_ids = parse_devices(device_ids)
        self.output_device = self.device_ids[0] if output_device is None else parse_device(output_device)
        self.split = split = default_split() if split is None else split
        if not isinstance(split, str) or split != "auto":
            check_split(split, len(self.device_ids))
        if engine not in ENGINES:
            raise OptionError(f"DataParallel: engine must be one of {ENGINES}, got {engine!r}.")
        if gather not in GATHER_RULES:
            raise OptionError(f"DataParallel: gather must be one of {GATHER_RULES}, got {gather!r}.")
        if buffers not in BUFFER_RULES:
            raise OptionError(f"DataParallel: buffers must be one of {BUFFER_RULES}, got {buffers!r}.")
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise OptionError(f"DataParallel: dim must be an int, got {dim!r}.")
        check_bucket_cap(bucket_cap_mb, "DataParallel")
        self.dim = dim
        self.bucket_cap_mb = bucket_cap_mb
        self.gather = gather
        self.engine = engine
        self.buffers_rule = buffers
        self.strict_device = strict_device
        self._makes_graphs = engine != "graphs"  # one of all replicas can't have others in it
        self.module = module
        place_module(module, self.device_ids[0], "DataParallel", strict=strict_device)
        self.split = settle_split(split, self.device_ids)
        if engine == "auto" and len(self.device_ids) > 1 and self.device_ids[0].type != "cpu":
            logger.info('DataParallel: engine="auto": %s', _AUTO[self._is_compiled()])
        self._prepare()

    def _prepare(self) -> None:
        self._replicas: ReplicaSet | None = None
        # Within ``frozen``: the replicas that are up to date.
        self._fresh: set[int] | None = None
        # Asked at the first forward: finding out may take a test of the links between GPUs.
        self._may_record = self.engine == "graphs"
        self._recorder: RecordedForward | None = None
        self._workers = self._make_workers()
        self._turn = threading.Lock()
        self._call: object | None = None
        # Looked at in every call on one device, where walking the module would cost more than all the rest.
        self._first_parameter = tuple(itertools.islice(self.module.parameters(), 1))
        self._pid = os.getpid()

    def _make_workers(self) -> Workers | CompiledReplicas:
        workers = Workers(len(self.device_ids) - 1)
        if not self._is_compiled():
            return workers
        # What a recording does with gradients, it does beside its backward.
        in_pieces = not self._makes_graphs and len(self.device_ids) > 1
        cuts = SplitPolicy(in_pieces=in_pieces, last_product=self.engine == "graphs")
        return CompiledReplicas(self.module, workers, cuda_graphs=self._makes_graphs, cuts=cuts)

    def _is_compiled(self) -> bool:
        return self.engine == "compile" or (self.engine != "threads" and compiled_original(self.module) is not None)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on all devices; see the class."""
        if len(self.device_ids) == 1 and self.engine != "graphs":
            return self._forward_alone(inputs, kwargs)
        return self._one_at_a_time(self._forward_here, inputs, kwargs)

    def _forward_here(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._launch(inputs, kwargs)
        if found is not None:
            return gather_outputs(*found)
        if len(self.device_ids) == 1 and self._recorder is None:
            return self._forward_alone(inputs, kwargs)
        if self._replicas is None or self._replicas.module is not self.module:
            self._replicas = self.make_replicas()
            self._fresh = None if self._fresh is None else set()
        return self._forward_on(self._replicas, inputs, kwargs, self._fresh)

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

    @not_compiled
    def _forward_on(
        self, replicas: ReplicaSet, inputs: tuple[Any, ...], kwargs: dict[str, Any], fresh: set[int] | None = None
    ) -> Any:
        outputs, joiner = self._run_on(replicas, inputs, kwargs, fresh)
        if self._recorder is not None:
            self._recorder.watch(outputs)
        return gather_outputs(outputs, joiner)

    def _run_on(
        self,
        replicas: ReplicaSet,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        fresh: set[int] | None = None,
        around: Around = nullcontext,
    ) -> tuple[list[Any], Joiner]:
        """Return what each replica returned, and how that is joined.

        Args:
            replicas: The replicas.
            inputs: Of the call.
            kwargs: Of the call.
            fresh: See ``ReplicaSet.refresh``.
            around: Gives what the replicas are called within.
        """
        shards = scatter_call(inputs, kwargs, self.device_ids, self.dim, self.split)
        modules = replicas.refresh([s.position for s in shards], fresh)
        with fresh_casts(), around(modules):
            outputs = self._apply_to(modules, shards)
        note_writes((inputs, kwargs))
        self._settle_buffers(replicas, shards)
        return outputs, self._joiner(shards)

    @not_compiled
    def _launch(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Joiner] | None:
        """Run a recording; None where there is none that serves."""
        if self._may_record:
            self._may_record = False
            if reach_each_other(self.device_ids):
                self._recorder = self._make_recorder()
            else:
                logger.warning(
                    'DataParallel: engine="graphs": replicas run in threads, as recordings need GPUs that reach each '
                    "other's memory."
                )
        return None if self._recorder is None else self._recorder.run(inputs, kwargs)

    def _make_recorder(self) -> RecordedForward:
        me = weakref.proxy(self)  # or this would hold itself
        return RecordedForward(
            lambda: me.module,
            lambda *call, around: me._run_on(*call, around=around),
            lambda make_leaves: me.make_replicas(make_leaves, fixed=True),
            lambda: (me.split, me.dim, me.gather, me.buffers_rule, me.output_device),
            ScatterSpec(devices=tuple(self.device_ids), dim=self.dim, split=self.split),
            replica_bucket_bytes(self.bucket_cap_mb),
        )

    def make_replicas(self, make_leaves: Callable[[], Leaves] | None = None, *, fixed: bool = False) -> ReplicaSet:
        """Make replicas of the module as it is now; see ``ReplicaSet``."""
        fixed = fixed or isinstance(self._workers, CompiledReplicas)
        return ReplicaSet(
            self.module,
            self.device_ids,
            strict_device=self.strict_device,
            fixed=fixed,
            make_leaves=make_leaves,
            bucket_bytes=replica_bucket_bytes(self.bucket_cap_mb),
        )

    def forward_with(self, replicas: ReplicaSet, *inputs: Any, **kwargs: Any) -> Any:
        """Run on replicas that someone else keeps, as ``TrainStep`` does."""
        return self._one_at_a_time(self._forward_on, replicas, inputs, kwargs)

    def _apply_to(self, replicas: list[nn.Module], shards: list[Shard]) -> list[Any]:
        spread_seeds(self.device_ids)
        positions = [s.position for s in shards]
        calls = [(replica, s.args, s.kwargs) for replica, s in zip(replicas, shards)]
        return self._workers.run(calls, [self.device_ids[p] for p in positions], positions)

    def _joiner(self, shards: list[Shard]) -> Joiner:
        rows = tuple(1 if s.rows is None else s.rows for s in shards) if self.gather == "sharded" else None
        return Joiner(device=self.output_device, dim=self.dim, rows=rows)

    def _settle_buffers(self, replicas: ReplicaSet, shards: list[Shard]) -> None:
        positions = [s.position for s in shards]
        if positions[0] != 0:  # a split that gives the first device no rows
            replicas.take_buffers(positions[0])
        if self.buffers_rule == "mean":
            replicas.average_buffers(positions, [1 if s.rows is None else s.rows for s in shards])

    def _forward_alone(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run on one device: no shards, no threads, only what is elsewhere is moved."""
        device = self.device_ids[0]
        if any(p.device != device for p in self._first_parameter):
            place_module(self.module, device, "DataParallel", strict=self.strict_device)
        if kwargs or any(type(x) is not Tensor or x.device != device for x in inputs):
            inputs, kwargs = move_tree(inputs, device), move_tree(kwargs, device)
        if isinstance(self._workers, CompiledReplicas):
            (output,) = self._workers.run([(self.module, inputs, kwargs)], [device])
        else:
            output = self.module(*inputs, **kwargs)
        return output if self.output_device == device else move_tree(output, self.output_device)

    def _one_at_a_time(self, function: Callable[..., Any], *args: Any) -> Any:
        """Let one thread at a time use the replicas; others wait for their turn.

        Ctrl-C can come between any two lines: a lock that ``with`` takes is given back all the same, and a mark that
        stays in ``_running`` is not that of the call which has the lock.
        """
        if self._call in _running.get() and self._turn.locked():
            raise CallError("DataParallel: forward can't be called from within its own forward. Call the inner module.")
        if self._pid != os.getpid():  # a fork copies no threads, and locks as they were
            self._prepare()
        with self._turn:
            self._call = object()
            token = _running.set(_running.get() | {self._call})
            try:
                return function(*args)
            finally:
                _running.reset(token)

    def make_graphs(self, is_wanted: bool) -> None:
        """Let compiled replicas make CUDA graphs, or not: one of a whole step can't have others in it."""
        if is_wanted is not self._makes_graphs and isinstance(self._workers, CompiledReplicas):
            self._makes_graphs = is_wanted
            self.release()

    def release(self) -> None:
        """Give up the replicas, their memory and their threads; the next forward makes new ones."""
        self._workers.close()
        self._prepare()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own state dict, without ``module.`` in front: it loads anywhere."""
        return unwrap(self).state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict saved with or without ``module.``, ``_orig_mod.`` or ``_fsdp_wrapped_module.``."""
        inner = unwrap(self)
        return inner.load_state_dict(align_keys(state_dict, inner.state_dict().keys()), strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load as part of a larger model, whose state dict has this wrapper's parameters prefix-free."""
        names = [key for key in state_dict if key.startswith(prefix)]
        mine = {key[len(prefix) :]: state_dict.pop(key) for key in names}
        expected = [f"module.{key}" for key in self.module.state_dict()]
        state_dict.update({prefix + key: value for key, value in align_keys(mine, expected).items()})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # While unpickling there is no module yet: looking it up must not come back here.
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__"):
                raise
            return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what is read from the module on the module, as in ``model.fc = nn.Linear(model.fc.in_features, 10)``."""
        if self._has_own(name) or not hasattr(self.module, name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def _has_own(self, name: str) -> bool:
        """Tell whether a name is the wrapper's; all are until it has its module."""
        mine = vars(self)
        if mine.get("_modules", {}).get("module") is None or name in mine or name in _TRANSIENT:
            return True
        return hasattr(type(self), name) or any(name in mine[table] for table in TABLES)

    # What is registered with the wrapper itself would be in no state dict and in no replica.

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register a buffer of the module."""
        if self._has_own(name):
            super().register_buffer(name, tensor, persistent)
        else:
            unwrap(self).register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter of the module."""
        if self._has_own(name):
            super().register_parameter(name, param)
        else:
            unwrap(self).register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a submodule to the module; ``register_module`` does, too."""
        if self._has_own(name):
            super().add_module(name, module)
        else:
            unwrap(self).add_module(name, module)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in _TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare()

    def extra_repr(self) -> str:
        return f"device_ids={[str(d) for d in self.device_ids]}, split={self.split!r}"


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Run a module on several devices once.

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
    model = DataParallel(module, device_ids, output_device, dim)
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    try:
        return model(*args, **(module_kwargs or {}))
    finally:
        model._workers.close()
