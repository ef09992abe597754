"""Models and wrappers that the checkpoint tests save from and load into."""

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

from everygpu import DataParallel


class Net(nn.Module):
    """Tied weights, BatchNorm, a non-persistent buffer, and a submodule really called ``module``."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Linear(4, 6, bias=False)
            self.norm = nn.BatchNorm1d(6)
            self.module = nn.Linear(6, 6)
            self.drop = nn.Dropout(0.25)
            self.head = nn.Linear(4, 6, bias=False)
            self.norm.running_mean = torch.randn(6)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.module(self.norm(self.embed(x)))) @ self.head.weight


class Counting(nn.Module):
    """A module with extra state."""

    def __init__(self, extra: object = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


Wrap = Callable[[nn.Module], nn.Module]
WRAPPERS: dict[str, Wrap] = {
    "bare": lambda model: model,
    "dp": lambda model: nn.DataParallel(model),
    "compiled": compiled,
    "compiled dp": lambda model: compiled(nn.DataParallel(model)),
    "everygpu": lambda model: DataParallel(model, ["cpu", "cpu"]),
    "compiled everygpu": lambda model: compiled(DataParallel(model, ["cpu", "cpu", "cpu"])),
}


def snapshot(*objects: object) -> list[object]:
    """A deep copy of the objects' states, to see later that nothing has changed."""
    return [deepcopy(value.state_dict()) for value in objects]  # type: ignore[attr-defined]


def same_state(a: object, b: object) -> bool:
    """Equal bit by bit, in value and type, at every depth."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same_state, a, b))
    return repr(a) == repr(b)


def _bits(tensor: Tensor) -> list[int]:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).tolist() if flat.numel() else []
