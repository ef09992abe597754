"""Optimizers that one kernel can do the work of: a rule each."""
