"""What one device gives on the whole batch, which N devices have to equal."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import everygpu

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
"""For float64, which these tests compute in: only the order of additions may differ."""


class Mlp(nn.Module):
    """The model to use where any would do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Returning(nn.Module):
    """Returns what a function makes of a replica's inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def rows(num_rows: int, *features: int, device: torch.device, seed: int = 1) -> Tensor:
    """Make the same random batch every time, on one device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, *features, generator=generator, dtype=torch.float64).to(device)


def pair(
    make: Callable[[], nn.Module], devices: list[torch.device], **options: Any
) -> tuple[everygpu.DataParallel, nn.Module]:
    """Make a module twice, equal to the last bit: wrapped for the devices, and bare on the first of them.

    Args:
        make: Called twice under one seed. Not deepcopy, which torch refuses for old weight_norm.
    """
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(make().double().to(devices[0]))  # double leaves complex numbers alone
    return everygpu.DataParallel(made[0], devices, **options), made[1]


def score(output: Any) -> Tensor:
    """Reduce an output to one number whose gradient differs from element to element."""
    total = torch.zeros((), dtype=torch.float64)
    for t in tree_leaves(output):
        if isinstance(t, Tensor) and t.requires_grad:
            flat = (torch.view_as_real(t) if t.is_complex() else t).flatten()
            weights = torch.arange(1, flat.numel() + 1, device=t.device, dtype=torch.float64).cos()
            total = total.to(t.device) + (flat * weights + flat.square()).sum()
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came out of one forward and backward."""

    output: Any
    param_grads: dict[str, Tensor | None]
    input_grads: list[Tensor | None]
    buffers: dict[str, Tensor]


def run(model: nn.Module, *args: Any, **kwargs: Any) -> Run:
    """Run forward and backward on copies of the inputs."""
    own_args, own_kwargs = tree_map(_fresh, (args, kwargs))
    output = model(*own_args, **own_kwargs)
    score(output).backward()
    return Run(
        output=output,
        param_grads=grads(model),
        input_grads=[t.grad for t in tree_leaves((own_args, own_kwargs)) if isinstance(t, Tensor) and t.is_leaf],
        buffers={name: copy.deepcopy(b) for name, b in model.named_buffers()},
    )


def assert_same(model: everygpu.DataParallel, bare: nn.Module, *args: Any, **kwargs: Any) -> Run:
    """Run both on fresh gradients; compare outputs, gradients of parameters and inputs, and buffers."""
    forget(model, bare)
    ours, theirs = run(model, *args, **kwargs), run(bare, *args, **kwargs)
    torch.testing.assert_close(ours.output, theirs.output, **TOLERANCE)
    assert any(g is not None for g in theirs.param_grads.values()) or not theirs.param_grads, "nothing to compare"
    torch.testing.assert_close(ours.param_grads, theirs.param_grads, **TOLERANCE)
    torch.testing.assert_close(ours.input_grads, theirs.input_grads, **TOLERANCE)
    torch.testing.assert_close(ours.buffers, theirs.buffers, **TOLERANCE)
    return ours


def forget(*modules: nn.Module) -> None:
    """Forget gradients."""
    for module in modules:
        module.zero_grad()


def grads(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients by name."""
    return {name: _dense(p.grad) for name, p in module.named_parameters()}


def assert_same_grads(model: nn.Module, bare: nn.Module) -> None:
    """Compare gradients that are there already."""
    theirs = grads(bare)
    assert any(g is not None for g in theirs.values()), "nothing to compare"
    torch.testing.assert_close(grads(model), theirs, **TOLERANCE)


def _fresh(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def _dense(grad: Tensor | None) -> Tensor | None:
    return grad.to_dense() if grad is not None and grad.layout != torch.strided else grad
