"""What is trained under faults: the digits example's model on its data, with places that fail when told to."""

import hashlib
import multiprocessing
import time
from ctypes import c_int
from functools import cache
from typing import Any

import torch
from examples.digits import DigitNet, load_data
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

LAST_STEP, BATCH_SIZE, SAVE_EVERY, KEEP, EVALUATE_EVERY = 60, 64, 3, 2, 10
NUM_REPLICAS, NUM_WORKERS = 2, 2
DATA_TIMEOUT_S = 3.0
SLOW_S = 0.25

ERRORS = {"value": ValueError, "memory": torch.OutOfMemoryError}
TOLD = ("nothing", *ERRORS, "slow")
"""What a loader's worker may be told to do at its next sample."""


@cache
def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return the data to train on and to test with, read once."""
    return load_data()


class Net(DigitNet):
    """Fails in one replica where its attributes say."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.error, self.mark = "", "", 0.0

    def fail_at(self, place: str, error: str, images: Tensor, replica: int) -> None:
        """Have one replica's next forward, or backward, raise an error."""
        row = replica * -(-len(images) // NUM_REPLICAS)
        self.place, self.error, self.mark = place, error, float(images[row].sum())

    def forward(self, images: Tensor) -> Tensor:
        is_failing = bool(self.place) and float(images[0].sum()) == self.mark
        if is_failing and self.place == "forward":
            fail(self.error)
        scores: Tensor = super().forward(images)
        if is_failing and scores.requires_grad:
            scores.register_hook(lambda _: fail(self.error))
        return scores


def fail(error: str) -> None:
    """Raise an error."""
    raise ERRORS[error]("told to fail")


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """The images to train on; a loader's worker does at its next sample what it is told."""

    def __init__(self) -> None:
        self._plain = datasets()[0]
        self._told = multiprocessing.RawValue(c_int, 0)

    def tell(self, what: str) -> None:
        """Have one of the workers do something at its next sample."""
        self._told.value = TOLD.index(what)

    def __len__(self) -> int:
        return len(self._plain)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        told, self._told.value = TOLD[self._told.value], 0
        if told in ERRORS:
            fail(told)
        if told == "slow":
            time.sleep(SLOW_S)
        return self._plain[index]


def make_loader(samples: Samples, timeout: float = 0.0) -> DataLoader[Any]:
    return DataLoader(
        samples,
        BATCH_SIZE,
        shuffle=True,
        num_workers=NUM_WORKERS,
        multiprocessing_context="fork",
        timeout=timeout,
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)


def digest_of(model: dict[str, Any], optimizer: dict[str, Any]) -> str:
    """Sum up a model's and its optimizer's state: the same for the same bits."""
    found = hashlib.sha256()
    for value in _leaves([model, optimizer["state"], optimizer["param_groups"]]):
        found.update(value.detach().cpu().contiguous().numpy().tobytes() if isinstance(value, Tensor) else value)
    return found.hexdigest()[:16]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in (str(key).encode(), *_leaves(value[key]))]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value if isinstance(value, Tensor) else repr(value).encode()]
