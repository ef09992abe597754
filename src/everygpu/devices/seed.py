"""One seed for the whole run, and different numbers on every device."""

import random
import sys
from collections.abc import Sequence

import torch

from everygpu.errors import OptionError

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, odd


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch on every device, so that the whole run can be repeated.

    Replicas on several GPUs still draw different numbers: see ``spread_seeds``::

        everygpu.seed_all(0)

    Args:
        seed: 0 to 2**64 - 1. NumPy takes its lowest 32 bits.
    Raises:
        OptionError: the seed is no whole number in that range.
    Source:
        ``torch.manual_seed``, which seeds each device's generator when the device is first used.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _MASK:
        raise OptionError(
            f"seed_all: the seed must be a whole number from 0 to 2**64 - 1, got {seed!r}. Pass an int such as 0."
        )
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def spread_seeds(devices: Sequence[torch.device]) -> None:
    """Give each CUDA device after the first a seed of its own, where it has the first one's.

    Called at every forward over several devices: ``torch.manual_seed`` gives all of them the same seed,
    so replicas would draw the same dropout masks. Costs one comparison per device when there is nothing to
    do. CPU replicas share one generator and need none of this.

    Args:
        devices: One per replica.
    """
    if len(devices) > 1 and all(device.type == "cuda" for device in devices):
        torch.cuda.init()  # type: ignore[no-untyped-call]
        spread_generators([torch.cuda.default_generators[_index_of(device)] for device in devices])


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def spread_generators(generators: Sequence[torch.Generator]) -> None:
    """Reseed each generator that was seeded like the first, by its position.

    Args:
        generators: One per replica; the first keeps its seed and its state.
    """
    first = generators[0].initial_seed()
    for position, generator in enumerate(generators[1:], start=1):
        if generator.initial_seed() == first:
            generator.manual_seed(derive_seed(first, position))


def derive_seed(seed: int, index: int) -> int:
    """Mix a seed and a position into another seed, far from both.

    Args:
        seed: 0 to 2**64 - 1.
        index: 1 for the first derived seed.
    Returns:
        0 to 2**64 - 1: the ``index``-th number SplitMix64 gives for ``seed``. Never the same for two
        indices of one seed.
    Source:
        Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with
        the constants of https://prng.di.unimi.it/splitmix64.c.
    """
    z = (seed + index * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
