"""Classifiers of images, as torchvision builds them."""

from typing import Any

import torch

from everygpu.bench.workloads.losses import cross_entropy
from everygpu.errors import BenchmarkError


def resnet50() -> tuple[Any, ...]:
    """256 × 3 × 224 × 224, channels last, SGD with momentum."""
    return _convolutional("resnet50", rows=256, size=224, num_classes=1000)


def resnet18() -> tuple[Any, ...]:
    """128 × 3 × 32 × 32, channels last, SGD with momentum."""
    return _convolutional("resnet18", rows=128, size=32, num_classes=10)


def _convolutional(name: str, rows: int, size: int, num_classes: int) -> tuple[Any, ...]:
    try:
        from torchvision import models
    except ImportError as error:
        raise BenchmarkError(f"{name} needs torchvision: pip install torchvision") from error
    model = getattr(models, name)(num_classes=num_classes).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    images = torch.randn(rows, 3, size, size).to(memory_format=torch.channels_last)
    return model, cross_entropy, optimizer, (images, torch.randint(0, num_classes, (rows,)))
