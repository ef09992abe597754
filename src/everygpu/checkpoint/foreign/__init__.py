"""Checkpoints of other programs, recognised by content and read without executing anything in them."""

from everygpu.checkpoint.foreign.parts import read_parts
from everygpu.checkpoint.foreign.read import is_foreign, read_foreign
from everygpu.checkpoint.foreign.sections import Contents

__all__ = ["Contents", "is_foreign", "read_foreign", "read_parts"]
