"""The generators of a loader's own, torch's, NumPy's and Python's, and their states as a checkpoint holds them."""

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from everygpu import tree
from everygpu.checkpoint.loaders import generators_of
from everygpu.checkpoint.rng import to_bytes, to_tensor


def order_generators(loader: Any) -> list[Any]:
    """Find the generators that a loader's order may come from, each once: also those under other names in samplers."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    own = [value for sampler in _with_inner(samplers) for value in _attributes(sampler)]
    # First those that earlier versions kept, by which their positions are read.
    return list({id(g): g for g in [*generators_of(loader), *own] if _is_generator(g)}.values())


def generator_state(generator: Any) -> Any:
    """Return the state of a generator: torch's as bytes, NumPy's as a dict, Python's as a tuple."""
    if isinstance(generator, torch.Generator):
        return to_bytes(generator.get_state())
    if isinstance(generator, random.Random):
        return generator.getstate()
    state = generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state(legacy=False)
    return tree.map_leaves(lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, state)


def set_generator(generator: Any, state: Any) -> None:
    """Set a generator to a state that `generator_state` returned of one of its kind."""
    if isinstance(generator, torch.Generator):
        generator.set_state(to_tensor(state))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def state_kind(state: Any) -> str:
    """Name what a state is of."""
    if isinstance(state, dict):
        return f"NumPy's {state.get('bit_generator')}"
    return "torch's" if isinstance(state, bytes) else "Python's"


def _with_inner(samplers: list[Any]) -> Iterator[Any]:
    """Go through samplers and those within them, each once."""
    left, known = list(samplers), set()
    while left:
        sampler = left.pop(0)
        if id(sampler) not in known:
            known.add(id(sampler))
            yield sampler
            left += [value for value in _attributes(sampler) if isinstance(value, Sampler)]


def _attributes(sampler: Any) -> list[Any]:
    return list(getattr(sampler, "__dict__", {}).values())


def _is_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    is_python = isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)
    return is_python or isinstance(value, (torch.Generator, *kinds))
