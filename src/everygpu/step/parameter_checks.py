"""Which parameters can lie in flat memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from everygpu.errors import OptimizerError, PlacementError


def check_place(params: Sequence[Tensor], device: torch.device) -> None:
    """Refuse parameters on other devices."""
    for i, p in enumerate(params):
        if p.device != device:
            raise PlacementError(
                f"TrainStep: every parameter of the optimizer must be on {device}, got parameter {i} of shape "
                f"{tuple(p.shape)} on {p.device}. Move its module there before making the optimizer."
            )


def check_grad_dtypes(params: Sequence[Tensor]) -> None:
    """Refuse parameters whose gradients are to have another dtype."""
    for i, p in enumerate(params):
        wanted = p.grad_dtype  # None for any
        if wanted not in (None, p.dtype):
            raise OptimizerError(
                f"TrainStep: gradients must have their parameters' dtypes, got parameter {i} of {p.dtype} with "
                f"grad_dtype={wanted}. Set its grad_dtype to {p.dtype}, or train with DataParallel in an ordinary loop."
            )


def check_memory(params: Sequence[Tensor]) -> None:
    """Refuse parameters that lie within each other's memory, or have two elements at one place."""
    spans = sorted((p.data_ptr(), p.data_ptr() + _extent_bytes(p), i) for i, p in enumerate(params) if p.data_ptr())
    end = 0
    for begin, until, i in spans:
        is_spread = any(size > 1 and step == 0 for size, step in zip(params[i].shape, params[i].stride()))
        if begin < end or is_spread:
            raise OptimizerError(
                f"TrainStep, ShardedOptimizer: parameters must have memory of their own, got parameter {i} of shape "
                f"{tuple(params[i].shape)}, which shares some. To tie weights, use one Parameter in both places."
            )
        end = max(end, until)


def _extent_bytes(p: Tensor) -> int:
    return (sum((size - 1) * step for size, step in zip(p.shape, p.stride())) + 1) * p.element_size()
