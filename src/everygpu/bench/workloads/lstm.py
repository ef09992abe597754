"""A recurrent language model."""

from typing import Any

import torch
from torch import Tensor, nn

from everygpu.bench.workloads.losses import cross_entropy, random_text


class LSTMLanguageModel(nn.Module):
    """Token ids of shape (rows, length) in, logits out; every call starts with an empty state."""

    def __init__(self, vocabulary: int = 10000, width: int = 650, num_layers: int = 2, dropout: float = 0.5) -> None:
        super().__init__()
        self.tokens, self.dropout = nn.Embedding(vocabulary, width), nn.Dropout(dropout)
        self.lstm = nn.LSTM(width, width, num_layers, dropout=dropout, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        self.lstm.flatten_parameters()
        hidden, _ = self.lstm(self.dropout(self.tokens(ids)))
        logits: Tensor = self.head(self.dropout(hidden))
        return logits


def lstm(
    *, rows: int = 32, length: int = 64, vocabulary: int = 10000, width: int = 650, dropout: float = 0.5
) -> tuple[Any, ...]:
    """Two layers of width 650, 32 × 64 tokens, SGD."""
    model = LSTMLanguageModel(vocabulary, width, dropout=dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, cross_entropy, optimizer, random_text(rows, length, vocabulary)
