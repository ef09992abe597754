"""What the faults are tried on: everygpu, and the other ways to save a PyTorch model."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
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
    """One way to save a model to a path and to load it again."""

    name: str
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


def _load_with_everygpu(path: Path) -> State:
    model = Weights(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a save that was cut off: the state counts here
        everygpu.load(path, model=model)
    return model.state_dict()


EVERYGPU = Saver(name="everygpu", save=lambda path, model: everygpu.save(path, model=model), load=_load_with_everygpu)
TORCH = Saver(
    name="torch.save",
    save=lambda path, model: torch.save(model.state_dict(), path),
    load=lambda path: torch.load(path, weights_only=True),
)
SAFETENSORS = Saver(
    name="safetensors", save=lambda path, model: save_file(model.state_dict(), path), load=lambda path: load_file(path)
)


def distributed_checkpoint() -> Saver:
    """torch.distributed.checkpoint, imported when asked for: that takes a second."""
    import torch.distributed.checkpoint as dcp

    def save(path: Path, model: nn.Module) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                dcp.save(model.state_dict(), checkpoint_id=path, no_dist=True)
            except dcp.CheckpointException as error:  # no Exception, as others are
                raise RuntimeError(str(error)) from error

    def load(path: Path) -> State:
        state = Weights(-1).state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                dcp.load(state, checkpoint_id=path, no_dist=True)
            except dcp.CheckpointException as error:  # no Exception, as others are
                raise RuntimeError(str(error)) from error
        return state

    return Saver(name="torch.distributed.checkpoint", save=save, load=load)
