"""From gradients to new parameters: unscaled, clipped, applied, on every device that holds a share of them."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from everygpu import comm
from everygpu.torch_private.core import foreach_mul_, foreach_norm, unscale_, update_scale_

GROWTH, BACKOFF, GROWTH_INTERVAL, FIRST_SCALE = 2.0, 0.5, 2000, 2.0**16
"""``torch.amp.GradScaler``'s defaults."""


Shares = list[list[Tensor]]
"""Gradients, those of each device that has any."""


class LossScale:
    """Keeps small gradients of float16 from vanishing: the loss is multiplied, the gradients divided again.

    Source: ``torch.amp.GradScaler``, whose numbers and state these are. Here nothing waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), FIRST_SCALE, dtype=torch.float32, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)

    def scale(self, seed: Tensor) -> Tensor:
        """Multiply what backward begins with; gradients of before the scale changes must also be divided before."""
        return seed * comm.copy(self.value, seed.device)

    def unscale(self, shares: Shares) -> Tensor:
        """Divide gradients in place; return, shape (), 1 where any gradient is not finite, else 0."""
        return _unscale(shares, self.value.double().reciprocal().float())

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


def find_inf(shares: Shares, one: Tensor) -> Tensor:
    """Return, on the device of ``one``, which is 1, of shape (), 1 where any gradient is not finite, else 0.

    Gradients are multiplied by that 1, which takes less of the host's time than a norm of each.
    """
    return _unscale([list(map(_real_values, grads)) for grads in shares], one)


def _real_values(grad: Tensor) -> Tensor:
    """Return a gradient's numbers: sparse ones have some, complex ones are pairs."""
    values = grad if grad.layout is torch.strided else grad.coalesce().values()
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def _unscale(shares: Shares, inverse: Tensor) -> Tensor:
    """Multiply gradients in place; return, on the device of ``inverse``, 1 where any is not finite, else 0."""
    copies = []
    for grads in shares:
        found = torch.zeros((), dtype=torch.float32, device=grads[0].device)
        unscale_(grads, found, comm.copy(inverse, found.device))
        copies.append(comm.copy(found, inverse.device))
    if len(copies) == 1:
        return copies[0]
    return torch.stack(copies).amax() if copies else torch.zeros_like(inverse)


def total_norm(shares: Shares, home: torch.device) -> Tensor:
    """Return the norm of all devices' gradients as if they were one vector, as ``torch.nn.utils.get_total_norm``."""
    norms: list[Tensor] = [comm.copy(norm_of(grads), home) for grads in shares]
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=home)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return what a gradient is multiplied by to have at most ``max_norm``, as in ``clip_grads_with_norm_``."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def multiply(shares: Shares, factor: float | Tensor) -> None:
    """Multiply all gradients in place."""
    for grads in shares:
        foreach_mul_(grads, comm.copy(factor, grads[0].device) if isinstance(factor, Tensor) else factor)


def prefer_fused(optimizer: Optimizer) -> None:
    """Switch torch's Adam, AdamW or SGD to fused kernels on CUDA, as these can skip a step on the device.

    Not where the user has chosen another way, or options that these kernels don't have.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        params = group["params"]
        is_free = group["fused"] is None and group["foreach"] is None
        is_plain = not (group["differentiable"] or group.get("capturable") or group.get("dampening"))
        if is_free and is_plain and all(p.is_cuda and p.is_floating_point() for p in params):
            group["fused"] = True
            for p in params:
                state = optimizer.state.get(p, {})
                if "step" in state:
                    state["step"] = state["step"].to(p.device, torch.float32)


def step_unless(found_inf: Tensor | None, optimizer: Any, updated: Sequence[Tensor]) -> None:
    """Step an optimizer; not where ``found_inf``, of shape (), is not 0, for which the host waits if need be."""
    # torch's fused kernels refuse these.
    if any(p.grad is not None and (p.grad.is_sparse or p.grad.dtype is not p.dtype) for p in updated):
        for group in optimizer.param_groups:
            group.update({"fused": None} if group.get("fused") else {})
    if not skips_on_device(optimizer, updated):
        if found_inf is not None and found_inf.item():
            return
        found_inf = None
    if found_inf is None:
        optimizer.step()
        return
    optimizer.found_inf = found_inf  # where fused optimizers look for it
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf


def skips_on_device(optimizer: Optimizer, updated: Iterable[Tensor]) -> bool:
    """Whether a step of some parameters can be left out on the device, without asking it.

    torch's fused SGD makes memory for a first momentum that it doesn't write where the step is left out, and takes none
    where other parameters have one: zeros are the same, except with dampening.
    """
    if not all(group.get("fused") for group in optimizer.param_groups):
        return False
    if not isinstance(optimizer, torch.optim.SGD) or not any(group["momentum"] for group in optimizer.param_groups):
        return True
    fresh = [p for p in updated if optimizer.state[p].get("momentum_buffer") is None]
    if fresh and any(group["dampening"] for group in optimizer.param_groups):
        return False
    for p in fresh:
        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
    return True


def norm_of(grads: Sequence[Tensor]) -> Tensor:
    """Return the norm of one device's gradients as if they were one vector, shape ()."""
    found: Tensor = torch.linalg.vector_norm(torch.stack(norms_of(grads)))
    return found


def norms_of(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the norm of each gradient, all of one dtype."""
    dense = [g if g.layout is torch.strided else g.coalesce().values() for g in grads]
    dtypes = {g.dtype for g in dense}
    wide = torch.float64 if dtypes & {torch.float64, torch.complex128} else torch.float32
    halves = [g for g in dense if g.dtype is torch.float16]  # the norm of many would be too large for their dtype
    rest = [g for g in dense if g.dtype is not torch.float16] if halves else dense
    norms = [*(foreach_norm(halves, 2, torch.float32) if halves else ()), *(foreach_norm(rest) if rest else ())]
    return [norm.to(wide) for norm in norms] if len(dtypes) > 1 or wide not in dtypes else norms
