"""Forward, backward and whole steps captured as CUDA graphs over several GPUs."""
