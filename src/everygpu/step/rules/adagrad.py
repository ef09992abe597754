"""Adagrad, whose constructor makes the states."""

from typing import Any

import torch
from torch import Tensor

from everygpu.step.rules.rule import Options, UpdateRule, is_number


def _make_row(group: Options, count: int) -> list[float]:
    return [
        -1.0 if group["maximize"] else 1.0,
        group["weight_decay"],
        group["lr"] / (1 + count * group["lr_decay"]),
        group["eps"],
    ]


def _launch(*tables: Tensor, **numbers: Any) -> None:
    from everygpu.step.kernels import adagrad  # needs Triton

    adagrad.run(*tables, **numbers)


def _is_plain(group: Options) -> bool:
    return is_number(group["lr"])


RULE = UpdateRule(
    optimizers=(torch.optim.Adagrad,),
    states=("sum",),
    columns=("sign", "l2", "step_size", "eps"),
    make_row=_make_row,
    launch=_launch,
    is_plain=_is_plain,
    widens_states=True,
)
