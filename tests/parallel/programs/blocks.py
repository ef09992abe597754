"""Layers of random programs: each maps ``(..., WIDTH)`` to its own shape, with one feature that replicas carry."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import everygpu

WIDTH = 6


class Layer(nn.Module):
    """Has a layer, and runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.encode(x)))


class Shared(nn.Module):
    """One module under two names, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Checkpointed(nn.Module):
    """Computes its activations again in backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:  # torch warns that a reentrant one would have no gradients
            return x + self.body(x)
        return x + checkpoint(self.body, x, use_reentrant=self.use_reentrant)


class FrozenNorm(nn.Module):
    """Batch normalisation that stays in eval mode, as detectors use it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        nn.init.normal_(self.norm.running_mean)
        self.train()

    def train(self, mode: bool = True) -> "FrozenNorm":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, -2)).view_as(x)


class SynchronizedNorm(nn.Module):
    """Batch normalisation over the rows of all replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = everygpu.SyncBatchNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(-1, 1)).movedim(1, -1)


class Counter(Layer):
    """Counts its calls in training, in a buffer and in an attribute, and computes with both."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_calls += 1
            self.calls += 1
        return self.lin(x) / (1 + 0.1 * self.calls + 0.01 * self.num_calls)


class RunningMean(Layer):
    """Subtracts a running mean of earlier batches: ``buffers="mean"`` makes it that of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out = self.lin(x - self.mean.clone())
        if self.training:
            self.mean.lerp_(x.detach().flatten(0, -2).mean(0).to(self.mean.dtype), 0.1)
        return out


class Tempered(Layer):
    """Computes with attributes that the loop changes, a number, a flag and a list; one layer takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0
        self.mode = "sum"
        self.gains = [1.0, 0.5]
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "sum":
            return x * self.gains[0] + torch.tanh(self.lin(x) / self.temperature)
        return x * torch.tanh(self.other(x)) * self.gains[-1]


class Hooked(Layer):
    """Has hooks on its layer that are its own methods, and keeps what they saw until its forward is over."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.seen: list[Tensor] = []
        self.lin.register_forward_pre_hook(self._before)
        self.lin.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: Any) -> Any:
        self.seen.append(args[0])
        return (args[0] + self.gain,)

    def _after(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.gain.sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        out = self.lin(x)
        return out + self.seen.pop()


class LowRank(nn.Module):
    """A frozen layer with a trained change of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(WIDTH, 2) / 2)
        self.up = nn.Parameter(torch.randn(2, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down @ self.up


class _Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grad, None


class Reversed(Layer):
    """Reverses gradients by an autograd function of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(_Reversal.apply(x, 0.5)))


class InPlace(Layer):
    """Writes into its activations."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.lin(x)
        out[..., : WIDTH // 2].mul_(2)
        return F.leaky_relu_(out) + x


class Experts(nn.Module):
    """Sends each row to one of several layers, in a ModuleDict, with scales in a ParameterList."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("low", "high")})
        self.scales = nn.ParameterList([torch.randn(WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        is_high = x.detach().sum(-1) > 0
        out = torch.zeros_like(x)
        for mask, expert, scale in zip((~is_high, is_high), self.experts.values(), self.scales):
            if mask.any():
                out[mask] = (expert(x[mask]) * scale).to(out.dtype)
        return out


class Called(Layer):
    """Calls its layer with weights that it computes: ``torch.func.functional_call``."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        weights = {"weight": self.lin.weight * self.log_scale.exp()}
        return torch.tanh(torch.func.functional_call(self.lin, weights, (x,)))


class Attention(nn.Module):
    """Attends to positions of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Recurrent(nn.Module):
    """Reads a sequence from both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rnn(x)[0]


class Moving(Layer):
    """Moves its weights in forward, as recurrent layers do on GPUs."""

    def forward(self, x: Tensor) -> Tensor:
        for p in self.lin.parameters():
            p.data = p.data.clone()
        return torch.tanh(self.lin(x))


class Averaged(Layer):
    """Has a frozen average of its layer, which the loop writes after each update."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x)) + self.mean(x)

    @torch.no_grad()
    def follow(self, *, is_counted: bool) -> None:
        """Move the average towards the layer, in a way that torch counts as a write, or through ``.data``."""
        for mean, p in zip(self.mean.parameters(), self.lin.parameters()):
            (mean if is_counted else mean.data).lerp_(p, 0.3)


def normed(change: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    """Make a block of a layer whose weight is computed anew for each forward."""
    return lambda: nn.Sequential(change(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": Layer,
    "residual": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()),
    "tied": Tied,
    "shared": Shared,
    "weight norm": normed(parametrizations.weight_norm),
    "spectral norm": normed(parametrizations.spectral_norm),
    "orthogonal": normed(parametrizations.orthogonal),
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(use_reentrant=True),
    "frozen norm": FrozenNorm,
    "synchronised norm": SynchronizedNorm,
    "counter": Counter,
    "running mean": RunningMean,
    "tempered": Tempered,
    "hooked": Hooked,
    "low rank": LowRank,
    "moving": Moving,
    "averaged": Averaged,
    "reversed": Reversed,
    "in place": InPlace,
    "experts": Experts,
    "functional call": Called,
    "attention": Attention,
    "recurrent": Recurrent,
}

FOR_SEQUENCES = frozenset({"attention", "recurrent"})
"""Blocks that need three dimensions."""
