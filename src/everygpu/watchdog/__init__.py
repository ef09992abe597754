"""Ends a run that no longer goes on, and says where it is stuck. Nothing here imports torch: ``everygpu run`` watches
before a script has loaded it."""

from everygpu.watchdog.watch import Watch as Watch
from everygpu.watchdog.watch import watch as watch

__all__ = ["Watch", "watch"]
