"""Stochastic gradient descent, with momentum or without."""

import torch

from everygpu.step.rules.rule import Options, UpdateRule


def _make_row(group: Options, count: int) -> list[float]:
    return [
        -1.0 if group["maximize"] else 1.0,
        group["weight_decay"],
        group["momentum"],
        1 - group["dampening"] if count else 1.0,  # the first momentum is the gradient, undampened
        float(group["nesterov"]),
        group["lr"],
    ]


def _keeps_states(group: Options) -> bool:
    return bool(group["momentum"])


RULE = UpdateRule(
    optimizers=(torch.optim.SGD,),
    states=("momentum_buffer",),
    # ``fresh`` is how much of the gradient goes into the momentum.
    columns=("sign", "l2", "momentum", "fresh", "nesterov", "lr"),
    make_row=_make_row,
    kernel="sgd",
    keeps_states=_keeps_states,
    counts_steps=False,
    widens_states=True,
)
