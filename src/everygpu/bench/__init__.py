"""Benchmarks of everygpu and its peers: each row in a process of its own, all in one call."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everygpu.bench.training import Batches as Batches

__all__ = ["Batches"]


def __getattr__(name: str) -> object:
    if name == "Batches":  # the command's help doesn't wait for torch
        from everygpu.bench.training import Batches

        return Batches
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
