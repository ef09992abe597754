"""Around the training loop: data to the devices, numbers back."""

from everygpu.feed.feeder import Feeder
from everygpu.feed.meter import Meter

__all__ = ["Feeder", "Meter"]
