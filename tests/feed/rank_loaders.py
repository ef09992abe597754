"""Loaders that ranks read, and what they read of them; run in each rank by tests of feed and checkpoint."""

import itertools
import logging
import random
from logging.handlers import QueueHandler
from queue import SimpleQueue

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

import everygpu
from everygpu.errors import CheckpointMismatchError, RankError
from everygpu.ranks.group import init_group
from everygpu.ranks.membership import find_membership
from tests.feed.loaders import Peeking

NUM = 23


def place():
    """This process's rank, and how many there are."""
    found = find_membership()
    return (0, 1) if found is None else (found.rank, found.size)


class Numbers(Dataset):
    """The numbers from 0, which notes those that were read."""

    def __init__(self, num=NUM):
        self.num = num
        self.read = []

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        if isinstance(index, list):
            self.read += index
            return {"x": torch.tensor(index).float()[:, None], "index": torch.tensor(index)}
        self.read.append(int(index))
        return {"x": torch.tensor([float(index)]), "index": index}


class Stream(IterableDataset):
    """Numbers one after the other."""

    def __init__(self, numbers):
        self.numbers = list(numbers)

    def __iter__(self):
        for number in self.numbers:
            yield {"x": torch.tensor([float(number)]), "index": number}


class Parts(Stream):
    """Workers shuffle their parts."""

    def __iter__(self):
        info = get_worker_info()
        numbers = self.numbers[info.id :: info.num_workers] if info else list(self.numbers)
        random.shuffle(numbers)
        return Stream(numbers).__iter__()


class Own(list):
    """A rank's own numbers, and how many of them were given."""

    at = 0

    def __iter__(self):
        while self.at < len(self):
            self.at += 1
            yield {"x": torch.tensor([[float(self[self.at - 1])]])}

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class PythonShuffled(BatchSampler):
    """Batches in an order of Python's generator, which has no generators that could be found."""

    def __iter__(self):
        order = random.sample(range(NUM), NUM)
        return (order[i : i + 5] for i in range(0, NUM, 5))


class OwnSeed(RandomSampler):
    """An order that differs by rank, however ranks are seeded."""

    def __iter__(self):
        first = place()[0]
        return iter([first, *(i for i in range(NUM) if i != first)])


def part(rank, size):
    """A rank's own numbers: all are some rank's, and the shares are as unequal as can be."""
    return range(NUM)[:0] if rank == 1 else range(NUM)[rank // 2 :: max(1, size - 1)]


MAKE = {
    "in order": lambda: DataLoader(Numbers(), 5),
    "shuffled": lambda: DataLoader(Numbers(), 5, shuffle=True),
    "short last batch": lambda: DataLoader(Numbers(11), 5, shuffle=True),
    "looked at before": lambda: Peeking(Numbers(11), 5, shuffle=True),
    "dropped last batch": lambda: DataLoader(Numbers(), 5, shuffle=True, drop_last=True),
    "a generator": lambda: DataLoader(Numbers(), 5, shuffle=True, generator=torch.Generator().manual_seed(place()[0])),
    "a batch sampler": lambda: DataLoader(Numbers(), batch_sampler=PythonShuffled(range(NUM), 5, False)),
    "lists as indices": lambda: DataLoader(
        Numbers(), sampler=BatchSampler(RandomSampler(range(NUM)), 5, False), batch_size=None
    ),
    "iterable": lambda: DataLoader(Stream(range(NUM)), 5),
    "list": lambda: [{"x": torch.arange(i, min(i + 5, NUM)).float()[:, None]} for i in range(0, NUM, 5)],
}


def seed(differently=True):
    number = 7 + place()[0] * differently
    torch.manual_seed(number)
    random.seed(number)


def numbers_in(batch):
    """The numbers of a batch, by rows."""
    assert batch["x"].shape[1:] == (1,)
    x = everygpu.parallel.gather(batch["x"]).flatten().tolist()
    if "index" in batch:
        assert everygpu.parallel.gather(batch["index"]).tolist() == x
    return [int(v) for v in x]


def wrapped(loader, how, **options):
    """The loader in a Feeder with a thread or without."""
    return everygpu.Feeder(loader, ["cpu"] * 2, prefetch=0 if how == "no thread" else 2, **options)


def two_passes(name, how):
    seed()
    loader = MAKE[name]()
    data = wrapped(loader, how)
    passes = [[numbers_in(batch) for batch in data] for _ in range(2)]
    read = getattr(getattr(loader, "dataset", None), "read", None)
    return {"passes": passes, "num_read": None if read is None else len(read)}


HOWS = {name: ["thread"] for name in MAKE}
HOWS |= {name: ["thread", "no thread"] for name in ("short last batch", "iterable", "list")}


def all_passes():
    return {(name, how): two_passes(name, how) for name in MAKE for how in HOWS[name]}


def sharded_passes():
    """Each rank's own loader: uneven, one without rows, and the same under a DistributedSampler."""
    found = {}
    for how in ("thread", "no thread"):
        data = wrapped(DataLoader(Stream(part(*place())), 2), how, sharded=True)
        found[how] = [[numbers_in(batch) for batch in data] for _ in range(2)]
    sampler = DistributedSampler(range(24), *reversed(place()), shuffle=False)
    loader = DataLoader(Numbers(24), 4, sampler=sampler)
    found["sampler"] = [[numbers_in(batch) for batch in wrapped(loader, "thread")]]
    return found


def split_and_resumed(state):
    """What a rank's own part, in the middle of an epoch, says of a position, and what it reads after its own."""
    data = wrapped(DataLoader(Numbers(20 + place()[0]), 2), "thread", sharded=True)
    try:
        if state is not None:
            data.load_state_dict(state)
    except CheckpointMismatchError as error:
        return str(error)
    read = [numbers_in(batch) for batch in itertools.islice(data, 3)]
    state = init_group().broadcast_object(data.state_dict())
    again = wrapped(DataLoader(Numbers(20 + place()[0]), 2), "thread", sharded=True)
    again.load_state_dict(state)
    read += [numbers_in(batch) for batch in again]
    other = wrapped(DataLoader(Numbers(22 + place()[0]), 2), "thread", sharded=True)
    try:
        other.load_state_dict(state)
    except CheckpointMismatchError as error:
        return state, read, str(error)


def read_some(seed, run, state, stop):
    """Read on in a loader drawn from a seed, up to so many batches or two epochs; return them, and the position.

    The workers of a dataset with indices are others in each run.
    """
    rng, of_run = random.Random(seed), random.Random(f"{seed} {run}")
    num, size, kind = (
        rng.randrange(1, 40),
        rng.randrange(1, 8),
        rng.choice(("shuffled", "generator", "sampler", "stream", "list")),
    )
    draws = rng if kind == "stream" else of_run
    options = {"num_workers": draws.choice((0, 0, 2))}
    options |= {"persistent_workers": draws.random() < 0.5} if options["num_workers"] else {}
    loader = {
        "shuffled": lambda: DataLoader(Numbers(num), size, shuffle=True, **options),
        "generator": lambda: DataLoader(Numbers(num), size, shuffle=True, generator=torch.Generator(), **options),
        "sampler": lambda: DataLoader(Numbers(num), batch_sampler=BatchSampler(RandomSampler(range(num)), size, True)),
        "stream": lambda: DataLoader(Parts(range(num)), size, **options),
        "list": lambda: [{"x": torch.arange(i, min(i + size, num)).float()[:, None]} for i in range(0, num, size)],
    }[kind]()
    torch.manual_seed(of_run.randrange(10**6))
    random.seed(of_run.random())
    read = []
    with everygpu.Feeder(loader, "cpu", prefetch=of_run.choice((0, 2)), seed=seed) as data:
        if state is not None:
            data.load_state_dict(state)
        while data.epoch < 2:
            for batch in data:
                read.append((data.epoch, numbers_in(batch)))
                if len(read) == stop:
                    return read, data.state_dict()
    return read, None


def left_early():
    """A pass that all ranks leave, with batches prepared ahead, and the one after it."""
    data = wrapped(DataLoader(Stream(part(*place())), 2), "thread", sharded=True)
    for step, _ in enumerate(data):
        if step == 2:
            break
    return [numbers_in(batch) for batch in data]


def tuned_by_one():
    """One rank measures by itself."""
    loader = DataLoader(Numbers(), 5, shuffle=True)
    return place()[0] == 2 and everygpu.tune_workers(loader, "cpu", candidates=[0], seconds=0.01).num_workers == 0


def dropout():
    """Parameters made with the seed of the run, and the masks of one replica, and of two more."""
    everygpu.seed_all(3)
    weight = torch.nn.Linear(2, 2).weight.tolist()
    masks = []
    for num_replicas in (1, 2):
        model = everygpu.DataParallel(torch.nn.Dropout(0.5), ["cpu"] * num_replicas)
        masks += [torch.as_tensor(row).tolist() for row in model(torch.ones(num_replicas, 64))]
        model.release()
    return weight, masks


def with_workers():
    """Worker processes, which stay for the next epoch."""
    seed()
    loader = DataLoader(Numbers(11), 5, shuffle=True, num_workers=1, persistent_workers=True, collate_fn=with_draw)
    feeder = wrapped(loader, "thread")
    passes = [[(numbers_in(batch), float(batch["draw"])) for batch in feeder] for _ in range(2)]
    feeder.close()
    return passes


def with_draw(rows):
    """Collate, with a number that the worker has drawn."""
    batch = torch.utils.data.default_collate(rows)
    return {**batch, "draw": torch.rand(())}


def different_orders():
    """What is said of another order, of other numbers of batches, and of streams that differ."""
    found = []
    for loader in (DataLoader(Numbers(), 5, sampler=OwnSeed(range(NUM))), DataLoader(Numbers(8 - place()[0] // 2), 1)):
        try:
            list(wrapped(loader, "thread"))
        except RankError as error:
            found.append(str(error))
    noted = QueueHandler(SimpleQueue())
    logging.getLogger("everygpu").addHandler(noted)
    for numbers in (range(place()[0], 6), range(6)):
        list(wrapped(DataLoader(Stream([*numbers, 0, 0, 0][:6]), 2), "thread"))
    return found, [noted.queue.get().getMessage() for _ in range(noted.queue.qsize())]


def resumed_by_own_state():
    """What is read, and said, after rank 0's position."""
    data = wrapped(Own(range(10 * place()[0], 10 * place()[0] + 4)), "thread", sharded=True)
    state = {"epoch": 0, "batch": 3, "seed": 1, "last_batch": None, "own": {"at": 3}, "is_last": False, "data": {}}
    data.load_state_dict(state)
    noted = QueueHandler(SimpleQueue())
    logging.getLogger("everygpu").addHandler(noted)
    return [numbers_in(batch) for batch in data], [noted.queue.get().getMessage() for _ in range(noted.queue.qsize())]


def uneven_streams():
    found = []
    for how in ("thread", "no thread"):
        try:
            found.append([numbers_in(batch) for batch in wrapped(DataLoader(Stream(range(8 - place()[0])), 2), how)])
        except RankError as error:
            found.append(str(error))
    return found


def meters():
    meter = everygpu.Meter()
    rank = place()[0]
    for step in range(rank):
        meter.update(torch.tensor(float(rank)), 2 + step)
    meter.update(0.5, 1)
    before = (meter.avg, meter.num_rows)
    totals = [meter.sync() for _ in range(2)]
    return before, [(total.avg, total.num_rows) for total in totals], (meter.avg, meter.num_rows)


def everything():
    return {
        "split": split_and_resumed(None),
        "passes": all_passes(),
        "sharded": sharded_passes(),
        "dropout": dropout(),
        "left": left_early(),
        "tuned": tuned_by_one(),
        "workers": with_workers(),
        "different": different_orders(),
        "uneven": uneven_streams(),
        "own state": resumed_by_own_state(),
        "meters": meters(),
    }
