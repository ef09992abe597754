"""Benchmarks of everygpu and its peers: each row in a process of its own, all in one call."""
