"""Loaders that are split already, resumed on other ranks: each row once in an epoch, or a reason why not."""

import itertools
import random

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from everygpu import Feeder
from everygpu.errors import CheckpointMismatchError
from tests.feed.loaders import numbered

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


class Rows(Dataset):
    """The numbers from 0; told the epoch."""

    def __init__(self, num):
        self.num, self.epoch = num, None

    def __len__(self):
        return self.num

    def __getitem__(self, i):
        return i

    def set_epoch(self, epoch):
        self.epoch = epoch


def split(num, ranks, batch_size, drop_last=False, **options):
    """A Feeder for each rank, of a loader with a DistributedSampler."""
    data = Rows(num)
    samplers = [DistributedSampler(data, ranks, rank, **options) for rank in range(ranks)]
    return [Feeder(DataLoader(data, batch_size, sampler=s, drop_last=drop_last), "cpu", prefetch=0) for s in samplers]


def steps(feeders, stop=None):
    """The rows of each step, of all ranks in turn: the order of the whole run."""
    feeds = [iter(feeder) for feeder in feeders]
    for _ in range(10**6) if stop is None else range(stop):
        batches = [next(feed, None) for feed in feeds]
        if batches[0] is None:
            return
        assert {len(b) for b in batches} == {len(batches[0])}
        yield torch.stack(batches).T.flatten().tolist()


def test_a_distributed_sampler_is_told_the_epoch():
    loader = DataLoader(range(20), 4, sampler=DistributedSampler(range(20), 2, 0, seed=3))
    expected = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        expected.append([x.tolist() for x in loader])
    loader.sampler.set_epoch(0)
    feeder = Feeder(loader, "cpu")
    assert [[x.tolist() for x in feeder] for _ in range(3)] == expected
    assert len({str(epoch) for epoch in expected}) == 3


class ByEpoch(BatchSampler):
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_whatever_has_the_method_is_told_once_and_after_a_resume():
    told = []

    class Told(DataLoader):
        def set_epoch(self, epoch):
            told.append(epoch)

    def make():
        data = Rows(8)
        batches = ByEpoch(DistributedSampler(data, 2, 1), 2, False)
        return Feeder(Told(data, batch_sampler=batches), "cpu")

    feeder = make()
    list(feeder)
    next(iter(feeder))
    again = make()
    again.load_state_dict(feeder.state_dict())
    list(again)
    batches = again.batch_sampler
    assert (told, batches.epoch, batches.sampler.epoch, again.dataset.epoch) == ([0, 1, 1], 1, 1, 1)


def test_workers_that_persist_are_not_told_and_you_are(caplog):
    Feeder(DataLoader(Rows(8), num_workers=1, persistent_workers=True), "cpu")
    assert ["workers that persist have copies of the dataset" in text for text in caplog.messages] == [True]


def check_one(seed):
    """Save on some ranks, go on with others: as without a stop, or refused with the numbers that go on."""
    rng = random.Random(seed)
    num, shuffle, drop_last = rng.randrange(1, 60), rng.random() < 0.7, rng.random() < 0.3
    options = {"shuffle": shuffle, "seed": rng.randrange(3)}
    ranks, size, ranks_now = rng.choice((1, 2, 4)), rng.randrange(1, 6), rng.choice((1, 2, 3, 4))
    size_now = rng.choice((size, max(1, size * ranks // ranks_now), rng.randrange(1, 6)))
    first = split(num, ranks, size, drop_last, **options)
    epoch = rng.randrange(3)
    for _ in range(epoch):
        assert sum(1 for _ in steps(first)) == len(first[0])
    stop = rng.randrange(len(first[0]) + 1)
    used = list(itertools.chain(*steps(first, stop)))
    saved_by = rng.randrange(ranks)
    state = first[saved_by].state_dict()
    second = split(num, ranks_now, size_now, drop_last, **options)
    (whole,) = split(num, 1, 1, **options)
    whole.load_state_dict({**whole.state_dict(), "epoch": state["epoch"]})
    order = [i for x in whole for i in x.tolist()]
    assert used == (order + order * 4)[: len(used)]
    if (ranks_now, size_now) != (ranks, size) and 0 < stop < len(first[0]) and len(used) % (ranks_now * size_now):
        for feeder in second:
            with pytest.raises(
                CheckpointMismatchError, match=f"{ranks} ranks have used {len(used)} rows of this epoch"
            ):
                feeder.load_state_dict(state)
            assert feeder.state_dict()["batch"] == 0, "nothing changes"
        return False
    for feeder in second:
        feeder.load_state_dict(state)
    rest = list(itertools.chain(*steps(second)))
    if 0 < stop == len(first[0]):
        assert rest == []
    else:
        expected = [
            i for step in steps(resumed(split(num, ranks_now, size_now, drop_last, **options), state)) for i in step
        ]
        assert (used + rest)[: len(expected)] == expected, "as without a stop"
        assert len(used + rest) == len(expected)
    assert [feeder.epoch for feeder in second] == [epoch + 1] * ranks_now
    return True


def resumed(feeders, state):
    """Feeders at the beginning of a saved epoch."""
    for feeder in feeders:
        feeder.load_state_dict({**state, "batch": 0, "last_batch": None})
    return feeders


@pytest.mark.parametrize("seed", range(8))
def test_ranks_and_batch_sizes_may_change_or_the_reason_is_said(seed):
    assert sum(check_one(100 * seed + i) for i in range(20)) > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_many_ranks_and_batch_sizes_may_change(seed):
    assert sum(check_one(10_000 + 100 * seed + i) for i in range(100)) > 25


def after_one(feeder):
    with iter(feeder) as feed:
        next(feed)
        return feeder.state_dict()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda: split(60, 2, 4), "rows=64 then, and 60 now"),
        (lambda: split(64, 2, 4, seed=5), "doesn't draw the same order"),
        (lambda: split(64, 4, 2, seed=5), "doesn't draw the same order"),
        (lambda: split(64, 2, 4, shuffle=False), "doesn't draw the same order"),
        (lambda: [Feeder(DataLoader(Rows(64), 4, shuffle=True), "cpu")], "num_parts=2 then, and 1 now"),
        (lambda: [Feeder(DataLoader(Rows(64), 8, shuffle=True), "cpu")], "num_parts=2 then, and 1 now"),
    ],
)
def test_another_order_or_other_rows_are_refused_on_every_rank(other, reason):
    state = after_one(split(64, 2, 4)[0])
    for feeder in other():
        with pytest.raises(CheckpointMismatchError, match=reason):
            feeder.load_state_dict(state)


def test_one_that_wasnt_split_is_not_gone_on_with_by_one_that_is():
    state = after_one(Feeder(DataLoader(Rows(64), 8, shuffle=True), "cpu"))
    for feeder in split(64, 2, 4):
        with pytest.raises(CheckpointMismatchError, match="doesn't draw the same order"):
            feeder.load_state_dict(state)


def test_own_parts_of_other_sizes_are_refused():
    state = after_one(Feeder(numbered(8, batch_size=2), "cpu", sharded=True))
    for loader, reason in ((numbered(7, batch_size=2), "rows=8"), (numbered(8, batch_size=3), "batches=4")):
        with pytest.raises(CheckpointMismatchError, match=reason):
            Feeder(loader, "cpu", sharded=True).load_state_dict(state)
