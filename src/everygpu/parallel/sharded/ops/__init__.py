"""Rules for torch's operations on shards, by family."""
