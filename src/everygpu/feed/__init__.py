"""Around the training loop: data to the devices, numbers back."""

from everygpu.feed.meter import Meter

__all__ = ["Meter"]
