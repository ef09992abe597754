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


def efficientnet(*, rows: int = 64, size: int = 224, num_classes: int = 1000) -> tuple[Any, ...]:
    """EfficientNet-B0, 64 × 3 × 224 × 224, channels last, SGD with momentum: many small layers, random depth."""
    return _convolutional("efficientnet_b0", rows, size, num_classes)


def vit(*, rows: int = 64, size: int = 224, num_classes: int = 1000) -> tuple[Any, ...]:
    """ViT-B/16, 64 × 3 × 224 × 224, AdamW."""
    model = _build("vit_b_16", image_size=size, num_classes=num_classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return model, cross_entropy, optimizer, (torch.randn(rows, 3, size, size), _random_classes(rows, num_classes))


def _convolutional(name: str, rows: int, size: int, num_classes: int) -> tuple[Any, ...]:
    model = _build(name, num_classes=num_classes).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    images = torch.randn(rows, 3, size, size).to(memory_format=torch.channels_last)
    return model, cross_entropy, optimizer, (images, _random_classes(rows, num_classes))


def _random_classes(rows: int, num_classes: int) -> torch.Tensor:
    return torch.randint(0, num_classes, (rows,))


def _build(name: str, **options: int) -> Any:
    try:
        from torchvision import models
    except ImportError as error:
        raise BenchmarkError(f"bench: {name} needs torchvision, got none. pip install torchvision") from error
    return getattr(models, name)(**options)
