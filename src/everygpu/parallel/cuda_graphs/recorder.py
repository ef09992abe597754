"""When work on the devices is recorded, and when the recording may be launched in its place."""

import functools
import logging
import operator
import random
import sys
import types
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from everygpu.devices import spread_seeds
from everygpu.errors import CaptureError, SplitError
from everygpu.parallel.buckets.bucket import version_of
from everygpu.parallel.cuda_graphs.capture_lock import CAPTURE_LOCK, RECORDING
from everygpu.parallel.cuda_graphs.multi_gpu_graph import MultiGpuGraph, is_capturing, return_memory
from everygpu.parallel.cuda_graphs.static_batch import Batch, NotStatic, StaticBatch, describe_batch
from everygpu.parallel.replicas.attributes import Watch
from everygpu.parallel.replicas.module_tree import ModuleTree, has_hooks, is_dense
from everygpu.parallel.scatter.split import ScatterSpec
from everygpu.torch_private.autograd import top_saved_tensor_hooks
from everygpu.torch_private.modes import DeviceContext, function_modes, num_dispatch_modes

NUM_WARM_UPS = 3
"""Steps of a kind that run as they are before one is recorded: libraries choose their algorithms meanwhile."""

MAX_RECORDINGS = 4
"""Kinds of batches that are kept recorded at a time: each has the memory of a step."""

MAX_COUNTED = 1000
"""Kinds of batches that are counted at a time: a number among the inputs may make each a kind of its own."""

MAX_ATTEMPTS = 12
"""Recordings until one has served for long: a model that changes all the time isn't worth more."""

LONG = 100
"""Launches."""

logger = logging.getLogger("everygpu")

Result = TypeVar("Result")
Made = TypeVar("Made", covariant=True)


class Recordable(Protocol[Made]):
    """A step as ``Capture`` sees it: what is done with one batch."""

    def roots(self) -> list[nn.Module]:
        """List the roots of the modules that take part now."""

    def state(self) -> Hashable:
        """Return what a recording depends on besides the batch, the modules and torch's settings."""

    def unsupported_reason(self) -> str | None:
        """Say why the step isn't recorded, though it may be possible."""

    def prepare(self) -> Any:
        """Prepare for a recording; what is returned goes to ``record``."""

    def record(self, graph: MultiGpuGraph, batch: StaticBatch, prepared: Any) -> Any:
        """Have the graph record the step's work on a batch; what is returned goes to ``begin`` and ``finish``."""

    def try_otherwise(self) -> bool:
        """After a failure, tell whether another way of recording is left, and take it; asked until it isn't."""

    def give_up(self) -> None:
        """Take note that steps run as they are from now on."""

    def begin(self, recorded: Any) -> bool:
        """Prepare for a launch; False when this step has to run as it is."""

    def finish(self, recorded: Any) -> Made:
        """Take note of a launch, and return what the step does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recording:
    batch: StaticBatch
    graph: MultiGpuGraph
    recorded: Any
    written: list[bool]
    """For each tensor of the batch whether the step writes to it."""


class Capture(Generic[Result]):
    """Records steps as CUDA graphs after a few of a kind, and launches them from then on.

    A recording is launched only while everything it was made from is as it was: shapes and values of the batch, the
    modules' attributes, modes and hooks, and the attributes of objects among them, parameters and buffers where they
    were, what the loss refers to, torch's settings. Everything else that Python code may look at, such as a global
    variable in a module's forward, is beyond it. While a mode or a hook of torch's wants to see every operation, steps
    run as they are.

    Args:
        step: What is recorded.
        name: Whose steps they are, for messages.
        route: How batches are cut.
        must: Raise where a step can't be recorded, and record also where hooks would no longer be called.
        level: Of the log line that says why steps run as they are.
        streams: Which stream of each GPU steps are recorded on.
    """

    def __init__(
        self,
        step: Recordable[Result],
        name: str,
        route: ScatterSpec,
        *,
        must: bool = False,
        level: int = logging.INFO,
        streams: str = RECORDING,
    ) -> None:
        self._step = step
        self._name = name
        self._route = route
        self._must = must
        self._level = level
        self._streams = streams
        self._recordings: dict[Any, _Recording] = {}
        self._counts: dict[Any, int] = {}
        self._facts: Any = None
        self._scene: ModuleGuards | None = None
        self._num_attempts = 0
        self._num_launches = 0
        self._num_unsteady = 0
        self._given_up = False

    def run(self, batch: Batch) -> Result | None:
        """Run a step by its recording, making one if it is time to.

        Returns:
            The step's result; None where the step has to run as it is, which the caller does.
        Raises:
            CaptureError: the step can't be recorded, though it must.
        """
        if self._given_up or is_capturing() or (_is_watched() and not self._must) or not self._is_as_before():
            return None
        try:
            key = describe_batch(batch, self._route)
        except NotStatic as reason:
            self._give_up(str(reason))
            return None
        except SplitError:  # the step itself says so
            return None
        recording = self._recordings.get(key)
        if recording is None:
            self._count(key)
            if self._counts[key] <= NUM_WARM_UPS or len(self._recordings) >= MAX_RECORDINGS:
                return None
            with CAPTURE_LOCK.taken() as is_ours:
                recording = self._record(key, batch) if is_ours else None
        if recording is None or not self._step.begin(recording.recorded):
            return None
        spread_seeds(self._route.devices)
        recording.batch.write(batch)
        recording.graph.replay()
        self._num_launches += 1
        recording.batch.write_back(batch, recording.written)
        if self._num_launches % LONG == 0:
            self._num_attempts = 0
        return self._step.finish(recording.recorded)

    def forget(self) -> bool:
        """Drop all recordings, with their memory; tell whether there were any."""
        had_some = bool(self._recordings)
        self._recordings.clear()
        self._counts.clear()
        return had_some

    def _count(self, key: Any) -> None:
        self._counts[key] = self._counts.pop(key, 0) + 1  # the last seen are the last
        if len(self._counts) > MAX_COUNTED:
            del self._counts[next(iter(self._counts))]

    def _is_as_before(self) -> bool:
        """Tell whether recordings still hold, and drop them if not."""
        facts = (self._step.state(), *_settings())
        roots = self._step.roots()
        is_same_scene = self._scene is not None and self._scene.is_current(roots)
        if is_same_scene and facts == self._facts:
            self._num_unsteady = 0
            return True
        self.forget()
        self._num_unsteady += 1
        scene = self._scene if self._scene is not None and is_same_scene else ModuleGuards(roots)
        self._scene, self._facts = scene, facts
        obstacle = self._step.unsupported_reason() or _find_hooks(roots)
        if obstacle is not None and not self._must:
            self._give_up(obstacle)
        elif self._num_unsteady > MAX_ATTEMPTS:
            self._give_up(
                scene.find_volatile() or "the modules' attributes, or torch's settings, are others at every step"
            )
        return False

    def _record(self, key: Any, batch: Batch) -> _Recording | None:
        self._num_attempts += 1
        if self._num_attempts > MAX_ATTEMPTS:
            self._give_up(f"{MAX_ATTEMPTS} recordings were made, and none served for long")
            return None
        generators = _HostGenerators(self._step.roots())
        before = generators.states()
        held = StaticBatch(batch, self._route)
        held.write(batch)
        spread_seeds(self._route.devices)
        found = self._attempt(held)
        while isinstance(found, str) and self._step.try_otherwise():
            generators.restore(before)
            found = self._attempt(held)
        drew = not all(map(_is_same_state, before, generators.states()))
        generators.restore(before)
        if drew and not isinstance(found, str):
            found = "the step draws random numbers on the host, which a recording would repeat"
        if isinstance(found, str):
            self._give_up(found)
            return None
        self._recordings[key] = found
        return found

    def _attempt(self, held: StaticBatch) -> _Recording | str:
        """Record, or say why not."""
        graph = MultiGpuGraph(self._route.devices, streams=self._streams)
        try:
            prepared, before = self._step.prepare(), held.versions()
            recorded = self._step.record(graph, held, prepared)
            written = [now != then for now, then in zip(held.versions(), before)]
            return _Recording(batch=held, graph=graph, recorded=recorded, written=written)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step is run as it is
            failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if graph.has_replaced_generators:
            self._recordings.clear()
        # Once more, without the graph of autograd that the exception held.
        return_memory(self._route.devices)
        return failure

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self.forget()
        self._step.give_up()
        if self._must:
            raise CaptureError(
                f"{self._name}: the step must be recordable under capture=True, but {reason}. "
                f"Pass capture='auto' to run such steps as they are."
            )
        logger.log(self._level, "%s: steps run without CUDA graphs: %s.", self._name, reason)


class ModuleGuards:
    """The modules as they were: their arrangement, their attributes, and their tensors. Looked at in every step."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = list(roots)
        self._layouts = [ModuleTree(root) for root in roots]
        self._watches = [Watch(layout.modules) for layout in self._layouts]
        for watch in self._watches:
            watch.changed()
        self._tensors = [t for layout in self._layouts for t in layout.tensors]
        self._dense = [t for t in self._tensors if is_dense(t)]
        self._fixed = [t for t in self._tensors if isinstance(t, nn.Parameter) and not t.requires_grad]
        attributes = (v for layout in self._layouts for m in layout.modules for v in vars(m).values())
        self._objects = list({id(v): v for v in attributes if _is_open(v)}.values())
        self._facts = self._look()

    def is_current(self, roots: Sequence[nn.Module]) -> bool:
        return (
            len(roots) == len(self._roots)
            and all(map(operator.is_, roots, self._roots))
            and all(layout.is_same() for layout in self._layouts)
            and not sum(len(watch.changed()) for watch in self._watches)
            and self._look() == self._facts
        )

    def find_volatile(self) -> str | None:
        """Say which module can't be seen to be as it was."""
        for root, layout, watch in zip(self._roots, self._layouts, self._watches):
            for m in (layout.modules[i] for i in watch.volatile()):
                name = next((n for n, other in root.named_modules() if other is m), "")
                which = f"{type(m).__name__} {name!r}" if name else type(m).__name__
                return f"{which} has attributes that may change unseen, such as a list of tensors"
        return None

    def _look(self) -> tuple[list[Any], ...]:
        """Return what may change in a tensor that stays the same object; and writes to those that aren't trained,
        which replicas are sent outside recordings.
        """
        return (
            [t.data_ptr() for t in self._dense],
            [t.shape for t in self._dense],
            [t.stride() for t in self._dense],
            [t.dtype for t in self._dense],
            [t.requires_grad for t in self._tensors],
            [has_hooks(t) for t in self._tensors],
            [version_of(t) for t in self._fixed],
            [_fact(v) for o in self._objects for v in vars(o).values()],
        )


def _is_open(value: Any) -> bool:
    """Tell whether a module's attribute is an object that forward may read attributes of, such as a configuration."""
    is_known = isinstance(value, (type, types.ModuleType, types.FunctionType, Tensor, nn.Module, dict, list, set))
    return (
        not is_known and hasattr(value, "__dict__") and not type(value).__module__.startswith(("torch.", "everygpu."))
    )


def _settings() -> tuple[Any, ...]:
    """Return torch's settings that a recording has taken in."""
    cudnn: Any = torch.backends.cudnn
    cuda: Any = torch.backends.cuda
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cuda", "cpu")),
        torch.get_default_dtype(),
        # The one way to ask that never raises, whichever way they were set.
        cuda.matmul.fp32_precision,
        cudnn.conv.fp32_precision,
        cudnn.rnn.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch.is_anomaly_enabled(),
        [str(m.device) if isinstance(m, DeviceContext) else id(m) for m in function_modes()],
        num_dispatch_modes(),
        top_saved_tensor_hooks() is None,
        *(len(vars(torch_module)[table]) for table in _GLOBAL_HOOKS),
    )


def _is_watched() -> bool:
    """Tell whether Python code wants to see every operation: a step that is launched as a whole has none to show."""
    return (
        any(not isinstance(m, DeviceContext) for m in function_modes())
        or num_dispatch_modes() > 0
        or top_saved_tensor_hooks() is not None
        or torch.is_anomaly_enabled()
    )


def _find_hooks(roots: Sequence[nn.Module]) -> str | None:
    """Say where there is Python code that a recording wouldn't run."""
    if any(vars(torch_module)[table] for table in _GLOBAL_HOOKS):
        return "there are hooks on all modules, which a recording wouldn't call"
    for root in roots:
        for name, m in root.named_modules():
            if any(getattr(m, table, None) for table in _HOOKS):
                return f"module {name or type(m).__name__!r} has hooks, which a recording wouldn't call"
        for name, p in root.named_parameters():
            if has_hooks(p):
                return f"parameter {name} has hooks, which a recording wouldn't call"
    return None


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


class _HostGenerators:
    """Random generators on the host that modules may draw from: everybody's, and those that are their attributes."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        numpy = sys.modules.get("numpy")
        shared = [random, *([] if numpy is None else [numpy.random])]
        values = (v for root in roots for m in root.modules() for v in vars(m).values())
        own = list({id(v): v for v in values if _is_host_generator(v, numpy)}.values())
        self._all: list[Any] = [*shared, torch.default_generator, *own]

    def states(self) -> list[Any]:
        return [_state_of(g) for g in self._all]

    def restore(self, states: Sequence[Any]) -> None:
        for generator, state in zip(self._all, states):
            write = getattr(generator, "setstate", None) or getattr(generator, "set_state", None)
            if write is None:  # NumPy's newer ones
                generator.bit_generator.state = state
            else:
                write(state)


def _is_host_generator(value: Any, numpy: Any) -> bool:
    if isinstance(value, torch.Generator):
        return value.device.type == "cpu"
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (random.Random, *kinds))


def _state_of(generator: Any) -> Any:
    read = getattr(generator, "getstate", None) or getattr(generator, "get_state", None)
    return generator.bit_generator.state if read is None else read()


def _is_same_state(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return all(_is_same_state(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return all(map(_is_same_state, a, b))
    return bool((a == b).all()) if hasattr(a, "shape") else bool(a == b)


def referents(function: Any) -> tuple[Any, ...]:
    """Return what a function's result depends on besides its arguments, one level deep: to be compared later.

    Args:
        function: See ``values_of``.
    Returns:
        Numbers and strings, and the identity of everything else; empty for what can't be looked into.
    """
    return tuple(_fact(v) for v in values_of(function))


def values_of(function: Any) -> list[Any]:
    """List what a function refers to, one level deep.

    Args:
        function: Its globals, defaults and closure are looked at, a bound method's attributes, what a partial has, and
            the attributes of another object that can be called. Modules are looked at elsewhere.
    """
    found: list[Any] = []
    if isinstance(function, nn.Module):
        return found
    if isinstance(function, functools.partial):
        return [*function.args, *function.keywords.values(), function.func, *values_of(function.func)]
    if isinstance(function, types.MethodType):
        found += [function.__self__, *_attributes(function.__self__)]
        function = function.__func__
    elif callable(function) and not isinstance(function, types.FunctionType):
        found += _attributes(function)
        function = type(function).__call__
    if isinstance(function, types.FunctionType):
        found += [function.__globals__.get(n) for n in function.__code__.co_names]
        found += [_contents(cell) for cell in function.__closure__ or ()]
        found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return found


def _attributes(value: Any) -> list[Any]:
    return list(vars(value).values()) if hasattr(value, "__dict__") else []


def _fact(value: Any) -> Any:
    if isinstance(value, (int, float, str, bool)):
        return type(value), value
    if type(value) is Tensor and is_dense(value):
        # What is on the host goes into a recording as a number.
        return id(value), value.data_ptr(), version_of(value) if value.device.type == "cpu" else 0
    return id(value)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
