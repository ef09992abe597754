"""The ways to save a run's checkpoints beside its training, each with the newest kept, as its own documents show."""

import contextlib
import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from tests.faults.savers import Weights, version_of

import everygpu

NUM_ELEMENTS = 400_000
"""Of each of the model's tensors: 4 MB together."""


class Run(Protocol):
    """What a program does with a saver."""

    def save(self, step: int, model: Weights) -> object: ...

    def close(self) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncSaver:
    """One way to save."""

    name: str
    module: str
    """Must be importable."""
    begin: Callable[[Path, int], Run]
    """Takes the directory and how many checkpoints to keep."""
    load: Callable[[Path], int]
    """Returns the version that the newest checkpoint in a directory holds; fails if that is damaged."""

    def is_there(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


class _EveryGPU:
    def __init__(self, root: Path, keep: int) -> None:
        self._root, self._keep = root, keep
        self._checkpoints: everygpu.CheckpointManager | None = None

    def save(self, step: int, model: Weights) -> None:
        if self._checkpoints is None:
            options = {"keep": self._keep, "asynchronous": True, "overwrite": True}
            self._checkpoints = everygpu.CheckpointManager(self._root, model=model, **options)
        self._checkpoints.save(step)

    def close(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()


def _load_with_everygpu(root: Path) -> int:
    model = Weights(-1, NUM_ELEMENTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an older one in the newest's place is a loss too
        everygpu.load(root, model=model)
    return version_of(model.state_dict())


class _Distributed:
    """``async_save``; the one before is waited for, and only then older ones are removed."""

    def __init__(self, root: Path, keep: int) -> None:
        self._root, self._keep = root, keep
        self._saving: Future[Any] | None = None

    def save(self, step: int, model: Weights) -> None:
        from torch.distributed.checkpoint import async_save

        self.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._saving = async_save(model.state_dict(), checkpoint_id=self._root / f"{step:08d}", no_dist=True)

    def close(self) -> None:
        if self._saving is not None:
            self._saving.result()
            for old in _complete(self._root)[: -self._keep]:
                shutil.rmtree(old)


def _complete(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("*") if (path / ".metadata").exists())


def _load_distributed(root: Path) -> int:
    import torch.distributed.checkpoint as dcp

    state = Weights(-1, NUM_ELEMENTS).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=_complete(root)[-1], no_dist=True)
    return version_of(state)


class _Lightning:
    """``AsyncCheckpointIO``, as Trainer and ModelCheckpoint drive it: the oldest is removed after the call."""

    def __init__(self, root: Path, keep: int) -> None:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        self._saver = AsyncCheckpointIO(TorchCheckpointIO())
        self._root, self._keep, self._saved = root, keep, list[Path]()
        self.close = self._saver.teardown

    def save(self, step: int, model: Weights) -> None:
        path = self._root / f"{step:08d}.ckpt"
        self._saver.save_checkpoint({"state_dict": model.state_dict()}, path)
        self._saved.append(path)
        for old in self._saved[: -self._keep]:
            self._saver.remove_checkpoint(old)
            self._saved.remove(old)


def _load_of_lightning(root: Path) -> int:
    return version_of(torch.load(max(root.glob("*.ckpt")), weights_only=True)["state_dict"])


class _Accelerate:
    """``save_state``, which is synchronous, with its own names and its own limit."""

    def __init__(self, root: Path, keep: int) -> None:
        from accelerate import Accelerator
        from accelerate.utils import ProjectConfiguration

        configuration = ProjectConfiguration(project_dir=str(root), automatic_checkpoint_naming=True, total_limit=keep)
        configuration.iteration = max((_iteration_of(path) + 1 for path in root.glob("checkpoints/*")), default=0)
        self._accelerator = Accelerator(cpu=True, project_config=configuration)
        self._model: Weights | None = None

    def save(self, step: int, model: Weights) -> None:
        if self._model is None:
            self._model = self._accelerator.prepare(model)
        with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
            self._accelerator.save_state()

    def close(self) -> None:
        self._accelerator.end_training()


def _iteration_of(path: Path) -> int:
    return int(path.name.removeprefix("checkpoint_"))


def _load_of_accelerate(root: Path) -> int:
    from safetensors.torch import load_file

    newest = max(root.glob("checkpoints/*"), key=_iteration_of)
    return version_of(load_file(newest / "model.safetensors"))


ASYNC_SAVERS = (
    AsyncSaver(name="everygpu", module="everygpu", begin=_EveryGPU, load=_load_with_everygpu),
    AsyncSaver(name="DCP async_save", module="torch.distributed", begin=_Distributed, load=_load_distributed),
    AsyncSaver(name="Lightning AsyncCheckpointIO", module="lightning", begin=_Lightning, load=_load_of_lightning),
    AsyncSaver(name="accelerate save_state", module="accelerate", begin=_Accelerate, load=_load_of_accelerate),
)
