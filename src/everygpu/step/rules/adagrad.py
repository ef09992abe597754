"""Adagrad, whose constructor makes the states."""

import torch

from everygpu.step.rules.rule import Options, UpdateRule


def _make_row(group: Options, count: int) -> list[float]:
    return [
        -1.0 if group["maximize"] else 1.0,
        group["weight_decay"],
        group["lr"] / (1 + count * group["lr_decay"]),
        group["eps"],
    ]


RULE = UpdateRule(
    optimizers=(torch.optim.Adagrad,),
    states=("sum",),
    columns=("sign", "l2", "step_size", "eps"),
    make_row=_make_row,
    kernel="adagrad",
    widens_states=True,
)
