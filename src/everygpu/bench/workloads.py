"""The models the benchmarks train, with their batches, losses and optimizers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


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
        return self.head(self.norm(x))


def _resnet(name: str, num_classes: int) -> nn.Module:
    import torchvision

    model: nn.Module = getattr(torchvision.models, name)(num_classes=num_classes)
    return model.to(memory_format=torch.channels_last)


def _images(rows: int, size: int, num_classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    images = torch.randn(rows, 3, size, size, device=device).to(memory_format=torch.channels_last)
    return images, torch.randint(0, num_classes, (rows,), device=device)


def _text(rows: int, length: int, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, vocabulary, (rows, length + 1), device=device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True, capturable=True)


def _sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model with everything to train it."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.device], tuple[Tensor, Tensor]]
    rows_per_gpu: int
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]

    @staticmethod
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, -2), target.flatten())


WORKLOADS = {
    "gpt2": Workload(
        build=GPT, batch=lambda n, d: _text(n, 1024, 50304, d), rows_per_gpu=16, optimizer=_adamw
    ),
    "resnet50": Workload(
        build=lambda: _resnet("resnet50", 1000),
        batch=lambda n, d: _images(n, 224, 1000, d),
        rows_per_gpu=256,
        optimizer=_sgd,
    ),
    "resnet18": Workload(
        build=lambda: _resnet("resnet18", 10),
        batch=lambda n, d: _images(n, 32, 10, d),
        rows_per_gpu=128,
        optimizer=_sgd,
    ),
}  # fmt: skip
