"""Adam and AdamW."""

import math

import torch

from everygpu.step.rules.rule import Options, UpdateRule, is_number


def _make_row(group: Options, count: int) -> list[float]:
    beta1, beta2 = group["betas"]
    decay, decoupled = group["weight_decay"], group["decoupled_weight_decay"]
    return [
        -1.0 if group["maximize"] else 1.0,
        1 - group["lr"] * decay if decoupled else 1.0,
        0.0 if decoupled else decay,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        group["eps"],
        group["lr"] / (1 - beta1 ** (count + 1)),
        1 / math.sqrt(1 - beta2 ** (count + 1)),
    ]


def _is_plain(group: Options) -> bool:
    return all(map(is_number, (group["lr"], *group["betas"]))) and not group["amsgrad"]


RULE = UpdateRule(
    optimizers=(torch.optim.Adam, torch.optim.AdamW),
    states=("exp_avg", "exp_avg_sq"),
    # ``rest`` is one minus beta, ``inverse_root2`` is 1 / sqrt(1 - beta2 ** step).
    columns=("sign", "decay", "l2", "beta1", "rest1", "beta2", "rest2", "eps", "step_size", "inverse_root2"),
    make_row=_make_row,
    kernel="adam",
    is_plain=_is_plain,
)
