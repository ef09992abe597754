"""Batch normalisation over the rows of all replicas."""

from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from everygpu.errors import ModuleError
from everygpu.parallel.batch_norm.function import RegionStatistics, normalize_together, run_again
from everygpu.parallel.engines.scheduler import barrier, is_recomputing
from everygpu.torch_private.modules import BatchNorm

Module = TypeVar("Module", bound=nn.Module)


class SyncBatchNorm(BatchNorm):
    """Batch normalisation whose statistics are those of the whole batch, not of one replica's share.

    ::

        network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        model = everygpu.DataParallel(everygpu.SyncBatchNorm.convert(network), ["cpu", "cpu"])
        loss = criterion(model(x), y)

    In training under ``DataParallel`` or ``TrainStep``, this layer is a barrier: all replicas normalise together, so
    outputs, gradients and running statistics are those of one device on the whole batch. In eval mode, on one
    device and outside a replica it is an ordinary batch normalisation.

    Args:
        num_features: Number of channels, the size of dimension 1.
        eps, momentum, affine, track_running_stats, device, dtype: As for ``torch.nn.BatchNorm2d``.
    Raises:
        ReplicaError: in forward, when replicas reach different layers, or in reentrant activation checkpointing.
        ValueError: in forward, when the input has fewer than 2 dimensions, or one value per channel in the whole batch.
    Source:
        ``torch.nn.SyncBatchNorm``, which synchronises processes, not the replicas within one.
    """

    def __init__(self, num_features: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_features, *args, **kwargs)
        # Shared by all replicas, as every attribute that is no part of the module tree.
        self._statistics = RegionStatistics()

    @classmethod
    def convert(cls, module: Module) -> Module:
        """Replace every batch normalisation in a module by a ``SyncBatchNorm`` with the same parameters and buffers.

        Args:
            module: Any module; changed in place.
        Returns:
            The module; a new layer when it is itself a batch normalisation.
        Raises:
            ModuleError: a lazy layer has no number of channels yet; a layer overrides forward.
        Source:
            ``torch.nn.SyncBatchNorm.convert_sync_batchnorm``, which drops the forward of a subclass.
        """
        if isinstance(module, BatchNorm) and isinstance(module, LazyModuleMixin):
            raise ModuleError(
                f"SyncBatchNorm.convert: {type(module).__name__} doesn't know its channels yet. "
                f"Run the model once before converting it."
            )
        if isinstance(module, BatchNorm) and not isinstance(module, cls):
            if type(module).forward not in (BatchNorm.forward, nn.SyncBatchNorm.forward):
                raise ModuleError(
                    f"SyncBatchNorm.convert: {type(module).__qualname__} has a forward of its own, which would be "
                    f"lost. Replace it by a batch normalisation and what else it does."
                )
            return cls._like(module)  # type: ignore[return-value]
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = cls.convert(child)
        return module

    @classmethod
    def _like(cls, layer: BatchNorm) -> "SyncBatchNorm":
        new = cls(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, device="meta")
        new._parameters.update(layer._parameters)
        new._buffers.update(layer._buffers)
        new.training = layer.training
        return new

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a floating-point input of shape (rows, channels, ...); the output has its shape and device."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        if is_recomputing():
            return run_again(input, self.weight, self.bias, self.eps, self._statistics)
        normalize = partial(normalize_together, self.eps, self._statistics)
        own_input = (input, _own_node(self.weight), _own_node(self.bias), self._statistics)
        output, mean, var, count = barrier(own_input, normalize)
        self._statistics.keep(mean, var)
        if self.training and self.running_mean is not None:
            self._update_running_stats(mean, var, count)
        return output  # type: ignore[no-any-return]

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm: needs at least 2 dimensions, got {input.dim()}.")

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, var: Tensor, count: int | Tensor) -> None:
        """Update the running statistics as ``torch.nn.BatchNorm2d`` does."""
        if self.num_batches_tracked is None or self.running_mean is None or self.running_var is None:
            return
        self.num_batches_tracked.add_(1)
        factor = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        others = (count - 1).clamp(min=1) if isinstance(count, Tensor) else max(1, count - 1)
        unbiased = var * (count / others)
        self.running_mean.mul_(1 - factor).add_(mean.to(self.running_mean.dtype), alpha=factor)
        self.running_var.mul_(1 - factor).add_(unbiased.to(self.running_var.dtype), alpha=factor)


def _own_node(parameter: Tensor | None) -> Tensor | None:
    """Give a parameter's gradient a node on the parameter's device: torch warns of gradients from other devices."""
    return parameter if parameter is None else parameter.view_as(parameter)
