"""By which class the state of an optimizer or a scheduler is known, and which other one it may go into."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler

import everygpu
from everygpu.checkpoint.trainers import check_class, class_name
from everygpu.errors import CheckpointMismatchError

PARAMS = (nn.Parameter(torch.ones(2)),)


class MyAdamW(AdamW):
    pass


class Own(Optimizer):
    pass


class Around(Optimizer):
    """Holds another optimizer, as Accelerate's does."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(PARAMS, {})
        self.optimizer = optimizer


class Warmup(lr_scheduler._LRScheduler):
    """Of the base class's old name."""

    def get_lr(self) -> list[float]:
        return [0.1]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: AdamW(PARAMS), "torch.optim.adamw.AdamW"),
        (lambda: MyAdamW(PARAMS), "torch.optim.adamw.AdamW"),
        (lambda: everygpu.ShardedOptimizer(AdamW(PARAMS)), "torch.optim.adamw.AdamW"),
        (lambda: Around(everygpu.ShardedOptimizer(SGD(PARAMS))), "torch.optim.sgd.SGD"),
        (lambda: Own(PARAMS, {}), f"{__name__}.Own"),
        (lambda: lr_scheduler.LambdaLR(SGD(PARAMS), float), "torch.optim.lr_scheduler.LambdaLR"),
        (lambda: lr_scheduler.StepLR(everygpu.ShardedOptimizer(SGD(PARAMS)), 2), "torch.optim.lr_scheduler.StepLR"),
        (lambda: Warmup(SGD(PARAMS)), f"{__name__}.Warmup"),
        (lambda: torch.amp.GradScaler("cpu"), None),
        (lambda: nn.Linear(1, 1), None),
    ],
)  # fmt: skip
def test_names(make: Any, expected: str | None) -> None:
    assert class_name(make()) == expected


def test_a_class_may_have_moved_if_its_settings_fit() -> None:
    own = Own(PARAMS, {"rho": 1.0})
    check_class(own, "optimizer", "package.module.Own", own.state_dict())
    with pytest.raises(CheckpointMismatchError, match="one with lr, momentum, got .*Own, which has rho instead"):
        check_class(own, "optimizer", "package.module.Own", {"param_groups": [{"lr": 0.1, "momentum": 0.0}]})


def test_a_file_without_a_class_may_be_of_another_version_of_torch() -> None:
    """It lacks what came later, and has what schedulers and callers added, or what is gone."""
    group = {"params": [0], "lr": 0.1, "betas": (0.9, 0.9), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    check_class(Adam(PARAMS), "optimizer", None, {"state": {}, "param_groups": [{**group, "lr_scale": 1.0}]})
    state = {"step_size": 2, "gamma": 0.1, "base_lrs": [0.1], "last_epoch": 0, "verbose": False}
    check_class(lr_scheduler.StepLR(SGD(PARAMS), 2), "scheduler", None, state)
