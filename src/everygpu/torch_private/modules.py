"""Base classes of torch's modules."""

from torch.nn.modules import batchnorm

NormBase = batchnorm._NormBase
"""Every batch and instance normalisation; the exported classes have no other base in common."""

BatchNorm = batchnorm._BatchNorm
"""Every batch normalisation, for inputs of any number of axes."""
