"""A module that fails on wish, where a helper can import it."""

import torch
from torch import nn


class TooManyError(ValueError):
    def __init__(self, num: int, limit: int) -> None:
        super().__init__(f"{num} of {limit}")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails and x[0, 0] > 0:
            raise TooManyError(3, 2)
        return self.layer(x) * x
