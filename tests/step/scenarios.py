"""What steps go through with captures and without, for equal losses and values."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import everygpu
from tests.step.test_capture import Net, batches, num_graphs

Devices = Callable[[int], list[torch.device]]
Step = everygpu.TrainStep
Scenario = Callable[[Step, list[Tensor]], None]
"""Called with a step after it was captured; appends to the losses."""

X, Y = batches(1, torch.device("cpu"), ignore=False)[0]
NUM_BEFORE = 6


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)


def make_step(used: list[torch.device], make: Any = Net, **options: Any) -> Step:
    net = make().to(used[0])
    return Step(everygpu.DataParallel(net, used), F.cross_entropy, adamw(net), **options)


def check(
    capturing: Devices,
    scenario: Scenario,
    *,
    make: Any = Net,
    loss: Any = F.cross_entropy,
    count: int = 2,
    first: Any = ((X, Y), {}),
    makes_loss: bool = False,
    wrapper: dict[str, Any] | None = None,
    num: int = 1,
    **options: Any,
) -> None:
    """Go through a scenario with captured steps and without; losses and all values must be equal."""
    used = capturing(count)
    found = []
    for capture in (False, "auto"):
        torch.manual_seed(0)
        net = make().to(used[0])
        criterion = loss() if makes_loss else loss
        step = Step(
            everygpu.DataParallel(net, used, **(wrapper or {})), criterion, adamw(net), capture=capture, **options
        )
        losses = [step(*first[0], **first[1]) for _ in range(NUM_BEFORE)]
        assert not capture or num_graphs(step) == num
        scenario(step, losses)
        found.append((torch.stack(losses), copy.deepcopy(net.state_dict())))
    (plain, values), (captured, ours) = found
    torch.testing.assert_close(captured, plain, rtol=1e-4, atol=1e-5)
    for name, value in values.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def train_on(step: Step, losses: list[Tensor], num: int = 6, **kwargs: Any) -> None:
    losses += [step(X, Y, **kwargs) for _ in range(num)]
