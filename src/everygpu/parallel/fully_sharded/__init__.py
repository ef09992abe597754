"""Models that don't fit one GPU: torch's FSDP2, with one process a GPU."""
