"""Around the training loop: data to the devices, numbers back, and the sizes that fit."""

from everygpu.feed.feeder import Feeder
from everygpu.feed.meter import Meter
from everygpu.feed.tune import find_batch_size, tune_workers

__all__ = ["Feeder", "Meter", "find_batch_size", "tune_workers"]
