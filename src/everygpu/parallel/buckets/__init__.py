"""Flat memory in which parameters and gradients travel."""
