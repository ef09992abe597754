"""Forward, backward and whole steps recorded as CUDA graphs over several GPUs."""
