"""Checkpoints without pickle: a directory of safetensors and JSON, written beside and renamed."""

from everygpu.checkpoint.load import load
from everygpu.checkpoint.manager import CheckpointManager
from everygpu.checkpoint.position import ResumableLoader
from everygpu.checkpoint.save import save

__all__ = ["CheckpointManager", "ResumableLoader", "load", "save"]
