"""Random generators of a device, kept in step between two processes."""

import random
import sys
import zlib

import torch

from everygpu.devices.seed import derive_seed


def read_generators(device: torch.device, position: int) -> tuple[bytes | int, int]:
    """Return what a helper's generators are to be set to for a call.

    Args:
        device: The replica's. A GPU's generator is the same in both processes: its state is sent there and back. On the
            CPU replicas have one generator in common: each helper gets a seed derived from its state.
        position: Of the replica.
    Returns:
        The state or seed of torch's generator; and a seed for Python's and NumPy's.
    """
    python = random.getstate()
    host_seed = derive_seed(zlib.crc32(repr(python[1][-1]).encode()) + hash(python), position)
    if device.type == "cuda":
        return _cuda_state(device), host_seed
    return derive_seed(zlib.crc32(torch.get_rng_state().numpy().tobytes()), position), host_seed


def set_generators(device: torch.device, states: tuple[bytes | int, int], *, before: int | None) -> None:
    """Set a helper's generators.

    Args:
        device: The helper's.
        states: As ``read_generators`` returned them.
        before: The last seed of Python's and NumPy's, which go on where it is the same.
    """
    state, host_seed = states
    if isinstance(state, bytes):
        set_cuda_state(device, state)
    else:
        torch.default_generator.manual_seed(state)  # torch.manual_seed is 300 times as slow: it seeds GPUs, too
    if host_seed != before:
        random.seed(host_seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(host_seed % 2**32)


def cuda_state(device: torch.device) -> bytes | None:
    """Return the state of a GPU's generator; None for the CPU."""
    return _cuda_state(device) if device.type == "cuda" else None


def set_cuda_state(device: torch.device, state: bytes) -> None:
    """Set the state of a GPU's generator."""
    torch.cuda.default_generators[device.index].set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _cuda_state(device: torch.device) -> bytes:
    return bytes(torch.cuda.default_generators[device.index].get_state().numpy())
