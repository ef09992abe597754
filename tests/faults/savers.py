"""What the faults are tried on: a model whose every element tells which version was saved, saved and loaded."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import everygpu

State = dict[str, Tensor]


class Weights(nn.Module):
    """Tensors of which every element tells which version was saved."""

    def __init__(self, version: int, num_elements: int = 4096) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((num_elements,), float(version)))
        self.second = nn.Parameter(torch.arange(num_elements, dtype=torch.float32) + version)
        self.register_buffer("counts", torch.full((num_elements // 4,), version))


@dataclass(frozen=True, slots=True, kw_only=True)
class Saver:
    """A way to save a model to a path and to load it again."""

    save: Callable[[Path, nn.Module], object]
    load: Callable[[Path], State]


def version_of(state: State) -> int:
    """Tell which version a loaded state is, bit by bit.

    Raises:
        AssertionError: it is none: parts of two, or altered.
    """
    version = int(state["counts"][0])
    expected = Weights(version, len(state["first"])).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state), "the state is a mix, or altered"
    return version


def _load(path: Path) -> State:
    model = Weights(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a save that was cut off: the state counts here
        everygpu.load(path, model=model)
    return model.state_dict()


EVERYGPU = Saver(save=lambda path, model: everygpu.save(path, model=model), load=_load)
