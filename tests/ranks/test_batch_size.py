"""The largest batch is searched for by each rank alone, and is that of the smallest for all."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import everygpu
from everygpu.feed import batch_size
from everygpu.ranks.group import join
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.usefixtures("warm_python")

LIMITS = [20, 9]
"""Rows that fit on each rank."""


class Hungry(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 3), everygpu.SyncBatchNorm(3)

    def forward(self, x):
        if len(x) > LIMITS[join().rank]:
            raise torch.OutOfMemoryError("in forward, on one rank")
        return self.norm(self.linear(x))


def search(makes_step):
    rank = join().rank
    torch.manual_seed(0)
    model = everygpu.DataParallel(Hungry(), ["cpu"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train = everygpu.TrainStep(model, F.cross_entropy, optimizer, capture=False) if makes_step else None

    def step(batch):
        if train is not None:
            train(*batch)
            return
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    start = [p.detach().clone() for p in model.parameters()]
    batch = torch.arange(8.0).view(4, 2) + rank, torch.arange(4) % 3
    report = everygpu.find_batch_size(step, batch, model, optimizer, max_rows=64)
    as_before = all(torch.equal(p, before) for p, before in zip(model.parameters(), start))
    step(batch)
    after = [p.detach() for p in model.parameters()]
    return report.num_rows, len(report.trials), as_before, [p.tolist() for p in join().gather(after)[1 - rank]], after


def search_all_ways():
    batch_size.require_gpus = lambda devices: []  # the step itself says when memory runs out
    found = search(False), search(True)
    fail_on_one()
    return found


def test_the_smallest_of_all_counts_and_another_error_reaches_all(tmp_path):
    first, second = run_ranks(search_all_ways, size=2, folder=tmp_path)
    for mine, theirs in zip(first, second):
        num_rows, num_trials, as_before, others, after = mine
        assert num_rows == theirs[0] == 2 * LIMITS[1]
        assert num_trials != theirs[1]  # each its own
        assert as_before
        assert theirs[2]
        assert others == [p.tolist() for p in after]  # and they train together again


def fail_on_one():
    rank = join().rank
    model = everygpu.DataParallel(nn.Linear(2, 3), ["cpu"])

    def step(batch):
        if rank == 1:
            raise ValueError("in the user's step")
        model(batch)

    with pytest.raises((everygpu.EveryGPUError, ValueError), match="in the user's step"):
        everygpu.find_batch_size(step, torch.ones(4, 2), model, max_rows=16)
