"""Checkpoints without pickle: a directory of safetensors and JSON, written beside and renamed."""

from everygpu.checkpoint.load import load
from everygpu.checkpoint.manager import CheckpointManager
from everygpu.checkpoint.save import save

__all__ = ["CheckpointManager", "load", "save"]
