"""A whole training step in one call."""

import logging
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everygpu import comm, tree
from everygpu.errors import EveryGPUError, LossError, OptimizerError, OptionError
from everygpu.keys import unwrap
from everygpu.parallel.cuda_graphs.guards import referents, values_of
from everygpu.parallel.cuda_graphs.multi_gpu_graph import MultiGpuGraph
from everygpu.parallel.cuda_graphs.recorder import Capture
from everygpu.parallel.cuda_graphs.static_batch import Batch, StaticBatch
from everygpu.parallel.data_parallel import DataParallel
from everygpu.parallel.engines.thread_state import fresh_casts
from everygpu.parallel.scatter.split import ScatterSpec
from everygpu.parallel.sharded.batch import ShardedBatch
from everygpu.step.early_update import EarlyUpdate
from everygpu.step.partial_grads import refusing_partial_grads
from everygpu.step.sharded_optimizer import ShardedOptimizer
from everygpu.step.shards import can_shard
from everygpu.step.stats import Mark, StepStats, Stopwatch
from everygpu.step.update import LossScale, clip, multiply, total_norm
from everygpu.step.update_strategy import LocalUpdate, ShardedUpdate, UpdateStrategy

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

logger = logging.getLogger("everygpu")


class Evaluation(NamedTuple):
    """What ``TrainStep.evaluate`` returns."""

    loss: Tensor
    """Shape (): the mean over all rows."""
    output: Any
    """What the model returned."""


class TrainStep:
    """Forward, loss, backward, gradients added up, clipped, and the optimizer's step, on all devices, in one call.

        step = everygpu.TrainStep(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=3e-4))
        for x, y in loader:
            loss = step(x, y)

    Several devices give what one device gives on the whole batch. Each keeps its replica's parameters from step to
    step, updates 1/N of them and hands them out. Parameters written in between, by ``load_state_dict`` or in place,
    are noticed as far as torch counts the write: after ``p.data.clamp_()`` on GPUs call ``step.refresh()``.

    Args:
        model: A module, for every device there is, or a ``DataParallel``, whose ``bucket_cap_mb`` the step uses.
        loss: Called as ``loss(output, *targets)``, returns one number, the mean over the batch; None when the
            model returns the loss itself: as a number, or under ``["loss"]`` or ``.loss``. A number may have any
            shape with one element; several replicas' are weighed by their rows.
        optimizer: A torch optimizer, or a ``ShardedOptimizer``. Schedulers and edits of its groups take effect at
            the next update; its ``state_dict()`` is torch's own. Those that ``ShardedOptimizer`` can't spread step
            on the primary device.
        precision: ``"fp32"``; ``"bf16"`` or ``"fp16"``: forward and loss run under autocast. Under ``"fp16"`` the
            loss is scaled, and updates with gradients that are not finite are left out.
        accumulate: How many calls make one update, with the mean of their gradients.
        clip_norm: The largest norm the whole gradient may have; longer ones are scaled down.
        compile: Run replicas compiled; see ``DataParallel``'s ``engine``.
        capture: ``"auto"``: on GPUs, after a few steps on batches of one shape, the whole step is recorded as a CUDA
            graph over all devices, and launched by one call from then on, as long as nothing that it was made from
            changes; steps that can't be recorded run as they are. ``False``: never. ``True``: also where a module has
            hooks, which are then not called; raise where a step can't be recorded.
    Raises:
        CaptureError: under ``capture=True``, at a step that can't be recorded.
        ModuleError, DeviceError, PlacementError: the model can't be replicated; see ``DataParallel``.
        OptimizerError: this is no optimizer, or one that needs a closure; parameters share memory.
        OptionError: an option has no such value.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor] | None,
        optimizer: Optimizer,
        *,
        precision: str = "fp32",
        accumulate: int = 1,
        clip_norm: float | None = None,
        compile: bool = False,
        capture: bool | str = "auto",
    ) -> None:
        _check_options(loss, precision, accumulate, clip_norm)
        self.model = _wrap(model, compile=compile)
        if loss is None:
            _check_gathering(self.model)
        self.loss = loss
        self.optimizer = optimizer
        self.accumulate = accumulate
        self.clip_norm = clip_norm
        can_capture = _can_capture(self.model, capture)
        self._holder = _make_holder(self.model, optimizer, captures=can_capture)
        self._home = self.model.device_ids[0]
        self._dtype = PRECISIONS[precision]
        self._scale = LossScale(self._home) if precision == "fp16" else None
        self._num_batches = 0
        self._num_steps = 0
        self._num_skipped = torch.zeros((), dtype=torch.float32, device=self._home)
        self._last_loss = self._last_norm = torch.full((), float("nan"), dtype=torch.float32, device=self._home)
        self._stopwatch = Stopwatch(self._home)
        self._capture = _make_capture(self, self._holder, must=capture is True) if can_capture else None

    def __call__(self, inputs: Any, *targets: Any, **kwargs: Any) -> Tensor:
        """Train on one batch.

        Args:
            inputs: What the model is called with: a tuple as its positional arguments, a dict or UserDict as keyword
                arguments, anything else as its one argument. With ``loss=None``, the targets follow as positional
                arguments.
            *targets: What the loss is called with after the output; split by rows as the inputs are.
            **kwargs: Further keyword arguments of the model.
        Returns:
            The loss, shape (), detached. Reading it waits for the device; not reading it doesn't.
        Raises:
            LossError: the loss is not one number, or asks for gradients of parameters.
            Exception: what the model or the loss raised; parameters are then as before, and what was accumulated
                for this update is dropped.
        """
        batch = _as_batch(inputs, targets, kwargs, with_loss=self.loss is not None)
        try:
            num_steps = self._num_steps
            loss = None if self._capture is None else self._capture.run(batch)
            if loss is None:
                self._holder.prepare()
                if self._num_batches == 0:
                    self._holder.begin()
                loss = self._learn(batch)
        except BaseException:
            self._num_batches = 0
            raise
        self._last_loss = loss
        if self._num_steps == num_steps:  # a recording may have had the update in it
            self._num_batches += 1
            if self._num_batches == self.accumulate:
                self.flush()
        return loss

    def flush(self) -> None:
        """Update from the batches seen since the last update, though they are fewer than ``accumulate``."""
        seen, self._num_batches = self._num_batches, 0
        if seen:
            self._update(self.accumulate / seen)

    def evaluate(self, inputs: Any, *targets: Any, **kwargs: Any) -> Evaluation:
        """Run the model and the loss in eval mode, without gradients; arguments as for a call.

        Returns:
            The loss, shape (), and the model's output.
        """
        self._holder.prepare()
        with _evaluating(self.model), torch.no_grad():
            batch = _as_batch(inputs, targets, kwargs, with_loss=self.loss is not None)
            try:
                return Evaluation(*self._compute(batch))
            except torch.OutOfMemoryError:
                # Recordings hold the memory of a step each; they can be made again.
                if self._capture is None or not self._capture.forget():
                    raise
            return Evaluation(*self._compute(batch))

    def refresh(self) -> None:
        """Send the parameters to all devices, after a write that torch doesn't count, such as ``p.data.clamp_()``."""
        self._holder.refresh()

    def stats(self) -> StepStats:
        """Return the figures of the last step; waits for the device."""
        return StepStats(
            loss=self._last_loss.item(),
            grad_norm=self._last_norm.item(),
            num_steps=self._num_steps,
            num_skipped=int(self._num_skipped.item()),
            phase_s=self._stopwatch.read(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what model and optimizer don't hold: counters, and the scale of the loss under ``"fp16"``."""
        state: dict[str, Any] = {"num_steps": self._num_steps, "num_skipped": int(self._num_skipped.item())}
        if self._scale is not None:
            state["scale"] = self._scale.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take on a state that ``state_dict`` returned; batches seen since the last update are dropped."""
        self._num_batches = 0
        self._num_steps = state["num_steps"]
        self._num_skipped.fill_(state["num_skipped"])
        if self._scale is not None and "scale" in state:
            self._scale.load_state_dict(state["scale"])

    def __repr__(self) -> str:
        loss = getattr(self.loss, "__name__", None if self.loss is None else type(self.loss).__name__)
        precision = next(name for name, dtype in PRECISIONS.items() if dtype is self._dtype)
        return (
            f"TrainStep(model={type(unwrap(self.model)).__name__}, loss={loss}, "
            f"optimizer={type(self.optimizer).__name__}, device_ids={[str(d) for d in self.model.device_ids]}, "
            f"precision={precision!r}, accumulate={self.accumulate}, clip_norm={self.clip_norm}, "
            f"num_steps={self._num_steps})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise EveryGPUError(
            "TrainStep: can't be copied or pickled. Copy the model and the optimizer together, and make a new one."
        )

    def _learn(self, batch: Batch, update: EarlyUpdate | None = None) -> Tensor:
        self._stopwatch.start()
        if update is None:
            self._holder.lend()
        try:
            with torch.enable_grad(), fresh_casts():
                loss, _ = self._compute(batch)
                share = loss / self.accumulate if self.accumulate > 1 else loss
                self._stopwatch.mark("forward")
                with nullcontext() if update is None else update.watching():
                    torch.autograd.backward(share if self._scale is None else self._scale.scale(share))
        finally:
            if update is None:
                self._holder.withdraw()
        self._stopwatch.mark("backward")
        return loss.detach()

    def _compute(self, batch: Batch) -> tuple[Tensor, Any]:
        args, kwargs, targets = batch
        with self._autocast():
            output = self._holder.forward(*args, **kwargs)
            if self.loss is None:
                return _as_number(_loss_in(output), is_models=True), output
            with refusing_partial_grads(output, self._holder.leaves):
                return _as_number(self.loss(output, *self._at_home(targets))), output

    def _at_home(self, targets: tuple[Any, ...]) -> Any:
        """Put targets where the output is; what is spread over the devices already stays."""

        def move(leaf: Any) -> Any:
            plain = isinstance(leaf, Tensor) and not isinstance(leaf, ShardedBatch)
            return comm.copy(leaf, self.model.output_device) if plain else leaf

        return tree.map_leaves(move, targets)

    @torch.no_grad()
    def _update(self, factor: float) -> None:
        whole = self._scale is None and self.clip_norm is None
        if not (whole and self._holder.fuse(factor)):
            self._update_in_turn(factor)
        self._num_steps += 1
        self._stopwatch.mark("update")

    def _update_in_turn(self, factor: float) -> None:
        shares = self._holder.reduce()
        self._stopwatch.mark("reduce")
        if factor != 1:
            multiply(shares, factor)
        found_inf = None if self._scale is None else self._scale.unscale(shares)
        if self.clip_norm is not None:
            self._last_norm = total_norm(shares, self._home)
            clip(shares, self._last_norm, self.clip_norm)
        self._holder.apply(found_inf)
        if self._scale is not None and found_inf is not None:
            self._scale.update(found_inf)
            self._num_skipped += found_inf

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._dtype is None else torch.autocast(self._home.type, self._dtype)


class _Recorded(NamedTuple):
    """What a recording of a step has in it."""

    loss: Tensor
    touched: set[int]
    """Parameters that get a gradient."""
    update: EarlyUpdate | None
    """None where that is left to be done."""
    marks: dict[str, Mark]
    norm: Tensor | None = None
    """Of the gradient, where it is clipped."""


class RecordableStep:
    """A ``TrainStep`` as ``Capture`` sees it: the backward, and the update where kernels do it all.

    Args:
        step: Whose work it is.
        holder: The step's.
    """

    def __init__(self, step: TrainStep, holder: ShardedUpdate) -> None:
        self._step = step
        self._holder = holder
        self._overlaps = True
        # Parameters that take part in what is being recorded, where these aren't the last step's.
        self._expected: set[int] | None = None
        self._is_surprised = False

    def roots(self) -> list[nn.Module]:
        step = self._step
        found = [step.model.module, step.loss, *values_of(step.loss)]
        return list({id(m): m for m in found if isinstance(m, nn.Module)}.values())

    def state(self) -> Any:
        step, model = self._step, self._step.model
        rules = (model.split, model.dim, model.engine, model.gather, model.buffers_rule, model.output_device)
        options = (step.accumulate, step.clip_norm, *rules)
        return self._holder.recorded_state(), options, id(step.loss), referents(step.loss)

    def unsupported_reason(self) -> str | None:
        return self._holder.why_not_recordable()

    def prepare(self) -> EarlyUpdate | None:
        self._holder.prepare()
        return self._holder.early_update(self._expected, overlaps=self._overlaps) if self._updates_at_once() else None

    def record(self, graph: MultiGpuGraph, batch: StaticBatch, prepared: EarlyUpdate | None) -> _Recorded:
        return graph.record(lambda: self._run(batch.read(), prepared))

    def _run(self, batch: Batch, update: EarlyUpdate | None) -> _Recorded:
        step, before = self._step, self._holder.grad_versions()
        loss = step._learn(batch, update)
        if update is None:
            # Not those of the batches before, which this update may have, too.
            return _Recorded(loss, self._holder.touched(before), None, step._stopwatch.marks)
        touched = update.touched()
        if touched != set(update.rows.row_of):
            self._is_surprised, self._expected = self._expected is None, touched
            raise OptimizerError("TrainStep: other parameters take part at every attempt.")
        self._expected = None
        norm = update.launch(step.clip_norm)
        step._stopwatch.mark("update")
        return _Recorded(loss, touched, update, step._stopwatch.marks, norm)

    def try_otherwise(self) -> bool:
        if self._is_surprised:
            self._is_surprised = False
            return True
        # A parameter may be needed in backward after its own gradient is there: then updates have to wait.
        overlapped, self._overlaps = self._overlaps, False
        return overlapped and self._updates_at_once()

    def give_up(self) -> None:
        self._step.model.make_graphs(True)

    def begin(self, recorded: _Recorded) -> bool:
        if not self._holder.is_ready():
            return False
        if recorded.update is None:
            if self._step._num_batches == 0:
                self._holder.begin()
            return True
        recorded.update.write_tables()
        rows = self._holder.prepare_update(recorded.touched)
        return rows is not None and rows.row_of == recorded.update.rows.row_of

    def finish(self, recorded: _Recorded) -> Tensor:
        self._step._stopwatch.marks = dict(recorded.marks)
        if recorded.update is None:
            self._holder.note_grads(recorded.touched)
        else:
            self._holder.finish_update(recorded.update.rows)
            self._step._num_steps += 1
            if recorded.norm is not None:
                self._step._last_norm = recorded.norm.clone()
        return recorded.loss.clone()

    def _updates_at_once(self) -> bool:
        step = self._step
        return step.accumulate == 1 and step._scale is None


def _check_options(loss: Any, precision: Any, accumulate: Any, clip_norm: Any) -> None:
    if loss is not None and not callable(loss):
        raise OptionError(
            f"TrainStep: loss must be callable as loss(output, *targets), or None when the model returns it, "
            f"got {type(loss).__qualname__}. Pass for instance torch.nn.CrossEntropyLoss()."
        )
    if precision not in PRECISIONS:
        raise OptionError(f"TrainStep: precision must be one of {tuple(PRECISIONS)}, got {precision!r}.")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise OptionError(f"TrainStep: accumulate must be a whole number of 1 or more, got {accumulate!r}.")
    if clip_norm is not None and not (isinstance(clip_norm, (int, float)) and clip_norm > 0):
        raise OptionError(f"TrainStep: clip_norm must be a number above 0, or None, got {clip_norm!r}.")


def _wrap(model: nn.Module, *, compile: bool) -> DataParallel:
    if not isinstance(model, DataParallel):
        return DataParallel(model, engine="compile" if compile else "auto")
    if compile and model.engine != "compile":
        raise OptionError(
            f"TrainStep: compile=True needs a DataParallel with engine='compile', got engine={model.engine!r}. "
            f"Pass it there, or pass the bare module here."
        )
    return model


def _check_gathering(model: DataParallel) -> None:
    """Refuse to weigh replicas' losses where nobody knows of how many rows each is."""
    if model.gather == "joined" and len(model.device_ids) > 1:
        raise OptionError(
            "TrainStep: loss=None needs a DataParallel with gather='sharded', which knows the rows behind each loss, "
            "got gather='joined'. Pass gather='sharded' there, or a loss here."
        )


def _can_capture(model: DataParallel, capture: Any) -> bool:
    """Tell whether steps may be recorded: only where there are CUDA graphs."""
    if not isinstance(capture, bool) and capture != "auto":
        raise OptionError(f"TrainStep: capture must be 'auto', True or False, got {capture!r}.")
    on_gpus = all(d.type == "cuda" for d in model.device_ids)
    if capture is True and not on_gpus:
        raise OptionError(
            f"TrainStep: capture=True needs CUDA devices, got {', '.join(str(d) for d in model.device_ids)}. "
            f"Pass capture='auto'."
        )
    return on_gpus and capture is not False


def _make_capture(step: TrainStep, holder: UpdateStrategy, *, must: bool) -> Capture[Tensor] | None:
    if not isinstance(holder, ShardedUpdate):
        logger.info("TrainStep: steps run without CUDA graphs: the optimizer can't be spread.")
        return None
    model = step.model
    model.make_graphs(False)
    route = ScatterSpec(devices=tuple(model.device_ids), dim=model.dim, split=model.split)
    return Capture(RecordableStep(step, holder), "TrainStep", route, must=must)


def _make_holder(model: DataParallel, optimizer: Any, *, captures: bool) -> UpdateStrategy:
    if isinstance(optimizer, ShardedOptimizer):
        return ShardedUpdate(model, optimizer, fixed=captures)
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(
            f"TrainStep: needs a torch optimizer or a ShardedOptimizer, got {type(optimizer).__qualname__}. "
            f"Pass for instance torch.optim.AdamW(model.parameters())."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "TrainStep: the optimizer must step without a closure, got LBFGS, which evaluates the loss several times "
            "in a step. Use DataParallel in an ordinary loop."
        )
    if len(model.device_ids) == 1 and not captures:
        return LocalUpdate(model, optimizer)
    if not can_shard(optimizer):
        logger.info("TrainStep: %s can't be spread; it steps on %s.", type(optimizer).__name__, model.device_ids[0])
        return LocalUpdate(model, optimizer)
    return ShardedUpdate(model, ShardedOptimizer.of(optimizer, model.device_ids), fixed=captures)


def _as_batch(inputs: Any, targets: tuple[Any, ...], kwargs: dict[str, Any], *, with_loss: bool) -> Batch:
    """Turn the arguments of a step into the model's, and what the loss takes after the output."""
    more, left = ((), targets) if with_loss else (targets, ())
    if isinstance(inputs, tuple) and not hasattr(inputs, "_fields"):
        return (*inputs, *more), kwargs, left
    if isinstance(inputs, (dict, UserDict)) and not more:  # Hugging Face's collators return a UserDict
        return (), {**{str(k): v for k, v in inputs.items()}, **kwargs}, left
    return (inputs, *more), kwargs, left


def _loss_in(output: Any) -> Any:
    """Find the loss in what a model returned."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):  # an attribute that is no item; what __getattr__ raises is its own affair
        found = output.get("loss", getattr(output, "__dict__", {}).get("loss"))
    else:
        found = getattr(output, "loss", None)
    if found is None and isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        found = output[0]
    if found is None:
        raise LossError(
            f"TrainStep: with loss=None the model must return its loss as a tensor, under ['loss'] or as .loss, "
            f"got {type(output).__qualname__}. Pass a loss to TrainStep, or return it from forward."
        )
    return found


def _as_number(loss: Any, *, is_models: bool = False) -> Tensor:
    if not isinstance(loss, Tensor):
        raise LossError(f"TrainStep: the loss must be a tensor, got {type(loss).__qualname__}.")
    if isinstance(loss, ShardedBatch) and (loss.shard_rows is not None or (is_models and _is_one_each(loss))):
        return loss.mean()  # one number per replica, weighed by rows
    if loss.numel() != 1:
        raise LossError(
            f"TrainStep: the loss must be one number, got shape {tuple(loss.shape)}. "
            f"Take its mean, as with reduction='mean'."
        )
    return loss.reshape(())


def _is_one_each(loss: ShardedBatch) -> bool:
    """Tell whether each replica returned one number, of one row each: of more rows the batch knows it itself."""
    return all(shard.numel() == 1 for shard in loss.shards)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to eval mode; afterwards each module is as it was."""
    training = [m for m in model.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True
