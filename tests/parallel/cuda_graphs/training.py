"""Models that are trained on tokens, and what they have in common."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import everygpu
from everygpu.parallel.cuda_graphs.batch_kinds import NUM_WARM_UPS

NUM_STEPS = NUM_WARM_UPS + 5

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Negate(torch.autograd.Function):
    """Is given its inputs past torch's functions: autograd connects it to what stands for them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return -x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


def train(
    make: Callable[[], nn.Module],
    used: list[torch.device],
    loss_of: Callable[[Any, Tensor], Tensor],
    make_optimizer: MakeOptimizer,
    *,
    shape: tuple[int, int],
    vocabulary: int,
    **options: Any,
) -> tuple[Any, list[Tensor]]:
    """Make a model, and train it to tell each token's next; return it with the losses.

    Args:
        make: Makes the module.
        used: Devices.
        loss_of: Of what the model returns, and the tokens that follow.
        make_optimizer: Of parameters.
        shape: Rows, and tokens that the model is given of each.
        vocabulary: How many kinds of tokens there are.
        options: Of ``DataParallel``.
    """
    torch.manual_seed(0)
    net = make().to(used[0])
    model = everygpu.DataParallel(net, used, **options)
    optimizer = make_optimizer([p for p in net.parameters() if p.requires_grad])
    generator, losses = torch.Generator().manual_seed(1), []
    rows, length = shape
    for _ in range(NUM_STEPS):
        ids = torch.randint(vocabulary, (rows, length + 1), generator=generator).to(used[0])
        loss = loss_of(model(ids[:, :-1].contiguous()), ids[:, 1:].contiguous())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return model, losses


def compare(ours: tuple[Any, list[Tensor]], plain: tuple[Any, list[Tensor]]) -> None:
    """Compare what two trainings have returned."""
    torch.testing.assert_close(ours[1], plain[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[0].state_dict(), plain[0].state_dict(), rtol=1e-3, atol=1e-4)
