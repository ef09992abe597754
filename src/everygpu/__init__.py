"""Give a PyTorch model every GPU of the box with one line: ``model = everygpu.DataParallel(model)``.

Names are imported on first use, so that ``everygpu run`` can choose the visible devices before torch
is loaded, and ``everygpu --help`` answers at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everygpu.checkpoint.load import load as load
    from everygpu.checkpoint.manager import CheckpointManager as CheckpointManager
    from everygpu.checkpoint.position import ResumableLoader as ResumableLoader
    from everygpu.checkpoint.save import save as save
    from everygpu.devices import seed_all as seed_all
    from everygpu.devices import select_devices as select_devices
    from everygpu.devices import visible_devices as visible_devices
    from everygpu.errors import EveryGPUError as EveryGPUError
    from everygpu.feed import Meter as Meter
    from everygpu.parallel.apply import parallel_apply as parallel_apply
    from everygpu.parallel.data_parallel import DataParallel as DataParallel
    from everygpu.parallel.data_parallel import data_parallel as data_parallel
    from everygpu.parallel.gather import gather as gather
    from everygpu.parallel.replicate import replicate as replicate
    from everygpu.parallel.scatter import scatter as scatter
    from everygpu.parallel.sharded_batch import ShardedBatch as ShardedBatch
    from everygpu.parallel.split import Replicated as Replicated

__version__ = "0.1.0.dev0"

_HOME = {
    "CheckpointManager": "checkpoint",
    "DataParallel": "parallel",
    "EveryGPUError": "errors",
    "Meter": "feed",
    "Replicated": "parallel",
    "ResumableLoader": "checkpoint",
    "ShardedBatch": "parallel",
    "data_parallel": "parallel",
    "gather": "parallel",
    "load": "checkpoint",
    "parallel_apply": "parallel",
    "replicate": "parallel",
    "save": "checkpoint",
    "scatter": "parallel",
    "seed_all": "devices",
    "select_devices": "devices",
    "visible_devices": "devices",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
