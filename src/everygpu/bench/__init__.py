"""Ourselves beside the other ways to use several GPUs: each row in a process of its own, in one call."""
