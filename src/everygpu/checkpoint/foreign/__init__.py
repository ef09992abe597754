"""Checkpoints that other programs wrote: found out by content, read without executing anything in them."""

from everygpu.checkpoint.foreign.prefixes import fit_names
from everygpu.checkpoint.foreign.read import detach, is_foreign, read_foreign
from everygpu.checkpoint.foreign.sections import Contents, find_state

__all__ = ["Contents", "detach", "find_state", "fit_names", "is_foreign", "read_foreign"]
