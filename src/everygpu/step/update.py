"""From gradients to new parameters: unscaled, clipped, applied, on every device that holds a share of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from everygpu import comm
from everygpu.torch_private.tensors import foreach_mul_, foreach_norm, unscale_, update_scale_

GROWTH, BACKOFF, GROWTH_INTERVAL, FIRST_SCALE = 2.0, 0.5, 2000, 2.0**16
"""``torch.amp.GradScaler``'s defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One device's part of the gradients."""

    device: torch.device
    grads: list[Tensor]


class LossScale:
    """Keeps small gradients of float16 from vanishing: the loss is multiplied, the gradients divided again.

    Args:
        device: Where the loss is.
    Source:
        ``torch.amp.GradScaler``, whose numbers and state these are. Here nothing waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), FIRST_SCALE, dtype=torch.float32, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss; what was multiplied before the scale changes must be divided before, too."""
        return loss * comm.copy(self.value, loss.device)

    def unscale(self, shares: Sequence[Share]) -> Tensor:
        """Divide gradients in place.

        Returns:
            Shape (): 1 where any gradient is not finite, else 0.
        """
        found = [self._unscale(share) for share in shares if share.grads]
        home = self.value.device
        copies = [comm.copy(f, home) for f in found]
        return torch.stack(copies).amax() if copies else torch.zeros_like(self.value)

    def update(self, found_inf: Tensor) -> None:
        """Lower the scale after a step that was skipped, raise it after many that were not."""
        update_scale_(self.value, self._growth, found_inf, GROWTH, BACKOFF, GROWTH_INTERVAL)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in ``torch.amp.GradScaler``'s format."""
        return {
            "scale": self.value.item(),
            "growth_factor": GROWTH,
            "backoff_factor": BACKOFF,
            "growth_interval": GROWTH_INTERVAL,
            "_growth_tracker": int(self._growth.item()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take on a scale that this class or a ``torch.amp.GradScaler`` saved."""
        self.value.fill_(state["scale"])
        self._growth.fill_(state["_growth_tracker"])

    def _unscale(self, share: Share) -> Tensor:
        found_inf = torch.zeros((), dtype=torch.float32, device=share.device)
        inverse = self.value.double().reciprocal().float()
        unscale_(share.grads, found_inf, comm.copy(inverse, share.device))
        return found_inf


def total_norm(shares: Sequence[Share], home: torch.device) -> Tensor:
    """Return the norm of all gradients as if they were one vector, shape ().

    Source:
        ``torch.nn.utils.get_total_norm``, over several devices.
    """
    norms = [comm.copy(n, home) for share in shares for n in _norms(share.grads)]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), dtype=torch.float32, device=home)


def nan_where(found_inf: Tensor) -> Tensor:
    """Return a factor with which the kernels of a fused update leave all as it was where ``found_inf`` is not 0."""
    return torch.where(found_inf != 0, float("nan"), 1.0)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return what a gradient of some norm is multiplied by for it to be at most ``max_norm``; shape ().

    Source:
        ``torch.nn.utils.clip_grads_with_norm_``.
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def multiply(shares: Sequence[Share], factor: float | Tensor) -> None:
    """Multiply all gradients in place."""
    for share in shares:
        if share.grads:
            foreach_mul_(share.grads, comm.copy(factor, share.device) if isinstance(factor, Tensor) else factor)


def is_fused(optimizer: Optimizer) -> bool:
    """Tell whether a step can be skipped on the device, without asking it."""
    return all(group.get("fused") for group in optimizer.param_groups)


def _norms(grads: Sequence[Tensor]) -> list[Tensor]:
    if not grads:
        return []
    wide = torch.float64 if any(g.dtype in (torch.float64, torch.complex128) for g in grads) else torch.float32
    dense = [g if g.layout is torch.strided else g.coalesce().values() for g in grads]
    halves = [g for g in dense if g.dtype is torch.float16]  # the norm of many would be too large for their dtype
    rest = [g for g in dense if g.dtype is not torch.float16]
    norms = [*foreach_norm(halves, 2, torch.float32)] if halves else []
    return [norm.to(wide) for norm in norms + ([*foreach_norm(rest)] if rest else [])]
