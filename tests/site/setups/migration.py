"""What the five tasks of docs/migration.md need: a loop, an evaluation, and a file of another program."""

import torch

state = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).state_dict()
torch.save({f"module.{name}": value for name, value in state.items()}, "old.pt")


def train(x, y):
    optimizer.zero_grad()  # noqa: F821 - of the page
    criterion(model(x), y).backward()  # noqa: F821
    optimizer.step()  # noqa: F821


def train_epoch():
    for x, y in loader:  # noqa: F821
        train(x, y)


def evaluate():
    return sum((model(x).argmax(1) == y).sum().item() for x, y in loader) / 64  # noqa: F821
