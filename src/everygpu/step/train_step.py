"""A whole training step in one call."""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everygpu import comm
from everygpu.errors import CopyError, LossError
from everygpu.keys import unwrap
from everygpu.parallel.cuda_graphs.static_batch import Batch
from everygpu.parallel.engines.thread_state import fresh_casts
from everygpu.parallel.ranks import check_equal_on_ranks, copy_from_first
from everygpu.parallel.replicas.module_tree import evaluating
from everygpu.progress import running
from everygpu.step.capturable_step import make_capture
from everygpu.step.early_update import EarlyUpdate
from everygpu.step.finite_check import FiniteCheck, Kept, UpdateStatus, keep_statistics, put_back_unless_finite
from everygpu.step.loss import (
    BatchWeights,
    as_batch,
    as_number,
    at_device,
    check_call,
    loss_in,
    refusing_partial_grads,
    roots_of,
)
from everygpu.step.options import (
    PRECISIONS,
    autocast,
    can_capture,
    check_model,
    check_options,
    make_strategy,
    own_precision,
    wrap_model,
)
from everygpu.step.replica_check import make_check
from everygpu.step.update import LossScale, clip_factor, find_inf, multiply

logger = logging.getLogger("everygpu")


class Evaluation(NamedTuple):
    """What ``TrainStep.evaluate`` returns."""

    loss: Tensor
    """Shape (): the mean over all rows."""
    output: Any
    """What the model returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Figures of the last step, as ``TrainStep.stats`` returns them.

    ::

        step = everygpu.TrainStep(model, criterion, optimizer)
        step(x, y)
        stats = step.stats()  # waits for the device
        print(f"update {stats.num_steps}: loss {stats.loss:.3f}, norm {stats.grad_norm:.2f}")
    """

    loss: float
    """Of the last batch."""
    grad_norm: float
    """Of the whole gradient at the last update, before clipping; nan without ``clip_norm``. ``clip_norm=math.inf`` has
    it computed and clips nothing."""
    num_steps: int
    """Updates so far, those skipped included."""
    num_skipped: int
    """Updates left out because the loss or a gradient was not finite."""
    engine: str = ""
    """What ran the last step: ``"capture"`` if it was replayed as captured, else ``DataParallel.engine_in_use``."""


class TrainStep:
    """Forward, loss, backward, reduction, clipping and the optimizer's step on all devices, in one call::

        step = everygpu.TrainStep(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=3e-4))
        for x, y in loader:
            loss = step(x, y)

    Several devices give the result of one device on the whole batch. Each keeps a replica of the parameters, updates
    1/N of them and sends these to the others. Other writes to parameters are noticed: a step of any torch optimizer, a
    load, writes in place that torch counts, and on the CPU any other. After ``p.data.clamp_()`` or a kernel of your own
    on GPUs, call ``step.refresh()``.

    Args:
        model: A module, to use all devices, or a ``DataParallel``, whose ``bucket_cap_mb`` the step uses.
        loss: Called as ``loss(output, *targets)``, returns one number, the mean over the batch. None if the model
            returns the loss: as a number, or under ``["loss"]`` or ``.loss``. A number may have any shape with one
            element; those of several replicas are weighted by their rows.
        optimizer: A torch optimizer or a ``ShardedOptimizer``. Schedulers and edits of its groups take effect at the
            next update. Its ``state_dict()`` is torch's own. One that can't be sharded steps on the primary device.
        precision: ``"fp32"``, or ``"bf16"`` or ``"fp16"`` to run forward and loss under autocast. ``"fp16"`` scales
            the loss and skips updates with gradients that aren't finite.
        accumulate: How many calls make one update, from the mean over all their rows; ``gradient_accumulation_steps``
            in transformers and Accelerate.
        clip_norm: The largest norm of the whole gradient; larger ones are scaled down to it. The ``max_norm`` of
            ``torch.nn.utils.clip_grad_norm_``, and ``max_grad_norm`` in transformers.
        compile: Run replicas compiled; see ``DataParallel``'s ``engine``.
        capture: ``"auto"`` captures the whole step on GPUs as a CUDA graph over all devices, after a few steps on
            batches of one shape, and replays it with one call until something changes that it was made from. Steps
            that can't be captured run eagerly. ``False`` never captures. ``True`` also captures modules with hooks,
            which are then not called, and raises if a step can't be captured.
        on_nonfinite: What to do with an update whose loss or gradients are nan or infinite. ``"skip"`` skips it on the
            devices, without waiting, and warns; the tenth in a row raises. ``"raise"`` skips it, and a call soon after
            raises. ``"ignore"`` doesn't check.
        weight: Called with inputs and targets, as ``weight(x, mask, y)`` for ``step((x, mask), y)``, returns how much
            the batch counts in an update and among ranks, such as its tokens that aren't ignored. By default torch's
            ``cross_entropy`` and ``nll_loss`` count what they average over, and everything else counts rows.
        check_every: Compare the parameters of all replicas and ranks bit by bit before every so many updates; see
            "Flipped bits" in docs/reliability.md.
    Raises:
        CaptureError: with ``capture=True``, at a step that can't be captured.
        ModuleError, DeviceError, PlacementError: the model can't be replicated; see ``DataParallel``.
        OptimizerError: this is no optimizer, or one of another model, or one that needs a closure; or parameters share
            memory.
        NonFiniteError: ten updates in a row were skipped; with ``on_nonfinite="raise"`` one was, on GPUs among the last
            eight. ``everygpu run`` ends with exit code 5.
        OptionError: an option has no such value.
        DivergedError: from a step whose check finds parameters that differ.
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
        on_nonfinite: str = "skip",
        weight: Callable[..., float | Tensor] | None = None,
        check_every: int | None = None,
    ) -> None:
        check_options(loss, precision, accumulate, clip_norm, on_nonfinite, weight, check_every)
        self.model = wrap_model(model, compile=compile)
        check_model(self.model, loss, optimizer, weight)
        precision = own_precision(self.model, precision, check_every)
        if self.model.rank_model is not None:
            for own in roots_of(self.model, loss)[1:]:
                copy_from_first(self.model.rank_model.group, check_equal_on_ranks(self.model.rank_model.group, own))
        if loss is None:  # a loss for each replica is weighted equally
            self.model.weight_rule = weight = weight or self.model.weight_rule
        self.loss = loss
        self.optimizer = optimizer
        self.accumulate = accumulate
        self.clip_norm = clip_norm
        captures = can_capture(self.model, capture)
        if capture is False:
            self.model.stop_capturing("TrainStep was made with capture=False")
        self._strategy = make_strategy(self.model, optimizer, captures=captures, checks=check_every is not None)
        self._home = self.model.replica_devices[0]
        self._dtype = PRECISIONS[precision]
        self._ranks = self.model.rank_model
        self._weights = BatchWeights(weight, self.model, loss)
        self._scale = LossScale(self._home) if precision == "fp16" else None
        self._num_steps = self._num_batches = 0
        self._was_replayed = False
        self._last_loss = torch.full((), float("nan"), device=self._home)
        self._losses: Tensor | None = None
        """Of the batches of this update, which is left out where one isn't finite."""
        self._norm: Tensor | None = None
        """Of the last gradient, before it was clipped, where that was computed."""
        self._made = torch.full((), UpdateStatus.APPLIED, dtype=torch.float32, device=self._home)
        self._finite_check = FiniteCheck(self._home, rule=on_nonfinite)
        self._replica_check = make_check(self.model, self._strategy, check_every)
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
            LossError: the loss is not one number, is one of several, or asks for gradients of parameters.
            Exception: what the model or the loss raised; parameters are then as before, and what was accumulated
                for this update is dropped.
        """
        batch = as_batch(inputs, targets, kwargs, with_loss=self.loss is not None)
        try:
            num_steps = self._num_steps
            self._begin(batch)
            loss = None if self._capture is None else self._capture.run(batch)
            is_whole = loss is not None
            if loss is None:
                self._strategy.prepare()
                if self._num_batches == 0:
                    self._strategy.begin()
                with nullcontext() if self._capture is None else self._capture.running_eagerly():
                    loss = self._learn(batch)
            forward = self._strategy.captured_forward
            self._was_replayed = is_whole or (forward is not None and forward.was_replayed)
            loss, flags = self._weights.mean(loss, None if self._ranks is None else self._strategy.flags())
            self._strategy.take_flags(flags)
            self._last_loss = loss
            self._weights.end()
            if self._num_steps == num_steps:  # a capture may have had the update in it
                if self._finite_check.is_on:
                    seen = self._weights.leave_out_empty(loss, of_all_ranks=True)
                    self._losses = seen if self._losses is None else self._losses + seen
                if self.accumulate > 1:
                    self._strategy.fold()
                self._num_batches += 1
                if self._num_batches == self.accumulate:
                    self.flush()
            self._finite_check.look()
        except BaseException as error:
            self._num_batches = 0
            if isinstance(error, TypeError) and not targets and isinstance(inputs, tuple) and self.loss is not None:
                check_call(self.model.module, batch, error)
            raise
        return loss

    def flush(self) -> None:
        """Make an update from the batches since the last one, even if they are fewer than ``accumulate``."""
        seen, self._num_batches = self._num_batches, 0
        if seen:
            if self._replica_check is not None:
                self._replica_check.before_update()
            losses, self._losses = self._losses, None
            self._num_steps += 1
            with torch.no_grad(), running("update", self._home):
                self._update(self._weights.take_factor(), losses)

    def evaluate(self, inputs: Any, *targets: Any, **kwargs: Any) -> Evaluation:
        """Run the model and the loss in eval mode, without gradients; arguments as for a call.

        Returns:
            The loss, shape (), over the batches of all ranks, so every rank must call it; and the model's output.
        """
        self._strategy.refresh()
        with evaluating(self.model), torch.no_grad():
            batch = as_batch(inputs, targets, kwargs, with_loss=self.loss is not None)
            self._weights.begin(batch, self.accumulate)
            try:
                loss, output = self._compute(batch)
            except torch.OutOfMemoryError:
                # Captures hold the memory of a step each; they can be made again.
                if self._capture is None or not (self._capture.forget() or self._strategy.forget_captures()):
                    raise
                loss, output = self._compute(batch)
            if self._ranks is not None:
                self._weights.see(batch, loss)
            return Evaluation(self._weights.mean(loss)[0], output)

    def refresh(self) -> None:
        """Send the parameters to all devices, after a write that torch doesn't count, such as ``p.data.clamp_()``.

        ``evaluate`` does so itself.
        """
        self._strategy.refresh()

    def stats(self) -> StepStats:
        """Return the figures of the last step; waits for the device."""
        self._finite_check.wait()
        return StepStats(
            loss=self._last_loss.item(),
            grad_norm=float("nan") if self._norm is None or self.clip_norm is None else self._norm.item(),
            num_steps=self._num_steps,
            num_skipped=self._finite_check.num_skipped,
            engine="capture" if self._was_replayed else self.model.engine_in_use,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what model and optimizer don't hold: counters, and the loss scale of ``"fp16"``."""
        if self._num_batches:
            logger.warning(
                "TrainStep: saved after %d of %d batches of an update, whose gradients are not in the state: a resumed "
                "run continues without them. Save after a whole update, or call flush() before.",
                self._num_batches,
                self.accumulate,
            )
        self._finite_check.wait()
        state: dict[str, Any] = {"num_steps": self._num_steps, "num_skipped": self._finite_check.num_skipped}
        if self._scale is not None:
            state["scale"] = self._scale.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` returned; batches since the last update are dropped."""
        self._num_batches = 0
        self._num_steps = state["num_steps"]
        self._finite_check.restart(state["num_skipped"])
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
            "TrainStep: can't be copied or pickled, as it owns captures and memory of its devices. "
            "Copy the model and the optimizer together, and make a new one."
        )

    def _begin(self, batch: Batch) -> None:
        if self._num_batches == 0:  # what an update that was given up has left counts nothing
            self._losses = None
            self._weights.drop()
            self._strategy = self._strategy.settle()
        if self._ranks is not None:
            self._ranks.copy_buffers(self.model.module)
        self._weights.begin(batch, self.accumulate)

    def _learn(self, batch: Batch, update: EarlyUpdate | None = None) -> Tensor:
        if update is None:
            self._strategy.attach_grads()
        before: Kept = []
        if self._finite_check.is_on:
            before = keep_statistics(roots_of(self.model, self.loss), self.model.replica_devices)
        try:
            with torch.enable_grad(), fresh_casts():
                loss, _ = self._compute(batch)
                if not loss.requires_grad:
                    raise LossError(
                        "TrainStep: the loss takes no gradient: all parameters that it needs are frozen, or forward "
                        "runs under no_grad. Call model.requires_grad_(True), at least on some layers."
                    )
                self._weights.see(batch, loss)
                if before:
                    put_back_unless_finite(before, self._weights.leave_out_empty(loss))
                if update is not None and self._finite_check.is_on:
                    update.check(loss.detach())
                seed = self._weights.seed(loss)
                is_only = self.accumulate == 1
                watching = self._strategy.adding_up(loss, is_only=is_only) if update is None else update.watching()
                with watching, running("backward", self._home):
                    torch.autograd.backward(loss, seed if self._scale is None else self._scale.scale(seed))
        finally:
            if update is None:
                self._strategy.detach_grads()
        return loss.detach()

    def _compute(self, batch: Batch) -> tuple[Tensor, Any]:
        args, kwargs, targets = batch
        with autocast(self._home, self._dtype):
            output = self._strategy.forward(*args, **kwargs)
            if self.loss is None:
                return as_number(loss_in(output), is_models=True), output
            with refusing_partial_grads(output, self._strategy.leaves):
                if output is None:
                    raise LossError("TrainStep: the model returned None. Return its output at the end of forward.")
                return as_number(self.loss(output, *at_device(targets, self.model.output_device_obj))), output

    def _update(self, factor: float | Tensor, losses: Tensor | None) -> None:
        """Update from all gradients since the last one, multiplied by a factor, then clipped."""
        looks = losses is not None and self._scale is None  # a scale looks at all itself
        shares = self._strategy.reduce()
        if isinstance(factor, Tensor) or factor != 1:
            multiply(shares, factor)
        found_inf = None if self._scale is None else self._scale.unscale(shares)
        needs_norm = self.clip_norm is not None or (looks and self._strategy.asks_ranks)
        norm = self._norm = self._strategy.norm(shares) if needs_norm else None
        if norm is not None and self.clip_norm is not None:
            multiply(shares, clip_factor(norm, self.clip_norm))
        if norm is None and looks:
            found_inf = find_inf(shares, self._made)
        status = None if losses is None else self._judge(losses, found_inf)
        if status is not None:
            found_inf = torch.ne(status, UpdateStatus.APPLIED, out=torch.empty_like(status))
        self._strategy.apply(found_inf)
        if self._scale is not None and found_inf is not None:
            self._scale.update(found_inf)
        if status is not None:
            self._finite_check.submit(self._num_steps, status)

    def _judge(self, losses: Tensor, found_inf: Tensor | None) -> Tensor:
        """Return an update's status; see ``FiniteCheck``."""
        status = torch.add(self._made, comm.copy(losses, self._home), alpha=0)
        if self._scale is not None and found_inf is not None:
            # A scale that is too large is lowered. Where it isn't, the gradients themselves are not finite.
            is_bad = status.isnan() | ((found_inf != 0) & (self._scale.value < 1))
            scaled = torch.where(found_inf != 0, UpdateStatus.SCALE_TOO_LARGE, UpdateStatus.APPLIED)
            return torch.where(is_bad, float("nan"), scaled).float()
        if self._norm is not None:
            return torch.add(status, self._norm, alpha=0).float()
        return status if found_inf is None else torch.where(found_inf != 0, float("nan"), status).float()

    def _finish_replayed(self, status: Tensor, norm: Tensor | None) -> None:
        """Note an update that a replay has queued, and its norm if that was needed."""
        self._num_steps += 1
        self._norm = None if norm is None else norm.clone()  # each replay overwrites the capture's own
        if self._finite_check.is_on:
            self._finite_check.submit(self._num_steps, status)
