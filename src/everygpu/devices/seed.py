"""Random numbers: one seed for the whole run, others on every device, and the states of all generators."""

import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor

from everygpu.errors import OptionError
from everygpu.ranks.membership import find_membership

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, odd


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch on every device, so that the whole run can be repeated.

    Replicas still draw different numbers, from the first forward on. Under several ranks pass all of them the same
    seed: parameters made before the first forward are equal on all ranks, and so is the data's order::

        everygpu.seed_all(0)

    Args:
        seed: 0 to 2**64 - 1. NumPy takes its lowest 32 bits.
    Raises:
        OptionError: the seed is no whole number in that range.
    Source:
        ``torch.manual_seed``, which seeds each device's generator when the device is first used.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _MASK:
        raise OptionError(f"seed_all: {seed!r} is no seed. Pass a whole number from 0 to 2**64 - 1, such as 0.")
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def take_rng_states(with_cuda: bool = True) -> dict[str, Any]:
    """Return the states of every generator in use, without drawing from any; CUDA's where it is in use."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state().numpy().tobytes()}
    states["numpy"] = _to_lists(numpy.random.get_state(legacy=False))
    if with_cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    return states


def plan_rng_restore(states: Any) -> Callable[[], None]:
    """Check saved states and return what puts them back; those of CUDA devices that are not here are left out."""
    random.Random().setstate(states["python"])
    torch_state = _to_tensor(states["torch"])
    torch.Generator().set_state(torch_state)
    cuda = [_to_tensor(state) for state in states.get("cuda", [])]
    # Of the same kind as numpy's global one, which a program may have replaced.
    kind = type(numpy.random.get_bit_generator())  # type: ignore[attr-defined]
    numpy.random.RandomState(kind()).set_state(states["numpy"])

    def restore() -> None:
        random.setstate(states["python"])
        torch.set_rng_state(torch_state)
        numpy.random.set_state(states["numpy"])
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for index, state in enumerate(cuda[:count]):
            torch.cuda.set_rng_state(state, index)

    return restore


@contextmanager
def rng_states_kept(with_cuda: bool = True) -> Iterator[None]:
    """Put the random states back when the block ends, as `take_rng_states` takes them."""
    restore = plan_rng_restore(take_rng_states(with_cuda))
    try:
        yield
    finally:
        restore()


def _to_tensor(state: Any) -> Tensor:
    if not isinstance(state, bytes):
        raise TypeError(f"a state must be bytes, not {type(state).__name__}")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _to_lists(state: Any) -> Any:
    """Replace NumPy's arrays, which would be stored as tensors, by lists."""
    if isinstance(state, dict):
        return {key: _to_lists(item) for key, item in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def spread_seeds(devices: Sequence[torch.device]) -> None:
    """Give each replica's generator its own seed if it still has the run's; called at every forward."""
    # torch.manual_seed gives all devices of all ranks the same seed: they would draw the same dropout masks. CPU
    # replicas of one process share one generator, which keeps the run's seed on rank 0 alone.
    membership = find_membership()
    first = 0 if membership is None else membership.rank * len(devices)
    if len(devices) + first == 1:
        return
    if all(device.type == "cuda" for device in devices):
        torch.cuda.init()  # type: ignore[no-untyped-call]
        indices = dict.fromkeys(torch.cuda.current_device() if d.index is None else d.index for d in devices)
        spread_generators([torch.cuda.default_generators[i] for i in indices], first)
    elif first:
        _spread_cpu(first)


def seeds_by_replica(positions: Sequence[int]) -> list[int]:
    """Draw a number from the CPU's generator, and derive a seed from it for each of some replicas."""
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    return [derive_seed(seed, position + 1) for position in positions]


class OwnRandom(ABC):
    """Random numbers of each replica's own."""

    @abstractmethod
    def enter(self, index: int) -> None:
        """Draw a replica's own numbers from now on."""

    @abstractmethod
    def leave(self, index: int) -> None:
        """Draw other numbers until the replica continues."""

    @contextmanager
    def turn(self, index: int) -> Iterator[None]:
        """Draw a replica's own numbers within."""
        self.enter(index)
        try:
            yield
        finally:
            self.leave(index)


class ReplicaRandom(OwnRandom):
    """Random numbers of each replica's own, whichever device it is on, for one forward.

    Each has the generators of the CPU and of its device while it runs, seeded by its number and by a number drawn from
    the CPU's: so a checkpoint holds all that there is, for any number of devices.
    """

    def __init__(self, devices: Sequence[torch.device], positions: Sequence[int]) -> None:
        self._seeds = seeds_by_replica(positions)
        self._generators = [[torch.default_generator, *_generators_of(device)] for device in devices]
        self._states: dict[int, list[Tensor]] = {}
        self._before: list[Tensor] = []

    def enter(self, index: int) -> None:
        generators, states = self._generators[index], self._states.get(index)
        self._before = [g.get_state() for g in generators]
        for k, generator in enumerate(generators):
            if states is None:
                generator.manual_seed(self._seeds[index])
            else:
                generator.set_state(states[k])

    def leave(self, index: int) -> None:
        generators = self._generators[index]
        self._states[index] = [g.get_state() for g in generators]
        for generator, state in zip(generators, self._before):
            generator.set_state(state)


class CapturedRandom(OwnRandom):
    """Each replica's own random numbers in a CUDA graph, which seeds its generators before each replay.

    The host's generators stay as they are: a capture in which they are drawn from is refused.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators
        self._before: torch.Generator | None = None

    def enter(self, index: int) -> None:
        generator = self._generators[index]
        default = torch.cuda.default_generators[generator.device.index]
        self._before = default.graphsafe_get_state()
        default.graphsafe_set_state(generator)

    def leave(self, index: int) -> None:
        assert self._before is not None  # noqa: S101 - it has been entered
        torch.cuda.default_generators[self._generators[index].device.index].graphsafe_set_state(self._before)


RandomOf = Callable[[Sequence[torch.device], Sequence[int]], OwnRandom | None]
"""From the replicas' devices and numbers to their random numbers; None where replicas draw from their devices'."""


def _generators_of(device: torch.device) -> list[torch.Generator]:
    return [torch.cuda.default_generators[device.index]] if device.type == "cuda" else []


def spread_generators(generators: Sequence[torch.Generator], first: int = 0) -> None:
    """Reseed each generator that was seeded like the first replica's, by its position among all ranks' replicas."""
    own = generators[0].initial_seed()
    # Of a first replica on another rank the seed is that of the CPU here, as torch.manual_seed sets both.
    run = torch.initial_seed() if first else own
    # A rank whose GPUs alone were seeded is spread by what they were given, as without ranks.
    seed = run if own in (run, derive_seed(run, first)) else own
    for position, generator in enumerate(generators, start=first):
        if position and generator.initial_seed() == seed and (seed == run or generator is not generators[0]):
            generator.manual_seed(derive_seed(seed, position))


def _spread_cpu(position: int) -> None:
    """Reseed the CPU's generator from its state, which is the same on all ranks, unless its seed shows that it was."""
    generator = torch.default_generator
    if generator.initial_seed() != _marked(generator.initial_seed() >> 32, position):
        state = zlib.crc32(generator.get_state().numpy().tobytes())
        generator.manual_seed(_marked(derive_seed(state, position) >> 32, position))


def _marked(number: int, position: int) -> int:
    """Make a seed of a number of 32 bits, in whose lower half only seeds made here have its checksum."""
    return number << 32 | zlib.crc32(f"{number} {position}".encode())


def derive_seed(seed: int, index: int) -> int:
    """Give the ``index``-th number, from 1 on, of SplitMix64 for a seed: never the same for two indices."""
    # Steele, Lea and Flood, OOPSLA 2014, with the constants of https://prng.di.unimi.it/splitmix64.c.
    z = (seed + index * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
