"""Batch normalisation over the rows of all replicas."""
