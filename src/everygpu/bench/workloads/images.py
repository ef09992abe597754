"""Classifiers of images, as torchvision builds them."""

from typing import Any

import torch
from torch import nn

from everygpu.bench.workloads.losses import cross_entropy
from everygpu.errors import BenchmarkError


def resnet50() -> tuple[Any, ...]:
    """256 × 3 × 224 × 224, channels last, SGD with momentum."""
    return _with_sgd(*_classifier("resnet50", rows=256, size=224))


def resnet18() -> tuple[Any, ...]:
    """128 × 3 × 32 × 32, channels last, SGD with momentum."""
    return _with_sgd(*_classifier("resnet18", rows=128, size=32, num_classes=10))


def vit() -> tuple[Any, ...]:
    """ViT-B/16, 64 × 3 × 224 × 224, AdamW."""
    return _with_adamw(*_classifier("vit_b_16", rows=64, size=224))


def convnext() -> tuple[Any, ...]:
    """ConvNeXt-T, 64 × 3 × 224 × 224, channels last, AdamW."""
    return _with_adamw(*_classifier("convnext_tiny", rows=64, size=224))


def _classifier(name: str, rows: int, size: int, num_classes: int = 1000) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    try:
        from torchvision.models import get_model
    except ImportError as error:
        raise BenchmarkError(f"{name} needs torchvision: pip install torchvision") from error
    model = get_model(name, weights=None, num_classes=num_classes).to(memory_format=torch.channels_last)
    images = torch.randn(rows, 3, size, size).to(memory_format=torch.channels_last)
    return model, (images, torch.randint(0, num_classes, (rows,)))


def _with_sgd(model: nn.Module, batch: Any) -> tuple[Any, ...]:
    return model, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True), batch


def _with_adamw(model: nn.Module, batch: Any) -> tuple[Any, ...]:
    return model, cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), batch
