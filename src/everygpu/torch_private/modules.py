"""Base classes of torch's modules, and what its functions check."""

from typing import Any

from torch.nn import functional
from torch.nn.modules import batchnorm

NormBase = batchnorm._NormBase
"""Every batch and instance normalisation; the exported classes have no other base in common."""

BatchNorm = batchnorm._BatchNorm
"""Every batch normalisation, for inputs of any number of axes."""

LazyNorm = batchnorm._LazyNormBase
"""A normalisation that learns its number of channels at its first input."""

verify_batch_size: Any = functional._verify_batch_size  # type: ignore[attr-defined]
"""Raise ``batch_norm``'s ValueError for a batch with a single value per channel."""
