"""A feeder goes on at the batch where it was stopped, in the same order."""

import itertools

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import everygpu
from everygpu import Feeder, gather
from everygpu.errors import CheckpointMismatchError, OptionError
from tests.feed.loaders import batches, numbered, values


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(12))


class Remembering:
    """A loader that keeps its own position, as torchdata's StatefulDataLoader does."""

    def __init__(self, num):
        self.num, self.at, self.resumed_at = num, 0, None

    def __iter__(self):
        while self.at < self.num:
            self.at += 1
            yield (torch.tensor([self.at - 1, self.at - 1]),)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = self.resumed_at = state["at"]


class StandsForAnother:
    """A loader that holds another and passes for it, as Accelerate's do: its own state_dict needs the other's."""

    def __init__(self, loader):
        self.base_dataloader = loader

    def __getattr__(self, name):
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    @property
    def __class__(self):
        return type(self.base_dataloader)

    def __iter__(self):
        return iter(self.base_dataloader)

    def state_dict(self):
        return self.base_dataloader.state_dict()

    def load_state_dict(self, state):
        self.base_dataloader.load_state_dict(state)


class Counting(Dataset):
    """Notes which items are loaded."""

    def __init__(self, num):
        self.num, self.loaded = num, []

    def __len__(self):
        return self.num

    def __getitem__(self, i):
        self.loaded.append(i)
        return (torch.tensor(i),)


def interrupted(make, stop_after, **options):
    """Run two passes, stopping after some batches; go on in a new feeder. Return what came before and after."""
    torch.manual_seed(3)
    first = Feeder(make(), ["cpu"] * 2, **options)
    before = []
    for x in itertools.islice(itertools.chain(first, first), stop_after):
        before.append(gather(x[0]).tolist())
        state = first.state_dict()
    first.close()
    torch.manual_seed(99)  # the other process draws other numbers
    second = Feeder(make(), ["cpu"] * 2, **options)
    second.load_state_dict(state)
    after = [gather(x[0]).tolist() for x in second]
    return before, after, second


def unbroken(make):
    torch.manual_seed(3)
    feeder = Feeder(make(), ["cpu"] * 2)
    return values(feeder)


class TestPosition:
    def test_counts_what_was_handed_out(self):
        feeder = Feeder(batches(5), "cpu", prefetch=4)
        assert (feeder.state_dict()["epoch"], feeder.state_dict()["batch"]) == (0, 0)
        feed = iter(feeder)
        next(feed)
        next(feed)
        assert (feeder.state_dict()["epoch"], feeder.state_dict()["batch"]) == (0, 2)
        list(feed)
        assert (feeder.state_dict()["epoch"], feeder.state_dict()["batch"]) == (1, 0)

    def test_a_pass_left_early_counts(self):
        feeder = Feeder(batches(5), "cpu")
        for _ in feeder:
            break
        for _ in feeder:
            break
        assert (feeder.state_dict()["epoch"], feeder.state_dict()["batch"]) == (1, 1)

    def test_of_the_pass_begun_last(self):
        feeder = Feeder(batches(5), "cpu")
        old = iter(feeder)
        next(old)
        new = iter(feeder)
        next(old)
        assert feeder.state_dict()["batch"] == 0
        next(new)
        assert feeder.state_dict()["batch"] == 1
        old.close()
        new.close()

    @pytest.mark.parametrize("workers", [0, 1])
    @pytest.mark.parametrize("own", [False, True])
    @pytest.mark.parametrize("stop_after", [1, 3, 5])
    def test_resuming_goes_on_in_the_same_order(self, workers, own, stop_after):
        def make():
            generator = torch.Generator().manual_seed(5) if own else None
            return numbered(12, batch_size=2, shuffle=True, num_workers=workers, generator=generator)

        before, after, _ = interrupted(make, stop_after)
        assert [*before, *after] == unbroken(make)

    @pytest.mark.parametrize("stop_after", [1, 3])
    def test_resuming_a_loader_that_passes_for_another(self, stop_after):
        def make():
            return StandsForAnother(numbered(12, batch_size=2, shuffle=True))

        before, after, _ = interrupted(make, stop_after)
        assert [*before, *after] == unbroken(make)

    def test_resuming_leaves_the_generator_alone(self):
        _, _, feeder = interrupted(lambda: numbered(12, batch_size=2, shuffle=True), 3)
        feeder.load_state_dict({"epoch": 0, "batch": 2, "generator": bytes(torch.get_rng_state().tolist())})
        torch.manual_seed(7)
        expected = torch.get_rng_state()
        iter(feeder).close()
        assert torch.get_rng_state().equal(expected)

    def test_what_is_skipped_is_not_loaded(self):
        dataset = Counting(12)
        feeder = Feeder(DataLoader(dataset, batch_size=2), "cpu")
        feeder.load_state_dict({"epoch": 1, "batch": 4})
        assert values(feeder) == [[8, 9], [10, 11]]
        assert dataset.loaded == [8, 9, 10, 11]
        assert feeder.state_dict()["epoch"] == 2
        assert values(feeder)[0] == [0, 1]

    @pytest.mark.parametrize(
        "make",
        [
            lambda: DataLoader(Stream(), batch_size=2, collate_fn=lambda items: (torch.tensor(items),)),
            lambda: [(torch.tensor([i, i + 1]),) for i in range(0, 12, 2)],
            lambda: numbered(12, batch_sampler=[[i, i + 1] for i in range(0, 12, 2)]),
        ],
        ids=["stream", "list", "batch_sampler"],
    )
    def test_any_loader(self, make):
        before, after, feeder = interrupted(make, 4)
        assert (before[-1], after) == ([6, 7], [[8, 9], [10, 11]])
        assert feeder.state_dict()["epoch"] == 1

    @pytest.mark.parametrize("prefetch", [0, 1, 3])
    def test_a_loader_that_keeps_its_own_position(self, prefetch):
        before, after, feeder = interrupted(lambda: Remembering(6), 3, prefetch=prefetch)
        assert [x[0] for x in [*before, *after]] == list(range(6))
        assert feeder.loader.resumed_at == 3  # what was prepared ahead does not count

    def test_resuming_between_two_passes(self):
        def make():
            return numbered(12, batch_size=2, shuffle=True)

        torch.manual_seed(3)
        feeder = Feeder(make(), "cpu")
        values(feeder)
        state, rng = feeder.state_dict(), torch.get_rng_state()
        second = values(feeder)
        other = Feeder(make(), "cpu")
        other.load_state_dict(state)
        torch.set_rng_state(rng)
        assert other.state_dict()["epoch"] == 1
        feed = iter(other)
        head = gather(next(feed)[0]).tolist()
        middle = other.state_dict()
        assert [head, *values(feed)] == second
        other.load_state_dict(middle)
        assert values(other) == second[1:]

    def test_a_checkpoint_keeps_it(self, tmp_path):
        feeder = Feeder(numbered(12, batch_size=2, shuffle=True), "cpu")
        feed = iter(feeder)
        next(feed)
        everygpu.save(tmp_path / "checkpoint", feeder=feeder)
        rest = values(feed)
        other = Feeder(numbered(12, batch_size=2, shuffle=True), "cpu")
        everygpu.load(tmp_path / "checkpoint", feeder=other)
        assert values(other) == rest

    @pytest.mark.parametrize(
        "state", [{}, {"epoch": 1, "position": 3}, {"epoch": -1}, {"batch": "3"}, None, {"generator": "x"}], ids=str
    )
    def test_another_state_is_refused(self, state):
        feeder = Feeder(batches(3), "cpu")
        if state == {}:
            feeder.load_state_dict(state)  # the beginning
            assert len(list(feeder)) == 3
            return
        with pytest.raises(OptionError, match="what Feeder.state_dict returned"):
            feeder.load_state_dict(state)


@pytest.mark.parametrize("shuffles", [False, True])
def test_a_pass_in_another_order_is_refused(shuffles):
    source, target = (Feeder(DataLoader(torch.arange(12), 2, shuffle=s), ["cpu"]) for s in (shuffles, not shuffles))
    with source, target:
        next(iter(source))
        state = source.state_dict()
        with pytest.raises(CheckpointMismatchError, match=f"repeat samples.*shuffle={shuffles}"):
            target.load_state_dict(state)
        del state["loader"]["in_order"]  # as earlier versions wrote it
        target.load_state_dict(state)


def seeded():
    return torch.Generator().manual_seed(5)


DRAWN = {
    "loader": lambda: numbered(12, batch_size=2, shuffle=True, generator=seeded()),
    "sampler": lambda: numbered(12, batch_size=2, sampler=RandomSampler(range(12), generator=seeded())),
    "weighted": lambda: numbered(
        12, batch_size=2, sampler=WeightedRandomSampler(torch.ones(12), 12, generator=seeded())
    ),
    "batch sampler": lambda: numbered(
        12, batch_sampler=BatchSampler(RandomSampler(range(12), generator=seeded()), 2, False)
    ),
}


@pytest.mark.parametrize("make", DRAWN.values(), ids=list(DRAWN))
@pytest.mark.parametrize("stop_after", [6, 8])
def test_generators_of_samplers_are_restored(make, stop_after):
    def run(feeder):
        while feeder.state_dict()["epoch"] < 3:
            for (x,) in feeder:
                yield gather(x).tolist()

    expected = list(run(Feeder(make(), "cpu")))
    assert expected[:6] != expected[6:12]
    first = Feeder(make(), "cpu")
    seen = [values(first)] if stop_after == 6 else list(itertools.islice(run(first), stop_after))
    second = Feeder(make(), "cpu")
    second.load_state_dict(first.state_dict())
    assert [*(seen[0] if stop_after == 6 else seen), *run(second)] == expected


@pytest.mark.parametrize("own", [False, True])
def test_a_position_of_an_earlier_version(own):
    def make():
        return Feeder(numbered(12, batch_size=2, shuffle=True, generator=seeded() if own else None), "cpu")

    torch.manual_seed(3)
    start = (seeded().get_state() if own else torch.get_rng_state()).tolist()
    expected = values(make())
    feeder = make()
    feeder.load_state_dict({"epoch": 2, "batch": 4, "generator": bytes(start), "loader": None, "in_order": False})
    assert values(feeder) == expected[4:]
    assert feeder.state_dict()["epoch"] == 3


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_persistent_workers_serve_later_feeders_and_the_loader_itself():
    loader = numbered(8, batch_size=2, shuffle=True, num_workers=1, persistent_workers=True)
    passes, pids = [], set()
    for i in range(4):
        torch.manual_seed(i)
        passes.append(values(Feeder(loader, "cpu") if i % 2 else loader))
        pids |= {w.pid for w in loader._iterator._workers}
    loader._iterator._shutdown_workers()
    assert len(pids) == 1
    assert all(a != b for a, b in itertools.pairwise(passes))
    assert all(sorted(itertools.chain(*x)) == list(range(8)) for x in passes)


class Tenfold(DataLoader):
    def __iter__(self):
        for (x,) in super().__iter__():
            yield (x * 10,)


class Endless(DataLoader):
    """Begins its iterator once, as loaders do that keep workers for all passes."""

    def __init__(self, *args):
        super().__init__(*args)
        self.begun = super().__iter__()

    def __iter__(self):
        yield from self.begun


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_a_loader_with_an_iter_of_its_own(options):
    first, second = (Feeder(Tenfold(TensorDataset(torch.arange(12)), 2, shuffle=True, **options), "cpu") for _ in "ab")
    values(first)
    with iter(first) as feed:
        next(feed)
        state, expected = first.state_dict(), values(feed)
    second.load_state_dict(state)
    assert values(second) == expected


def test_a_loader_that_asks_its_sampler_once_is_refused_in_the_middle_of_a_pass():
    feeder = Feeder(Endless(TensorDataset(torch.arange(12)), 2), "cpu")
    with iter(feeder) as feed:
        next(feed)
        with pytest.raises(CheckpointMismatchError, match="asks its sampler for no indices"):
            feeder.load_state_dict(feeder.state_dict())
