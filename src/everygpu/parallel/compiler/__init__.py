"""torch.compile for several GPUs: compiled once, run on each."""
