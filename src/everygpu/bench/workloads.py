"""The models that `everygpu bench` brings along, with their losses, optimizers and batches.

Each function returns what ``--model module:function`` asks of a user's own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everygpu.errors import BenchmarkError


class Block(nn.Module):
    """A pre-norm transformer block, as in GPT-2."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(rows, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        changed: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return changed


class GPT(nn.Module):
    """GPT-2, 124M parameters by default; token ids of shape (rows, length) in, logits out."""

    def __init__(
        self, vocabulary: int = 50304, width: int = 768, num_blocks: int = 12, num_heads: int = 12, length: int = 1024
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def gpt2() -> tuple[Any, ...]:
    """124M parameters, 16 × 1,024 tokens, AdamW."""
    return _language_model(GPT(), rows=16, length=1024, vocabulary=50304)


def gpt2_xl() -> tuple[Any, ...]:
    """1.6B parameters, 4 × 1,024 tokens, AdamW: for what memory each way of training needs."""
    model = GPT(width=1600, num_blocks=48, num_heads=25)
    return _language_model(model, rows=4, length=1024, vocabulary=50304)


def resnet50() -> tuple[Any, ...]:
    """256 × 3 × 224 × 224, channels last, SGD with momentum."""
    return _image_classifier("resnet50", rows=256, size=224, num_classes=1000)


def resnet18() -> tuple[Any, ...]:
    """128 × 3 × 32 × 32, channels last, SGD with momentum."""
    return _image_classifier("resnet18", rows=128, size=32, num_classes=10)


def tiny() -> tuple[Any, ...]:
    """A GPT of two small blocks, 8 × 32 tokens, AdamW: to see everything run, also on the CPU."""
    model = GPT(vocabulary=64, width=32, num_blocks=2, num_heads=2, length=32)
    return _language_model(model, rows=8, length=32, vocabulary=64)


MODELS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "gpt2": gpt2, "gpt2-xl": gpt2_xl, "resnet50": resnet50, "resnet18": resnet18, "tiny": tiny
}  # fmt: skip


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Classify rows, or every token of them."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def _language_model(model: GPT, rows: int, length: int, vocabulary: int) -> tuple[Any, ...]:
    ids = torch.randint(0, vocabulary, (rows, length + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    return model, cross_entropy, optimizer, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def _image_classifier(name: str, rows: int, size: int, num_classes: int) -> tuple[Any, ...]:
    try:
        from torchvision import models
    except ImportError as error:
        raise BenchmarkError(f"bench: {name} needs torchvision, got none. pip install torchvision") from error
    model = getattr(models, name)(num_classes=num_classes).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    images = torch.randn(rows, 3, size, size).to(memory_format=torch.channels_last)
    return model, cross_entropy, optimizer, (images, torch.randint(0, num_classes, (rows,)))
