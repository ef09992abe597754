"""A model that waits for ever in one replica."""

import threading

import torch
from torch import Tensor, nn

ROWS = 2


def wait_for_ever() -> None:
    """Wait for what never comes."""
    threading.Event().wait()


class Net(nn.Module):
    """Waits where its attributes say."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.place, self.replica = "", 1

    def forward(self, x: Tensor) -> Tensor:
        is_this = bool((x[:, 0] == self.replica).all())
        if is_this and self.place == "forward":
            wait_for_ever()
        y: Tensor = self.layer(x)
        if is_this and self.place == "backward":
            y.register_hook(lambda _: wait_for_ever())
        return y


def make_batch() -> Tensor:
    """Return rows of two replicas; their first column is their replica's number."""
    x = torch.ones(2 * ROWS, 4)
    x[:, 0] = torch.arange(2).repeat_interleave(ROWS)
    return x
