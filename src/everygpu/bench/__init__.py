"""Benchmarks of everygpu and its peers: each row in a process of its own, all in one call."""

from everygpu.bench.batches import Batches

__all__ = ["Batches"]
