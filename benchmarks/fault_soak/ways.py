"""The ways to train and to save: everygpu's, and those of the peers, each as its own documents show it."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.fault_soak.own import EveryGPU
from benchmarks.fault_soak.peers import Distributed, TorchSave, load_distributed
from benchmarks.fault_soak.setup import Setup, Training, newest_of
from benchmarks.fault_soak.task import Net, make_optimizer
from torch import nn

import everygpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way, as the driver knows it."""

    module: str
    """Must be importable."""
    begin: Callable[[Setup, Path, int], Training]
    is_asynchronous: bool = True
    """Whether it has background saves."""

    def is_there(self) -> bool:
        return importlib.util.find_spec(self.module.partition(".")[0]) is not None


def _lightning(setup: Setup, root: Path, seed: int) -> Any:
    from benchmarks.fault_soak.lightning_way import LightningTraining  # takes seconds

    return LightningTraining(setup, root, seed)


WAYS = {
    "everygpu": Way(module="everygpu", begin=EveryGPU),
    "torch": Way(module="torch", begin=TorchSave, is_asynchronous=False),
    "dcp": Way(module="torch.distributed.checkpoint", begin=Distributed),
    "lightning": Way(module="lightning.pytorch", begin=_lightning, is_asynchronous=False),
}


def has_saved(way: str, root: Path) -> bool:
    """Tell whether there is a checkpoint to go back to."""
    if way == "everygpu":
        return everygpu.CheckpointManager(root).latest() is not None
    return newest_of(way, root) is not None


def read_newest(way: str, root: Path) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
    """Load the newest checkpoint into a bare model; return its step and both states, or None where there is none.

    Raises:
        Exception: it can't be loaded.
    """
    net: nn.Module = Net()
    optimizer = make_optimizer(net)
    if way == "everygpu":
        if everygpu.CheckpointManager(root).latest() is None:
            return None
        step = everygpu.load(root, model=net, optimizer=optimizer)["step"]
        return step, net.state_dict(), optimizer.state_dict()
    path = newest_of(way, root)
    if path is None:
        return None
    if way == "lightning":
        from benchmarks.fault_soak.lightning_way import read

        return read(path)
    if way == "dcp":
        state = load_distributed(path, Distributed(Setup(way=way), root, 0)._collect(0))
    else:
        state = torch.load(path, weights_only=False)
    return state["step"], state["model"], state["optimizer"]
