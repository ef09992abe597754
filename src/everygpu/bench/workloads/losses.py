"""Losses and batches that several models share."""

import torch
from torch import Tensor
from torch.nn import functional as F


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Classify rows, or every token of them."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def random_text(rows: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Make token ids and those that follow them, each of shape (rows, length)."""
    ids = torch.randint(0, vocabulary, (rows, length + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
