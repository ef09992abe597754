"""GPT-2, large and small."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everygpu.bench.workloads.losses import cross_entropy, random_text


def causal_attention(qkv: Tensor, num_heads: int) -> Tensor:
    """Attend to the tokens before.

    Args:
        qkv: Queries, keys and values side by side, of shape (rows, length, 3 × width).
        num_heads: Divides the width.
    Returns:
        Shape (rows, length, width).
    """
    rows, length, _ = qkv.shape
    q, k, v = qkv.view(rows, length, 3, num_heads, -1).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).reshape(rows, length, -1)


class Block(nn.Module):
    """A pre-norm transformer block, as in GPT-2."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(causal_attention(self.qkv(self.norm1(x)), self.num_heads))
        changed: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return changed


class LanguageModel(nn.Module):
    """Token ids of shape (rows, length) in, logits out."""

    def __init__(self, vocabulary: int, width: int, length: int, blocks: Iterator[nn.Module]) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class GPT(LanguageModel):
    """GPT-2, 124M parameters by default."""

    def __init__(
        self, vocabulary: int = 50304, width: int = 768, num_blocks: int = 12, num_heads: int = 12, length: int = 1024
    ) -> None:
        super().__init__(vocabulary, width, length, (Block(width, num_heads) for _ in range(num_blocks)))
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)


def gpt2() -> tuple[Any, ...]:
    """124M parameters, 16 × 1,024 tokens, AdamW."""
    return _language_model(GPT(), rows=16, length=1024, vocabulary=50304)


def tiny() -> tuple[Any, ...]:
    """A GPT of two small blocks, 8 × 32 tokens, AdamW: to see everything run, also on the CPU."""
    model = GPT(vocabulary=64, width=32, num_blocks=2, num_heads=2, length=32)
    return _language_model(model, rows=8, length=32, vocabulary=64)


def _language_model(model: GPT, rows: int, length: int, vocabulary: int) -> tuple[Any, ...]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    return model, cross_entropy, optimizer, random_text(rows, length, vocabulary)
