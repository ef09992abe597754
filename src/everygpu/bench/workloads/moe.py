"""A mixture of experts, whose tokens are distributed as a simple script does it."""

from typing import Any

import torch
from torch import Tensor, nn

from everygpu.bench.workloads.losses import cross_entropy


class Experts(nn.Module):
    """Gives each token to one of several experts; how many an expert gets, the host reads."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            is_mine = chosen == index
            if is_mine.any():
                out[is_mine] = (expert(x[is_mine]) * weights[is_mine, None]).to(out.dtype)
        return x + out


def moe(*, rows: int = 4096, width: int = 512, num_layers: int = 6, num_experts: int = 8) -> tuple[Any, ...]:
    """6 layers of 8 experts, 101M parameters, 4,096 tokens, AdamW."""
    layers = (Experts(width, num_experts) for _ in range(num_layers))
    model = nn.Sequential(*layers, nn.LayerNorm(width), nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    return model, cross_entropy, optimizer, (torch.randn(rows, width), torch.randint(0, 10, (rows,)))
