"""From the gradients of some batches to new parameters."""

import torch
from torch import Tensor

from everygpu import comm
from everygpu.progress import running
from everygpu.step.finite_check import MADE, SCALED, FiniteCheck
from everygpu.step.sharded_update import ShardedUpdate
from everygpu.step.update import LossScale, clip_factor, multiply


class Updater:
    """Adds gradients up, checks and clips them, and steps the optimizer."""

    def __init__(
        self,
        strategy: ShardedUpdate,
        home: torch.device,
        scale: LossScale | None,
        check: FiniteCheck,
    ) -> None:
        self.num_steps = 0
        self.norm = torch.full((), float("nan"), dtype=torch.float32, device=home)
        """Of the last gradient, before it was clipped."""
        self._strategy = strategy
        self._home = home
        self._made = torch.full((), MADE, dtype=torch.float32, device=home)
        self._scale = scale
        self._check = check
        self._losses: Tensor | None = None

    def add_loss(self, loss: Tensor) -> None:
        """Have an update left out where the loss of one of its batches isn't finite."""
        if self._check.is_on:
            self._losses = loss if self._losses is None else self._losses + loss

    def drop(self) -> None:
        """Forget the batches of this update."""
        self._losses = None

    @torch.no_grad()
    def run(self, factor: float | Tensor, clip_norm: float | None) -> None:
        """Update from all gradients since the last one, multiplied by a factor, then clipped."""
        losses, self._losses = self._losses, None
        self.num_steps += 1
        with running("update", self._home):
            self._run(factor, clip_norm, losses)

    def finish_recorded(self, status: Tensor, norm: Tensor | None) -> None:
        """Take note of an update that a recording has queued, and of its norm where that had to be known."""
        self.num_steps += 1
        if norm is not None:
            self.norm = norm.clone()  # a recording's own is written anew by each launch
        if self._check.is_on:
            self._check.submit(self.num_steps, status)

    def _run(self, factor: float | Tensor, clip_norm: float | None, losses: Tensor | None) -> None:
        looks = losses is not None and self._scale is None  # a scale looks at all itself
        shares = self._strategy.reduce()
        if isinstance(factor, Tensor) or factor != 1:
            multiply(shares, factor)
        found_inf = None if self._scale is None else self._scale.unscale(shares)
        if clip_norm is not None or looks:
            self.norm = self._strategy.norm(shares)
        if clip_norm is not None:
            multiply(shares, clip_factor(self.norm, clip_norm))
        value = None if losses is None else self._judge(losses, found_inf)
        if value is not None:
            found_inf = torch.ne(value, MADE, out=torch.empty_like(value))
        self._strategy.apply(found_inf)
        if self._scale is not None and found_inf is not None:
            self._scale.update(found_inf)
        if value is not None:
            self._check.submit(self.num_steps, value)

    def _judge(self, losses: Tensor, found_inf: Tensor | None) -> Tensor:
        """Return the value of the status; see ``FiniteCheck``."""
        value = torch.add(self._made, comm.copy(losses, self._home), alpha=0)
        if self._scale is None or found_inf is None:
            return torch.add(value, self.norm, alpha=0).float()
        # A scale that is too large is lowered. Where it isn't, the gradients themselves are not finite.
        is_bad = value.isnan() | ((found_inf != 0) & (self._scale.value < 1))
        return torch.where(is_bad, float("nan"), torch.where(found_inf != 0, SCALED, MADE)).float()
