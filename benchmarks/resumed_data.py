"""Runs that are saved while a Feeder fetches ahead, and resumed: which samples they see."""

import random
import tempfile
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import everygpu

_NUM_SAMPLES, _BATCH_SIZE, _NUM_EPOCHS = 48, 4, 2
_NUM_BATCHES = _NUM_SAMPLES // _BATCH_SIZE * _NUM_EPOCHS


def count_wrong_resumes(num_tries: int) -> str:
    """Save at random batches, resume in new objects, and compare the samples with those of a run that goes on."""
    chance, bad = random.Random(0), 0
    for _ in range(num_tries):
        with tempfile.TemporaryDirectory() as root:
            bad += not _is_resumed_rightly(Path(root), chance)
    return f"{bad} of {num_tries} lost"


def _is_resumed_rightly(root: Path, chance: random.Random) -> bool:
    seed, after = chance.randrange(10**6), chance.randrange(1, _NUM_BATCHES)
    prefetch, num_workers = chance.randrange(1, 6), chance.choice([0, 0, 0, 2])
    asynchronous = chance.random() < 0.5

    def make() -> everygpu.Feeder:
        order = torch.Generator().manual_seed(seed)
        loader = DataLoader(
            torch.arange(_NUM_SAMPLES), _BATCH_SIZE, shuffle=True, generator=order, num_workers=num_workers
        )  # fmt: skip
        return everygpu.Feeder(loader, ["cpu"] * 2, prefetch=prefetch)

    feeder = make()
    whole = _samples(feeder, _NUM_BATCHES)
    feeder = make()
    with everygpu.CheckpointManager(root, asynchronous=asynchronous) as checkpoints:
        seen = _samples(feeder, after)
        checkpoints.save(after, data=feeder)
    feeder.close()
    feeder = make()
    checkpoints.load(data=feeder)
    return seen + _samples(feeder, _NUM_BATCHES - after) == whole


def _samples(feeder: everygpu.Feeder, num_batches: int) -> list[int]:
    """Train on so many batches, over as many passes as that takes."""
    found: list[Tensor] = []
    while len(found) < num_batches:
        found += islice(feeder, num_batches - len(found))
    return [sample for batch in found for sample in batch.tolist()]
