"""A language model in the manner of Llama, which computes its loss itself."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everygpu.bench.workloads.losses import random_text


class RMSNorm(nn.Module):
    """Root mean square normalization, in float32."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


def rotation_tables(head_width: int, length: int) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines of the rotary embedding, each of shape (length, head_width)."""
    frequencies = 10000.0 ** -(torch.arange(0, head_width, 2).float() / head_width)
    angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads of shape (rows, heads, length, head_width) by their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention in which groups of queries share keys and values."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.num_repeats = num_heads // num_kv_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, num_kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, num_kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = (layer(x).view(rows, length, -1, self.head_width) for layer in (self.query, self.key, self.value))
        query, key, value = (h.transpose(1, 2) for h in heads)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        key, value = (h.repeat_interleave(self.num_repeats, dim=1) for h in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return attended


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return changed


class Block(nn.Module):
    """A pre-norm decoder block."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attention = RMSNorm(width), Attention(width, num_heads, num_kv_heads)
        self.norm2, self.feed_forward = RMSNorm(width), FeedForward(width, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        changed: Tensor = x + self.feed_forward(self.norm2(x))
        return changed


class Llama(nn.Module):
    """229M parameters by default; with targets, token ids of shape (rows, length) become logits and their loss."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        vocabulary: int = 32000,
        width: int = 1024,
        num_blocks: int = 12,
        num_heads: int = 16,
        num_kv_heads: int = 4,
        hidden: int = 3584,
        length: int = 1024,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, num_kv_heads, hidden) for _ in range(num_blocks))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        cos, sin = rotation_tables(width // num_heads, length)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        if targets is None:
            return {"logits": logits}
        return {"logits": logits, "loss": F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())}


def llama(*, rows: int = 8, length: int = 1024, vocabulary: int = 32000, **sizes: int) -> tuple[Any, ...]:
    """229M parameters, 8 × 1,024 tokens, AdamW; the model returns its loss beside its logits."""
    model = Llama(vocabulary, length=length, **sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    return model, None, optimizer, random_text(rows, length, vocabulary)
