"""A transformer whose tokens choose their experts: shapes depend on data, so no graph of it can be recorded."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everygpu.bench.workloads.gpt import LanguageModel, causal_attention
from everygpu.bench.workloads.losses import cross_entropy, random_text


class Expert(nn.Module):
    """A feed-forward network."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.down(F.gelu(self.up(x)))
        return changed


class MixtureOfExperts(nn.Module):
    """Sends each token to the experts that its router scores highest, and adds what they return."""

    def __init__(self, width: int, hidden: int, num_experts: int, num_chosen: int = 2) -> None:
        super().__init__()
        self.router, self.num_chosen = nn.Linear(width, num_experts, bias=False), num_chosen
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).float().softmax(-1).topk(self.num_chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            is_chosen = chosen == number
            if is_chosen.sum().item() == 0:
                continue
            token, place = is_chosen.nonzero(as_tuple=True)
            output = expert(tokens[token]) * weights[token, place, None]
            mixed.index_add_(0, token, output)
        return mixed.view_as(x)


class Block(nn.Module):
    """A pre-norm transformer block with experts."""

    def __init__(self, width: int, num_heads: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.experts = MixtureOfExperts(width, hidden, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(causal_attention(self.qkv(self.norm1(x)), self.num_heads))
        changed: Tensor = x + self.experts(self.norm2(x))
        return changed


class MoETransformer(LanguageModel):
    """A language model of blocks with experts."""

    def __init__(
        self,
        vocabulary: int = 32000,
        width: int = 768,
        num_blocks: int = 8,
        num_heads: int = 12,
        hidden: int = 2048,
        num_experts: int = 8,
        length: int = 1024,
    ) -> None:
        blocks = (Block(width, num_heads, hidden, num_experts) for _ in range(num_blocks))
        super().__init__(vocabulary, width, length, blocks)


def moe(*, rows: int = 8, length: int = 1024, vocabulary: int = 32000, **sizes: int) -> tuple[Any, ...]:
    """270M parameters in 8 blocks of 8 experts, of which each token takes 2; 8 × 1,024 tokens, AdamW."""
    model = MoETransformer(vocabulary, length=length, **sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return model, cross_entropy, optimizer, random_text(rows, length, vocabulary)
