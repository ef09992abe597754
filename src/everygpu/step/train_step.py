"""A whole training step in one call."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everygpu import comm, tree
from everygpu.errors import EveryGPUError, LossError, OptimizerError, OptionError
from everygpu.parallel.data_parallel import DataParallel
from everygpu.parallel.sharded_batch import ShardedBatch
from everygpu.step.holders import Holder, ShardedHolder, WholeHolder
from everygpu.step.partial_grads import refusing_partial_grads
from everygpu.step.sharded_optimizer import ShardedOptimizer
from everygpu.step.shards import can_shard
from everygpu.step.stats import StepStats, Stopwatch
from everygpu.step.update import LossScale, clip, multiply, total_norm

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
        model: A module, for every device there is, or a ``DataParallel``.
        loss: Called as ``loss(output, *targets)``, returns one number, the mean over the batch; None when the
            model returns the loss itself: as a number, or under ``["loss"]`` or ``.loss``.
        optimizer: A torch optimizer, or a ``ShardedOptimizer``. Schedulers and edits of its groups take effect at
            the next update; its ``state_dict()`` is torch's own. Those that ``ShardedOptimizer`` can't spread step
            on the primary device.
        precision: ``"fp32"``; ``"bf16"`` or ``"fp16"``: forward and loss run under autocast. Under ``"fp16"`` the
            loss is scaled, and updates with gradients that are not finite are left out.
        accumulate: How many calls make one update, with the mean of their gradients.
        clip_norm: The largest norm the whole gradient may have; longer ones are scaled down.
        compile: Run replicas compiled; see ``DataParallel``'s ``engine``.
    Raises:
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
    ) -> None:
        _check_options(loss, precision, accumulate, clip_norm)
        self.model = _wrap(model, compile=compile)
        self.loss = loss
        self.optimizer = optimizer
        self.accumulate = accumulate
        self.clip_norm = clip_norm
        self._holder = _make_holder(self.model, optimizer)
        self._home = self.model.device_ids[0]
        self._dtype = PRECISIONS[precision]
        self._scale = LossScale(self._home) if precision == "fp16" else None
        self._num_batches = 0
        self._num_steps = 0
        self._num_skipped = torch.zeros((), device=self._home)
        self._last_loss = self._last_norm = torch.full((), float("nan"), device=self._home)
        self._stopwatch = Stopwatch(self._home)

    def __call__(self, inputs: Any, *targets: Any, **kwargs: Any) -> Tensor:
        """Train on one batch.

        Args:
            inputs: What the model is called with: a tuple as its positional arguments, a dict as keyword arguments,
                anything else as its one argument. With ``loss=None``, the targets follow as positional arguments.
            *targets: What the loss is called with after the output; split by rows as the inputs are.
            **kwargs: Further keyword arguments of the model.
        Returns:
            The loss, shape (), detached. Reading it waits for the device; not reading it doesn't.
        Raises:
            LossError: the loss is not one number, or asks for gradients of parameters.
            Exception: what the model or the loss raised; parameters are then as before, and what was accumulated
                for this update is dropped.
        """
        try:
            self._holder.prepare()
            if self._num_batches == 0:
                self._holder.begin()
            loss = self._learn(inputs, targets, kwargs)
        except BaseException:
            self._num_batches = 0
            raise
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
            loss, output = self._compute(inputs, targets, kwargs)
        return Evaluation(loss, output)

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

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise EveryGPUError(
            "TrainStep: can't be copied or pickled. Copy the model and the optimizer together, and make a new one."
        )

    def _learn(self, inputs: Any, targets: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        self._stopwatch.start()
        self._holder.lend()
        try:
            with torch.enable_grad():
                loss, _ = self._compute(inputs, targets, kwargs)
                share = loss / self.accumulate if self.accumulate > 1 else loss
                self._stopwatch.mark("forward")
                torch.autograd.backward(share if self._scale is None else self._scale.scale(share))
        finally:
            self._holder.withdraw()
        self._stopwatch.mark("backward")
        self._last_loss = loss.detach()
        return self._last_loss

    def _compute(self, inputs: Any, targets: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        args, named = _arguments(inputs, targets if self.loss is None else ())
        with self._autocast():
            output = self._holder.forward(*args, **named, **kwargs)
            if self.loss is None:
                return _as_number(_loss_in(output)), output
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


def _make_holder(model: DataParallel, optimizer: Any) -> Holder:
    if isinstance(optimizer, ShardedOptimizer):
        return ShardedHolder(model, optimizer)
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
    if len(model.device_ids) == 1:
        return WholeHolder(model, optimizer)
    if not can_shard(optimizer):
        logger.info("TrainStep: %s can't be spread; it steps on %s.", type(optimizer).__name__, model.device_ids[0])
        return WholeHolder(model, optimizer)
    return ShardedHolder(model, ShardedOptimizer.of(optimizer, model.device_ids))


def _arguments(inputs: Any, more: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn the first argument of a step into the model's arguments."""
    if isinstance(inputs, tuple) and not hasattr(inputs, "_fields"):
        return (*inputs, *more), {}
    if isinstance(inputs, dict) and not more:
        return (), {str(k): v for k, v in inputs.items()}
    return (inputs, *more), {}


def _loss_in(output: Any) -> Any:
    """Find the loss in what a model returned."""
    if isinstance(output, Tensor):
        return output
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        found = output[0]
    if found is None:
        raise LossError(
            f"TrainStep: with loss=None the model must return its loss as a tensor, under ['loss'] or as .loss, "
            f"got {type(output).__qualname__}. Pass a loss to TrainStep, or return it from forward."
        )
    return found


def _as_number(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise LossError(f"TrainStep: the loss must be a tensor, got {type(loss).__qualname__}.")
    if isinstance(loss, ShardedBatch) and loss.shard_rows is not None:
        return loss.mean()  # one number per replica, weighed by rows
    if loss.numel() != 1:
        raise LossError(
            f"TrainStep: the loss must be one number, got shape {tuple(loss.shape)}. "
            f"Take its mean, as with reduction='mean'."
        )
    return loss.reshape(())


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
