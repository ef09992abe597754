"""A whole training step in one call."""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everygpu import tree
from everygpu.errors import CopyError
from everygpu.keys import unwrap
from everygpu.parallel.cuda_graphs.static_batch import Batch
from everygpu.parallel.engines.thread_state import fresh_casts
from everygpu.parallel.replicas.module_tree import evaluating
from everygpu.parallel.scatter.batch_types import move_tree, open_known
from everygpu.parallel.sharded.batch import ShardedBatch
from everygpu.progress import running
from everygpu.step.early_update import EarlyUpdate
from everygpu.step.loss import as_batch, as_number, loss_in
from everygpu.step.options import (
    PRECISIONS,
    can_capture,
    check_gathering,
    check_options,
    make_strategy,
    wrap_model,
)
from everygpu.step.partial_grads import refusing_partial_grads
from everygpu.step.recordable_step import make_capture
from everygpu.step.stats import Evaluation, StepStats, Stopwatch
from everygpu.step.update import LossScale, clip, multiply, total_norm
from everygpu.step.weights import BatchWeights, Weight

logger = logging.getLogger("everygpu")


class TrainStep:
    """Forward, loss, backward, gradients added up, clipped, and the optimizer's step, on all devices, in one call::

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
        accumulate: How many calls make one update, with the mean over all of their rows.
        clip_norm: The largest norm the whole gradient may have; longer ones are scaled down.
        compile: Run replicas compiled; see ``DataParallel``'s ``engine``.
        capture: ``"auto"``: on GPUs, after a few steps on batches of one shape, the whole step is recorded as a CUDA
            graph over all devices, and launched by one call from then on, as long as nothing that it was made from
            changes; steps that can't be recorded run as they are. ``False``: never. ``True``: also where a module has
            hooks, which are then not called; raise where a step can't be recorded.
        weight: Called as the step is, returns how much the batch counts among those of an update and of all ranks: what
            the loss is the mean of, such as the number of tokens that aren't ignored; the batch's rows when left out.
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
        weight: Weight | None = None,
    ) -> None:
        check_options(loss, precision, accumulate, clip_norm, weight)
        self.model = wrap_model(model, compile=compile)
        if loss is None:
            check_gathering(self.model)
        self.loss = loss
        self.optimizer = optimizer
        self.accumulate = accumulate
        self.clip_norm = clip_norm
        captures = can_capture(self.model, capture)
        self._strategy = make_strategy(self.model, optimizer, captures=captures)
        self._home = self.model.replica_devices[0]
        self._dtype = PRECISIONS[precision]
        self._ranks = self.model.rank_model
        group = None if self._ranks is None else self._ranks.group
        self._weights = BatchWeights(weight, group, self._home, self.model.dim, len(self.model.device_ids))
        self._scale = LossScale(self._home) if precision == "fp16" else None
        self._num_batches = self._num_steps = 0
        self._was_launched = False
        self._num_skipped = torch.zeros((), dtype=torch.float32, device=self._home)
        self._last_loss = self._last_norm = torch.full((), float("nan"), dtype=torch.float32, device=self._home)
        self._stopwatch = Stopwatch(self._home)
        self._capture = make_capture(self, self._strategy, must=capture is True) if captures else None

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
        batch = as_batch(inputs, targets, kwargs, with_loss=self.loss is not None)
        with nullcontext() if self._ranks is None else self._ranks.group.telling(self._home):
            return self._train(batch)

    def _train(self, batch: Batch) -> Tensor:
        try:
            num_steps = self._num_steps
            self._begin(batch)
            loss = None if self._capture is None else self._capture.run(batch)
            self._was_launched = loss is not None
            if loss is None:
                self._strategy.prepare()
                if self._num_batches == 0:
                    self._strategy.begin()
                loss = self._learn(batch)
            loss = self._weights.mean(loss)
        except BaseException:
            self._num_batches = 0
            self._weights.drop()
            raise
        self._last_loss = loss
        self._weights.end()
        if self._num_steps == num_steps:  # a recording may have had the update in it
            self._num_batches += 1
            if self._num_batches == self.accumulate:
                self.flush()
        return loss

    def flush(self) -> None:
        """Update from the batches seen since the last update, though they are fewer than ``accumulate``."""
        seen, self._num_batches = self._num_batches, 0
        if seen:
            self._update(self._weights.take_factor())

    def evaluate(self, inputs: Any, *targets: Any, **kwargs: Any) -> Evaluation:
        """Run the model and the loss in eval mode, without gradients; arguments as for a call.

        Returns:
            The loss of all ranks' batches, shape (), and the model's output.
        """
        self._strategy.prepare()
        with evaluating(self.model), torch.no_grad():
            batch = as_batch(inputs, targets, kwargs, with_loss=self.loss is not None)
            self._weights.begin(batch, self.accumulate)
            try:
                loss, output = self._compute(batch)
            except torch.OutOfMemoryError:
                # Recordings hold the memory of a step each; they can be made again.
                if self._capture is None or not self._capture.forget():
                    raise
                loss, output = self._compute(batch)
            return Evaluation(self._weights.mean(loss), output)

    def refresh(self) -> None:
        """Send the parameters to all devices, after a write that torch doesn't count, such as ``p.data.clamp_()``."""
        self._strategy.refresh()

    def stats(self) -> StepStats:
        """Return the figures of the last step; waits for the device."""
        return StepStats(
            loss=self._last_loss.item(),
            grad_norm=self._last_norm.item(),
            num_steps=self._num_steps,
            num_skipped=int(self._num_skipped.item()),
            engine="graphs" if self._was_launched else self.model.engine_in_use,
            phase_s=self._stopwatch.read(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what model and optimizer don't hold: counters, and the scale of the loss under ``"fp16"``."""
        if self._num_batches:
            logger.warning(
                "TrainStep: saved after %d of %d batches of an update, whose gradients are not in the state: a resumed "
                "run goes on without them. Save after a whole update, or call flush() before.",
                self._num_batches,
                self.accumulate,
            )
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
            f"optimizer={type(self.optimizer).__name__}, device_ids={[str(d) for d in self.model.replica_devices]}, "
            f"precision={precision!r}, accumulate={self.accumulate}, clip_norm={self.clip_norm}, "
            f"num_steps={self._num_steps})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CopyError(
            "TrainStep: can't be copied or pickled, as it owns recordings and memory of its devices. "
            "Copy the model and the optimizer together, and make a new one."
        )

    def _begin(self, batch: Batch) -> None:
        if self._ranks is not None:
            self._ranks.copy_buffers(self.model.module)
        self._weights.begin(batch, self.accumulate)

    def _learn(self, batch: Batch, update: EarlyUpdate | None = None) -> Tensor:
        self._stopwatch.start()
        if update is None:
            self._strategy.attach_grads()
        try:
            with torch.enable_grad(), fresh_casts():
                loss, _ = self._compute(batch)
                share = self._weights.scale(loss)
                self._stopwatch.mark("forward")
                with nullcontext() if update is None else update.watching(), running("backward", self._home):
                    torch.autograd.backward(share if self._scale is None else self._scale.scale(share))
        finally:
            if update is None:
                self._strategy.detach_grads()
        self._stopwatch.mark("backward")
        return loss.detach()

    def _compute(self, batch: Batch) -> tuple[Tensor, Any]:
        args, kwargs, targets = batch
        with self._autocast():
            output = self._strategy.forward(*args, **kwargs)
            if self.loss is None:
                return as_number(loss_in(output), is_models=True), output
            with refusing_partial_grads(output, self._strategy.leaves):
                return as_number(self.loss(output, *self._at_home(targets))), output

    def _at_home(self, targets: tuple[Any, ...]) -> Any:
        """Put targets where the output is; what is spread over the devices already stays."""
        home = self.model.output_device_obj

        def move(leaf: Any) -> Any:
            return leaf if isinstance(leaf, ShardedBatch) else move_tree(leaf, home)

        return tree.map_leaves(move, targets, open_known)

    @torch.no_grad()
    def _update(self, factor: float | Tensor) -> None:
        whole = self._scale is None and self.clip_norm is None
        with running("update", self._home):
            if isinstance(factor, Tensor) or not (whole and self._strategy.fuse(factor)):
                self._update_in_turn(factor)
        self._num_steps += 1
        self._stopwatch.mark("update")

    def _update_in_turn(self, factor: float | Tensor) -> None:
        shares = self._strategy.reduce()
        self._stopwatch.mark("reduce")
        if isinstance(factor, Tensor) or factor != 1:
            multiply(shares, factor)
        found_inf = None if self._scale is None else self._scale.unscale(shares)
        if self.clip_norm is not None:
            self._last_norm = total_norm(shares, self._home)
            clip(shares, self._last_norm, self.clip_norm)
        self._strategy.apply(found_inf)
        if self._scale is not None and found_inf is not None:
            self._scale.update(found_inf)
            self._num_skipped += found_inf

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._dtype is None else torch.autocast(self._home.type, self._dtype)
