"""A BERT classifier, with batches whose length changes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everygpu.bench.training import Batches


@dataclass
class ModelOutput:
    """What the classifier returns."""

    loss: Tensor | None
    """Shape (); None without labels."""
    logits: Tensor
    """Shape (rows, classes)."""


class Layer(nn.Module):
    """A post-norm encoder layer: attention of all tokens to those that are no padding, and a perceptron."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = (*x.shape[:2], self.num_heads, -1)
        query, key, value = (layer(x).view(heads).transpose(1, 2) for layer in (self.query, self.key, self.value))
        dropout_p = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_p)
        x = self.norm1(x + self.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape))))
        changed: Tensor = self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))
        return changed


class BertClassifier(nn.Module):
    """BERT-base with a classifier on its first token, 109M parameters by default."""

    position_ids: Tensor

    def __init__(
        self,
        vocabulary: int = 30522,
        width: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        length: int = 512,
        num_classes: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width, padding_idx=0), nn.Embedding(length, width)
        self.norm, self.dropout = nn.LayerNorm(width, eps=1e-12), nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, num_heads, dropout) for _ in range(num_layers))
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, num_classes)
        self.register_buffer("position_ids", torch.arange(length).unsqueeze(0), persistent=False)
        self.apply(_initialize)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> ModelOutput:
        mask = attention_mask[:, None, None, :].bool()
        position_ids = self.position_ids[:, : input_ids.shape[1]]
        x = self.dropout(self.norm(self.tokens(input_ids) + self.positions(position_ids)))
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.classifier(self.dropout(torch.tanh(self.pooler(x[:, 0]))))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return ModelOutput(loss=loss, logits=logits)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def bert(
    *,
    rows: int = 32,
    lengths: tuple[int, int] = (32, 256),
    num_batches: int = 40,
    vocabulary: int = 30522,
    **sizes: Any,
) -> tuple[Any, ...]:
    """BERT-base, 40 batches of 32 sentences of 32 to 256 tokens, AdamW without decay of biases and norms."""
    model = BertClassifier(vocabulary, **sizes)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    seeded = torch.Generator().manual_seed(0)
    longest = torch.randint(lengths[0], lengths[1] + 1, (num_batches,), generator=seeded).tolist()
    batches = Batches([_padded_batch(rows, length, vocabulary, seeded) for length in longest])
    return model, None, torch.optim.AdamW(groups, lr=2e-5, fused=True), batches


def _padded_batch(rows: int, longest: int, vocabulary: int, seeded: torch.Generator) -> dict[str, Tensor]:
    """Make sentences of half the longest length or more, padded to the longest, as a collate function does."""
    lengths = torch.randint(longest // 2, longest + 1, (rows,), generator=seeded)
    lengths[0] = longest
    attention_mask = (torch.arange(longest) < lengths[:, None]).long()
    input_ids = torch.randint(1, vocabulary, (rows, longest), generator=seeded) * attention_mask
    labels = torch.randint(0, 2, (rows,), generator=seeded)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
