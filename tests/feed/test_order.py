"""The order of an epoch comes from a seed and its number: resumed, the samples come that would have come."""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

import everygpu
from everygpu import Feeder
from everygpu.errors import CheckpointMismatchError, OptionError
from tests.feed.loaders import Peeking
from tests.site.running import blocks, page_path

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
NUM = 23
DATA = TensorDataset(torch.arange(NUM))
MASK = torch.eye(2)


def seeded(seed=5):
    return torch.Generator().manual_seed(seed)


class Shuffled(Sampler):
    """Draws its order from a generator, its own or the process's, in whatever way."""

    def __init__(self, kind):
        self.rng = {
            "torch": lambda: seeded(3),
            "NumPy": lambda: np.random.default_rng(3),
            "RandomState": lambda: np.random.RandomState(3),
            "Python": lambda: random.Random(3),
            "global NumPy": lambda: np.random,
            "global Python": lambda: random,
        }[kind]()

    def __iter__(self):
        if hasattr(self.rng, "sample") and hasattr(self.rng, "getrandbits"):
            return iter(self.rng.sample(range(NUM), NUM))
        if isinstance(self.rng, torch.Generator):
            return iter(torch.randperm(NUM, generator=self.rng).tolist())
        return iter(self.rng.permutation(NUM).tolist())

    def __len__(self):
        return NUM


class Stateful(Sampler):
    """Keeps where it is; its orders come from numbers that nothing seeds."""

    def __init__(self, epoch=0):
        self.epoch, self.at, self.num_loaded = epoch, 0, 0

    def __iter__(self):
        order = torch.randperm(NUM, generator=seeded(self.epoch)).tolist()
        while self.at < NUM:
            self.at += 1
            yield order[self.at - 1]
        self.epoch, self.at = self.epoch + 1, 0

    def __len__(self):
        return NUM

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.epoch, self.at = state["epoch"], state["at"]
        self.num_loaded += 1


class Stream(IterableDataset):
    """Numbers in an order drawn by each worker of its part."""

    def __init__(self):
        self.num_read = 0

    def __iter__(self):
        info = get_worker_info()
        part = list(range(NUM) if info is None else range(info.id, NUM, info.num_workers))
        random.shuffle(part)
        for number in part:
            self.num_read += 1
            yield (torch.tensor(number),)


class OwnStream(Stream):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        for (number,) in super().__iter__():
            yield (number + 100 * int(self.rng.integers(10**6)),)


class StatefulStream(Stream):
    """Keeps where it is."""

    def __init__(self):
        super().__init__()
        self.at = 0

    def __iter__(self):
        info = get_worker_info()
        step = 1 if info is None else info.num_workers
        for number in range(self.at * step + (0 if info is None else info.id), NUM, step):
            self.at += 1
            self.num_read += 1
            yield (torch.tensor(number),)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


LOADERS = {
    "in order": lambda **o: DataLoader(DATA, 4, **o),
    "shuffled": lambda **o: DataLoader(DATA, 4, shuffle=True, **o),
    "last dropped": lambda **o: DataLoader(DATA, 4, shuffle=True, drop_last=True, **o),
    "by a generator": lambda **o: DataLoader(DATA, 4, shuffle=True, generator=seeded(), **o),
    "subset": lambda **o: DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(NUM), seeded()), **o),
    "with replacement": lambda **o: DataLoader(DATA, 4, sampler=RandomSampler(DATA, True, 70), **o),
    "replaced by a generator": lambda **o: DataLoader(DATA, 4, sampler=RandomSampler(DATA, True, 70, seeded()), **o),
    "weighted": lambda **o: DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0, 2.0] * 11, 22), **o),
    "distributed": lambda **o: DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 1), **o),
    "batch sampler": lambda **o: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, False), **o),
    "own NumPy": lambda **o: DataLoader(DATA, 4, sampler=Shuffled("NumPy"), **o),
    "own RandomState": lambda **o: DataLoader(DATA, 4, sampler=Shuffled("RandomState"), **o),
    "own Python": lambda **o: DataLoader(DATA, batch_sampler=BatchSampler(Shuffled("Python"), 4, False), **o),
    "own torch": lambda **o: DataLoader(DATA, 4, sampler=Shuffled("torch"), **o),
    "NumPy's": lambda **o: DataLoader(DATA, 4, sampler=Shuffled("global NumPy"), **o),
    "Python's": lambda **o: DataLoader(DATA, 4, sampler=Shuffled("global Python"), **o),
    "no batches": lambda **o: DataLoader(DATA, batch_size=None, shuffle=True, **o),
    "stateful": lambda **o: DataLoader(DATA, 4, sampler=Stateful(), **o),
    "stateful within": lambda **o: DataLoader(DATA, batch_sampler=BatchSampler(Stateful(), 4, True), **o),
    "stream": lambda **o: DataLoader(Stream(), 4, **o),
    "own stream": lambda **o: DataLoader(OwnStream(), 4, **o),
    "stateful stream": lambda **o: DataLoader(StatefulStream(), 4, **o),
}
STREAMS = {name for name in LOADERS if "stream" in name}
WORKERS = {"0": {}, "1": {"num_workers": 1}, "2": {"num_workers": 2}}
WORKERS |= {f"{n} persistent": WORKERS[n] | {"persistent_workers": True} for n in "12"}


class Run:
    """Reads three epochs, and draws random numbers in between as training does."""

    def __init__(self, name, seed, state=None, prefetch=2, **options):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.feeder = Feeder(LOADERS[name](**options), ["cpu"] * 2, prefetch=prefetch)
        if state is not None:
            self.feeder.load_state_dict(state)

    def run(self, num_batches=None):
        """Go on until so many batches are seen, or all epochs are over; return them, and the position."""
        seen = []
        with self.feeder:
            while self.feeder.epoch < 3 and num_batches != 0:
                for (x,) in self.feeder:
                    seen.append(everygpu.parallel.gather(x).tolist())
                    torch.rand(1), random.random(), np.random.rand()
                    if len(seen) == num_batches:
                        return seen, self.feeder.state_dict()
            return seen, self.feeder.state_dict()


def check_stops(name, seed):
    """Stop and go on at any places of three epochs, in other workers: as without a stop."""
    rng = random.Random(f"{name} {seed}")
    of_stream = rng.choice(list(WORKERS))[0]

    def begin(number, state=None):
        workers = [key for key in WORKERS if name not in STREAMS or key[0] == of_stream]
        return Run(name, number, state, rng.choice((0, 2)), **WORKERS[rng.choice(workers[:1] * 3 + workers)])

    whole, _ = begin(1).run()
    per_epoch = len(whole) // 3
    seen, state, num_runs = [], None, 0
    while len(seen) < len(whole):
        num_runs += 1
        stop = rng.choice((0, 1, 2, per_epoch - 1, per_epoch, per_epoch + 2)) if num_runs < 5 else None
        more, state = begin(num_runs, state).run(stop)
        seen += more
    assert seen == whole
    for epoch in range(3):
        rows = np.hstack(whole[epoch * per_epoch : (epoch + 1) * per_epoch]).tolist()
        if name in ("in order", "shuffled", "by a generator", "batch sampler", "own Python", "stateful", "stream"):
            assert sorted(rows) == list(range(NUM))
        if name == "distributed":
            sampler = DistributedSampler(DATA, 2, 1)
            sampler.set_epoch(epoch)
            assert rows == list(sampler)


@pytest.mark.parametrize("name", LOADERS)
def test_any_loader_stopped_anywhere(name):
    for seed in range(2):
        check_stops(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("seed", range(100, 114))
def test_many_loaders_stopped_anywhere(name, seed):
    check_stops(name, seed)


def test_a_stream_is_not_resumed_with_other_workers():
    for before, after in ("01", "20", "12"):
        with pytest.raises(CheckpointMismatchError, match=f"num_workers={before} then, and {after} now"):
            Run("own stream", 2, Run("own stream", 1, **WORKERS[before]).run(2)[1], **WORKERS[after])


def test_the_seed():
    def orders(make, **options):
        return [str([x.tolist() for (x,) in feeder]) for feeder in [Feeder(make(), "cpu", **options)] for _ in "ab"]

    for name in ("shuffled", "own NumPy", "stream"):
        assert orders(LOADERS[name], seed=3) == orders(LOADERS[name], seed=3) != orders(LOADERS[name], seed=4)
    torch.manual_seed(1)
    first = orders(LOADERS["by a generator"])
    assert first == orders(LOADERS["by a generator"]), "that generator decides"


def test_a_plain_loop_can_be_compared_by_the_recipe():
    (code,) = [
        code for _, code in blocks(page_path("how-do-i").read_text("utf-8")) if "plain = everygpu.Feeder" in code
    ]
    names = {"everygpu": everygpu, "loader": DataLoader(TensorDataset(torch.arange(20), torch.arange(20)), 3, True)}
    names |= {"model": torch.nn.Linear(1, 1)}
    exec("".join(line for line in code.splitlines(True) if "everygpu.Feeder" in line), names)
    plain, fed = ([x.tolist() for x, _ in names[name]] for name in ("plain", "feeder"))
    assert plain == fed
    assert sorted(i for x in plain for i in x) == list(range(20))


def test_what_the_loop_draws_is_its_own():
    """Passes leave the process's generators as they are, and what is drawn from these doesn't change the order."""
    torch.manual_seed(1)
    feeder = Feeder(LOADERS["shuffled"](), "cpu")
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for _ in range(2):
        list(feeder)
    assert torch.get_rng_state().equal(states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


class DrawnAsItGoes(Sampler):
    """Shuffles 8 rows at a time, each when it comes to them."""

    def __iter__(self):
        for begin in range(0, 24, 8):
            yield from random.sample(range(begin, begin + 8), 8)

    def __len__(self):
        return 24


def test_an_order_that_is_drawn_as_it_goes_is_refused_where_it_differs():
    def make():
        return Feeder(DataLoader(range(24), 4, sampler=DrawnAsItGoes()), "cpu", prefetch=0)

    for stop, is_same in ((1, True), (3, False)):
        feeder, again = make(), make()
        for _ in itertools.islice(feeder, stop):
            random.random()
        again.load_state_dict(feeder.state_dict())
        if is_same:
            next(iter(again))
            continue
        with pytest.raises(CheckpointMismatchError, match="doesn't draw the same order again"):
            iter(again)


class Counting(Dataset):
    def __init__(self):
        self.loaded = []

    def __len__(self):
        return 12

    def __getitem__(self, i):
        self.loaded.append(i)
        return i


def after(feeder, num_batches):
    """The position after so many batches."""
    with iter(feeder) as feed:
        for _ in range(num_batches):
            next(feed)
        return feeder.state_dict()


class TestSkipping:
    def test_loads_nothing(self):
        dataset = Counting()
        feeder = Feeder(DataLoader(dataset, 2), "cpu")
        feeder.load_state_dict(after(Feeder(DataLoader(Counting(), 2), "cpu"), 4))
        assert [x.tolist() for x in feeder] == [[8, 9], [10, 11]]
        assert dataset.loaded == [8, 9, 10, 11]

    @pytest.mark.parametrize("kind", [Stream, StatefulStream])
    def test_of_a_stream(self, kind):
        dataset = kind()
        feeder = Feeder(DataLoader(dataset, 4), "cpu")
        feeder.load_state_dict(after(Feeder(DataLoader(kind(), 4), "cpu"), 3))
        assert len(list(feeder)) == 3
        assert dataset.num_read == (NUM - 12 if kind is StatefulStream else NUM)

    def test_with_a_sampler_that_has_a_state(self):
        loader = LOADERS["stateful"]()
        feeder = Feeder(loader, "cpu")
        state = after(Feeder(LOADERS["stateful"](), "cpu", prefetch=4), 3)
        assert state["own"] == {"epoch": 0, "at": 12}
        feeder.load_state_dict(state)
        assert len(list(feeder)) == 3
        assert loader.sampler.num_loaded == 1

    @pytest.mark.parametrize("name", ["stateful", "stateful stream"])
    def test_a_state_needs_what_has_one(self, name):
        state = after(Feeder(LOADERS[name](), "cpu"), 3)
        with pytest.raises(CheckpointMismatchError, match="with a state_dict of its own"):
            Feeder(LOADERS["in order"](), "cpu").load_state_dict(state)


class Remembering:
    """A loader that keeps its own position, as torchdata's StatefulDataLoader does."""

    def __init__(self):
        self.at, self.resumed_at = 0, None

    def __iter__(self):
        while self.at < 6:
            self.at += 1
            yield torch.tensor(self.at - 1)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = self.resumed_at = state["at"]


class Lasting(Remembering):
    """Gives other numbers in each epoch."""

    epoch = 0

    def __iter__(self):
        for x in super().__iter__():
            yield x + 10 * self.epoch
        self.epoch += 1

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.epoch = state["epoch"]


class Refilling(Remembering):
    """Fills one tensor, or one array, again and again; or makes one for each batch, beside one that stays."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def __iter__(self):
        held = torch.zeros(2)
        for x in super().__iter__():
            held.numpy()[:] = x.item()
            yield {"tensor": held, "array": held.numpy(), "copy": (held.clone(), MASK)}[self.kind]


class RefilledList(Stateful):
    """Fills one list again and again."""

    def __iter__(self):
        held = []
        for i in super().__iter__():
            held.append(i)
            if len(held) == 4:
                yield held
                held.clear()


class Tenfold(DataLoader):
    def __iter__(self):
        for (x,) in super().__iter__():
            yield (x * 10,)


class Endless(DataLoader):
    def __iter__(self):
        while True:
            yield from super().__iter__()


class Custom:
    """Shuffles by itself."""

    def __init__(self):
        self.rng = random.Random(1)

    def __iter__(self):
        return iter(torch.tensor(self.rng.sample(range(NUM), NUM)).split(4))


class TestOtherLoaders:
    @pytest.mark.parametrize("prefetch", [0, 1, 3])
    def test_one_that_keeps_its_own_position(self, prefetch):
        loader = Remembering()
        state = after(Feeder(Remembering(), "cpu", prefetch=prefetch), 3)
        feeder = Feeder(loader, "cpu", prefetch=prefetch)
        feeder.load_state_dict(state)
        assert [x.item() for x in feeder] == [3, 4, 5]
        assert loader.resumed_at == 3  # what was prepared ahead does not count
        assert feeder.epoch == 1

    def test_a_batch_sampler_that_fills_one_list(self):
        loader = DataLoader(DATA, batch_sampler=RefilledList())
        order = torch.randperm(NUM, generator=seeded(0)).tolist()
        assert [x.tolist() for (x,) in Feeder(loader, "cpu")] == [order[i : i + 4] for i in range(0, 20, 4)]

    @pytest.mark.parametrize("stop", [5, 6, 7, 12, 17])
    def test_one_that_goes_on_from_pass_to_pass(self, stop):
        def numbers(feeder):
            return (x.item() for _ in range(4) if feeder.epoch < 3 for x in feeder)

        expected = [10 * epoch + i for epoch in range(3) for i in range(6)]
        first, second = Feeder(Lasting(), "cpu"), Feeder(Lasting(), "cpu")
        seen = list(itertools.islice(numbers(first), stop))
        second.load_state_dict(first.state_dict())
        assert seen + list(numbers(second)) == expected

    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_one_that_fills_the_same_memory_is_refused(self, prefetch):
        for kind in ("tensor", "array"):
            with pytest.raises(OptionError, match="fills the same tensor with each batch.*yield copies"):
                list(Feeder(Refilling(kind), "cpu", prefetch=prefetch))
        assert [x.tolist() for x, _ in Feeder(Refilling("copy"), "cpu", prefetch=prefetch)] == [
            [i, i] for i in range(6)
        ]

    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            (Tenfold, {"shuffle": True}),
            (Tenfold, {"shuffle": True, "num_workers": 1, "persistent_workers": True}),
            (Peeking, {"shuffle": True}),
            (Peeking, {"sampler": Stateful()}),
        ],
    )
    def test_one_with_an_iter_of_its_own(self, kind, options):
        first, second = (Feeder(kind(DATA, 4, **copy.deepcopy(options)), "cpu", seed=s) for s in (1, 2))
        numbers = sorted(x.item() for (batch,) in first for x in batch)
        assert numbers == [i * (10 if kind is Tenfold else 1) for i in range(NUM)]
        list(first)
        with iter(first) as feed:
            next(feed)
            state, expected = first.state_dict(), [x.tolist() for (x,) in feed]
        second.load_state_dict(state)
        assert [x.tolist() for (x,) in second] == expected


def test_an_endless_loader_draws_one_order_after_the_other():
    with iter(Feeder(Endless(DATA, 4, shuffle=True), "cpu", prefetch=3)) as feed:
        numbers = [i for (x,) in itertools.islice(feed, 12) for i in x.tolist()]
    first, second = numbers[:NUM], numbers[NUM:]
    assert first != second
    assert sorted(first) == sorted(second) == list(range(NUM))


def place(feeder):
    state = feeder.state_dict()
    return state["epoch"], state["batch"]


class TestPosition:
    @pytest.fixture
    def feeder(self):
        return Feeder(DataLoader(torch.arange(12), 2), "cpu", prefetch=9)

    def test_what_is_loaded_ahead_does_not_count(self, feeder):
        with iter(feeder) as feed:
            next(feed)
            feed._ahead.thread.join()  # it has loaded the whole epoch
            assert place(feeder) == (0, 1)
            list(feed)
        assert place(feeder) == (1, 0)
        assert feeder.epoch == 1

    def test_a_pass_left_early_is_over_when_the_next_begins(self, feeder):
        for _ in range(2):
            for _ in feeder:
                break
        assert place(feeder) == (1, 1)
        assert len(list(feeder)) == 6
        assert place(feeder) == (3, 0)

    def test_an_error_of_the_dataset(self):
        class Faulty(Counting):
            def __getitem__(self, i):
                return 1 / (i - 4)

        feeder = Feeder(DataLoader(Faulty()), "cpu")
        with pytest.raises(ZeroDivisionError):
            list(feeder)
        assert place(feeder) == (0, 4)

    def test_an_interrupt_while_a_batch_is_made_ready(self, feeder, monkeypatch):
        def interrupt(sent):
            raise KeyboardInterrupt

        feed = iter(feeder)
        next(feed)
        monkeypatch.setattr("everygpu.feed.feeder_iterator.SentBatch.unpack", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(feed)
        assert place(feeder) == (0, 1)

    @pytest.mark.parametrize(
        "state", [None, {}, [3], {"epoch": 1}, {"epoch": 0, "batch": 3, "generator": None, "loader": None}], ids=str
    )
    def test_what_is_none_is_refused(self, feeder, state):
        with pytest.raises(CheckpointMismatchError, match=r"no position: .* what Feeder.state_dict returned"):
            feeder.load_state_dict(state)
        for wrong in ({"epoch": -1}, {"batch": "3"}, {"seed": None}, {"data": None}):
            with pytest.raises(CheckpointMismatchError, match="no position"):
                feeder.load_state_dict(feeder.state_dict() | wrong)

    @pytest.mark.parametrize(
        ("other", "reason"),
        [
            (lambda: DataLoader(range(9), 2), "batches=3 then, and 5 now"),
            (lambda: DataLoader(range(10), 4), "rows=9 then, and 10 now"),
            (lambda: DataLoader(range(9), 3), "batch_size=4 then, and 3 now"),
        ],
    )
    def test_other_data_is_refused_in_the_middle_of_a_pass(self, other, reason):
        source, target = Feeder(DataLoader(range(9), 4), "cpu"), Feeder(other(), "cpu")
        between, before = source.state_dict(), target.state_dict()
        with pytest.raises(CheckpointMismatchError, match=reason):
            target.load_state_dict(after(source, 1))
        assert target.state_dict() == before, "nothing changes"
        target.load_state_dict(between)
        assert len(list(target)) == len(target)


def test_batches_as_they_are_ready_are_refused():
    with pytest.raises(OptionError, match="in_order=False can't be resumed"):
        Feeder(DataLoader(DATA, 4, num_workers=2, in_order=False), "cpu")
    Feeder(DataLoader(DATA, 4, in_order=False), "cpu")  # without workers they come in order


def test_the_loader_itself_stays_as_it_was():
    loader = DataLoader(DATA, 4, shuffle=True, generator=seeded())
    before = dict(vars(loader))
    list(Feeder(loader, "cpu"))
    assert vars(loader) == before


@pytest.mark.parametrize(
    "make",
    [
        Custom,
        lambda: torch.arange(NUM).split(4).__iter__(),
    ],
    ids=["shuffles by itself", "iterator"],
)
def test_any_loader_is_read_again(make):
    whole = Feeder(make(), "cpu", seed=1)
    expected = [x.tolist() for x in whole]
    again = Feeder(make(), "cpu")
    again.load_state_dict(after(Feeder(make(), "cpu", seed=1), 4))
    assert [x.tolist() for x in again] == expected[4:]
    assert [x.tolist() for x in again] == [x.tolist() for x in whole]


def rounds():
    """Shuffles again and again."""
    while True:
        yield from DataLoader(range(6), 2, shuffle=True)


@pytest.mark.parametrize(
    ("make", "is_told"),
    [
        (rounds, True),
        (lambda: DataLoader(Stream(), 4), True),
        (lambda: DataLoader(Stream(), 4, num_workers=1), False),
        (lambda: list(torch.arange(NUM).split(4)), False),
        (lambda: DataLoader(DATA, 4, shuffle=True), False),
        (Remembering, False),
    ],
    ids=["rounds", "stream", "worker", "list", "indexed", "own state"],
)
def test_what_may_come_otherwise_is_told(make, is_told, caplog):
    feeder = Feeder(make(), "cpu")
    feeder.load_state_dict(after(Feeder(make(), "cpu"), 4))
    with iter(feeder) as feed:
        next(feed)
    assert ["4 batches are read again to come to the position" in text for text in caplog.messages] == [True] * is_told


class BegunOnce(DataLoader):
    """Begins its iterator once, as loaders do that keep workers for all epochs."""

    def __init__(self, *args):
        super().__init__(*args)
        self.begun = super().__iter__()

    def __iter__(self):
        yield from self.begun


def test_one_that_asks_its_sampler_once_is_refused_in_the_middle_of_a_pass():
    feeder = Feeder(BegunOnce(DATA, 4), "cpu")
    feeder.load_state_dict(after(Feeder(BegunOnce(DATA, 4), "cpu"), 1))
    with pytest.raises(CheckpointMismatchError, match="asks its sampler for no indices"):
        iter(feeder)
