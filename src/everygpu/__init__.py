"""Give a PyTorch model every GPU of the machine with one line: ``model = everygpu.DataParallel(model)``.

Names are imported on first use, so that ``everygpu run`` can choose the visible devices before torch
is loaded, and ``everygpu --help`` answers at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everygpu import devices as devices
    from everygpu import parallel as parallel
    from everygpu import step as step
    from everygpu._watchdog import watchdog as watchdog
    from everygpu.checkpoint.load import load as load
    from everygpu.checkpoint.manager import CheckpointManager as CheckpointManager
    from everygpu.checkpoint.save import save as save
    from everygpu.devices.seed import seed_all as seed_all
    from everygpu.devices.select import select_devices as select_devices
    from everygpu.errors import EveryGPUError as EveryGPUError
    from everygpu.feed import Feeder as Feeder
    from everygpu.feed import Meter as Meter
    from everygpu.feed import find_batch_size as find_batch_size
    from everygpu.feed import tune_workers as tune_workers
    from everygpu.parallel.batch_norm import SyncBatchNorm as SyncBatchNorm
    from everygpu.parallel.data_parallel import DataParallel as DataParallel
    from everygpu.parallel.scatter.batch_types import Rows as Rows
    from everygpu.parallel.scatter.batch_types import register_batch as register_batch
    from everygpu.parallel.scatter.split import Replicated as Replicated
    from everygpu.ranks.launch import launch as launch
    from everygpu.ranks.membership import is_main as is_main
    from everygpu.step.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
    from everygpu.step.train_step import TrainStep as TrainStep

__version__ = "0.1.0.dev0"

_HOME = {
    "CheckpointManager": "checkpoint",
    "DataParallel": "parallel",
    "EveryGPUError": "errors",
    "Feeder": "feed",
    "Meter": "feed",
    "Replicated": "parallel",
    "Rows": "parallel",
    "ShardedOptimizer": "step",
    "SyncBatchNorm": "parallel.batch_norm",
    "TrainStep": "step",
    "find_batch_size": "feed",
    "is_main": "ranks.membership",
    "launch": "ranks.launch",
    "load": "checkpoint",
    "register_batch": "parallel",
    "save": "checkpoint",
    "seed_all": "devices.seed",
    "select_devices": "devices.select",
    "tune_workers": "feed",
    "watchdog": "_watchdog",
}

_PACKAGES = ("devices", "parallel", "step")
"""Packages with further public names, in their ``__all__``."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__, *_PACKAGES]
