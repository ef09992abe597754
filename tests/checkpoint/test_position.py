"""The position in the data: after a resume come the samples that would have come, whoever fetches them."""

import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

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
)
from torch.utils.data.distributed import DistributedSampler

import everygpu
from everygpu import ResumableLoader
from everygpu.errors import CheckpointMismatchError, OptionError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
DATA = TensorDataset(torch.arange(23))


class NumpyShuffled(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(23).tolist())

    def __len__(self) -> int:
        return 23


class PythonShuffled(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(23), 23))

    def __len__(self) -> int:
        return 23


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LOADERS: dict[str, Any] = {
    "in order": lambda seed: DataLoader(DATA, 4),
    "shuffled": lambda seed: DataLoader(DATA, 4, shuffle=True),
    "shuffled by a generator": lambda seed: DataLoader(DATA, 4, shuffle=True, generator=seeded(seed)),
    "last dropped": lambda seed: DataLoader(DATA, 4, shuffle=True, drop_last=True),
    "sampler": lambda seed: DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(23), seeded(seed))),
    "with replacement": lambda seed: DataLoader(DATA, 4, sampler=RandomSampler(DATA, True, 70)),
    "weighted": lambda seed: DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0, 2.0] * 11, 22)),
    "distributed": lambda seed: DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 1)),
    "numpy": lambda seed: DataLoader(DATA, 4, sampler=NumpyShuffled()),
    "python": lambda seed: DataLoader(DATA, 4, sampler=PythonShuffled()),
    "batch sampler": lambda seed: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, False)),
    "no batches": lambda seed: DataLoader(DATA, batch_size=None, shuffle=True),
}


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


class Run:
    """Reads data, and draws random numbers in between as training does."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        seed_everything(seed)
        self.data = ResumableLoader(loader)
        self.seen: list[object] = []

    def run(self, num_batches: int | None, num_epochs: int = 3) -> list[object]:
        """Go on until so many batches are seen, or all epochs are over."""
        while self.data.epoch < num_epochs:
            for (batch,) in self.data:
                draws = (torch.rand(1).item(), random.random(), np.random.rand())
                self.seen.append((batch.tolist(), draws))
                if len(self.seen) == num_batches:
                    return self.seen
        return self.seen


@pytest.mark.parametrize("make", LOADERS.values(), ids=list(LOADERS))
@pytest.mark.parametrize("stop", [0, 1, 5, 6, 8])
def test_a_resumed_run_sees_what_comes_next(tmp_path: Path, make: Any, stop: int) -> None:
    expected = Run(make(1), seed=1).run(None)
    interrupted = Run(make(1), seed=1)
    seen = interrupted.run(stop) if stop else []
    everygpu.save(tmp_path / "ckpt", data=interrupted.data)
    resumed = Run(make(2), seed=2)
    everygpu.load(tmp_path / "ckpt", data=resumed.data, rng=True)
    assert [*seen, *resumed.run(None)] == expected


@pytest.mark.parametrize("make", LOADERS.values(), ids=list(LOADERS))
def test_a_run_saved_between_two_passes_goes_on_with_the_second(tmp_path: Path, make: Any) -> None:
    expected = Run(make(1), seed=1).run(None)
    interrupted = Run(make(1), seed=1)
    seen = list(interrupted.run(None, num_epochs=1))
    everygpu.save(tmp_path / "ckpt", data=interrupted.data)
    resumed = Run(make(2), seed=2)
    everygpu.load(tmp_path / "ckpt", data=resumed.data, rng=True)
    assert resumed.data.epoch == 1
    assert [*seen, *resumed.run(None)] == expected


def test_every_epoch_has_another_order() -> None:
    """The tests here would notice if all epochs were the same."""
    seen = [batch for batch, _ in Run(LOADERS["shuffled"](1), seed=1).run(None)]  # type: ignore[misc]
    assert sorted(chain.from_iterable(seen[:6])) == list(range(23))
    assert seen[:6] != seen[6:12]


@pytest.mark.parametrize(("workers", "then"), [(0, 2), (2, 0), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", ["shuffled", "shuffled by a generator", "batch sampler"])
def test_the_number_of_workers_may_change(tmp_path: Path, name: str, workers: int, then: int) -> None:
    def with_workers(num_workers: int) -> DataLoader[Any]:
        loader = LOADERS[name](1)
        loader.num_workers = num_workers
        loader.prefetch_factor = 2 if num_workers else None
        return loader

    expected = Run(with_workers(0), seed=1).run(None, num_epochs=2)
    interrupted = Run(with_workers(workers), seed=1)
    seen = list(interrupted.run(3))
    everygpu.save(tmp_path / "ckpt", data=interrupted.data)
    resumed = Run(with_workers(then), seed=2)
    everygpu.load(tmp_path / "ckpt", data=resumed.data, rng=True)
    assert [*seen, *resumed.run(None, num_epochs=2)] == expected


@pytest.mark.parametrize("stop", [3, 6, 9])
def test_workers_that_persist(tmp_path: Path, stop: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(DATA, 4, shuffle=True, num_workers=1, persistent_workers=True)

    expected = Run(make(), seed=1).run(None)
    interrupted = Run(make(), seed=1)
    seen = list(interrupted.run(stop))
    everygpu.save(tmp_path / "ckpt", data=interrupted.data)
    resumed = Run(make(), seed=2)
    everygpu.load(tmp_path / "ckpt", data=resumed.data, rng=True)
    assert [*seen, *resumed.run(None)] == expected


class OwnGenerator(Sampler[int]):
    """Shuffles by a generator that has any name, within another sampler."""

    def __init__(self, kind: str) -> None:
        made = {
            "torch": lambda: seeded(3),
            "NumPy": lambda: np.random.default_rng(3),
            "Python": lambda: random.Random(3),
        }
        self.rng = made.get(kind, lambda: np.random.RandomState(3))()

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.rng, random.Random):
            return iter(self.rng.sample(range(23), 23))
        order = (
            torch.randperm(23, generator=self.rng)
            if isinstance(self.rng, torch.Generator)
            else self.rng.permutation(23)
        )
        return iter(order.tolist())

    def __len__(self) -> int:
        return 23


@pytest.mark.parametrize("kind", ["torch", "NumPy", "RandomState", "Python"])
@pytest.mark.parametrize("stop", [6, 8])
def test_a_sampler_s_own_generator_is_restored(tmp_path: Path, kind: str, stop: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(DATA, batch_sampler=BatchSampler(OwnGenerator(kind), 4, False))

    expected = Run(make(), seed=1).run(None)
    assert expected[6:12] != expected[:6]
    interrupted = Run(make(), seed=1)
    seen = list(interrupted.run(stop))
    everygpu.save(tmp_path / "ckpt", data=interrupted.data)
    state = interrupted.data.state_dict()
    resumed = Run(make(), seed=2)
    everygpu.load(tmp_path / "ckpt", data=resumed.data, rng=True)
    assert [*seen, *resumed.run(None)] == expected
    other = ResumableLoader(DataLoader(DATA, 4, sampler=RandomSampler(DATA, generator=seeded(1))))
    with pytest.raises(CheckpointMismatchError, match=r"when it was saved, 0 \(none\), got 1 \(torch's\)"):
        other.load_state_dict(state | {"start": {"generators": []}})
    del state["num_rows"], state["start"]["generators"][:]  # as earlier versions wrote it
    resumed.data.load_state_dict(state)


class DrawnAsItGoes(Sampler[int]):
    """Shuffles 8 rows at a time, each when it comes to them."""

    def __iter__(self) -> Iterator[int]:
        for begin in range(0, 24, 8):
            yield from random.sample(range(begin, begin + 8), 8)

    def __len__(self) -> int:
        return 24


@pytest.mark.parametrize("in_feeder", [False, True])
def test_an_order_that_is_drawn_as_it_goes(in_feeder: bool) -> None:
    """It is the same again if nothing else draws, and refused where it isn't."""

    def read(state: Any, stop: int | None, draws: bool) -> tuple[Any, list[list[int]]]:
        loader = DataLoader(range(24), 4, sampler=DrawnAsItGoes())
        data = everygpu.Feeder(loader, "cpu", prefetch=0) if in_feeder else ResumableLoader(loader)
        if state is not None:
            data.load_state_dict(state)
        seen = []
        for batch in data:
            seen.append(batch.tolist())
            if len(seen) == stop:
                break
            random.seed(len(seen)) if draws else None
        return data.state_dict(), seen

    for stop in (1, 2, 3):
        random.seed(1)
        expected = read(None, None, False)[1]
        random.seed(1)
        state, seen = read(None, stop, False)
        assert [*seen, *read(state, None, False)[1]] == expected
    random.seed(1)
    state, _ = read(None, 3, True)
    with pytest.raises(CheckpointMismatchError, match="draw the same order again"):
        read(state, None, False)


def test_skipping_fetches_nothing(tmp_path: Path) -> None:
    class Counted(Dataset[int]):
        fetched: list[int] = []

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> int:
            self.fetched.append(index)
            return index

    data = ResumableLoader(DataLoader(Counted(), 2))
    data.load_state_dict({"epoch": 0, "num_batches": 4, "length": 6, "start": position_of(data)})
    assert [batch.tolist() for batch in data] == [[8, 9], [10, 11]]
    assert Counted.fetched == [8, 9, 10, 11]


def position_of(data: ResumableLoader) -> Any:
    return data._order.take_states()


class Stream(IterableDataset[tuple[torch.Tensor]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        for value in torch.randperm(11):
            yield (value,)


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_stream_is_fetched_again(tmp_path: Path, stop: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Stream(), 3)

    expected = Run(make(), seed=1).run(None)
    interrupted = Run(make(), seed=1)
    seen = interrupted.run(stop)
    everygpu.save(tmp_path / "ckpt", data=interrupted.data)
    resumed = Run(make(), seed=2)
    everygpu.load(tmp_path / "ckpt", data=resumed.data, rng=True)
    assert [*seen, *resumed.run(None)] == expected


def test_a_pass_left_early_is_over_when_the_next_begins() -> None:
    data = ResumableLoader(DataLoader(DATA, 4))
    next(iter(data))
    assert data.epoch == 0
    assert len(list(data)) == len(data) == 6
    assert data.epoch == 2


def test_a_consumer_that_fetches_ahead_counts_what_is_used() -> None:
    data = ResumableLoader(DataLoader(DATA, 4))
    batches, progress = data.begin_pass()
    for _ in range(3):
        next(batches)
    progress.count()
    again = ResumableLoader(DataLoader(DATA, 4))
    again.load_state_dict(data.state_dict())
    assert next(iter(again))[0].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("make", LOADERS.values(), ids=list(LOADERS))
def test_a_pass_of_which_nothing_was_used_is_begun_again(make: Any) -> None:
    seed_everything(1)
    data = ResumableLoader(make(1))
    list(data)
    batches, _ = data.begin_pass()
    expected = [batch[0].tolist() for batch in batches]
    again = ResumableLoader(make(2))
    again.load_state_dict(data.state_dict())
    assert again.epoch == 1
    assert [batch[0].tolist() for batch in again] == expected


def test_a_pass_beside_a_later_one_does_not_move_its_position() -> None:
    data = ResumableLoader(DataLoader(DATA, 4))
    old = iter(data)
    next(old)
    new = iter(data)
    next(new)
    next(old)
    assert (data.state_dict()["epoch"], data.state_dict()["num_batches"]) == (1, 1)
    list(old)
    assert (data.state_dict()["epoch"], data.state_dict()["num_batches"]) == (1, 1)


def test_an_interrupt_while_a_pass_is_resumed_leaves_the_position() -> None:
    class Interrupted(Stream):
        is_on = False

        def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
            for position, value in enumerate(super().__iter__()):
                if self.is_on and position == 2:
                    raise KeyboardInterrupt
                yield value

    stream = Interrupted()
    data = ResumableLoader(DataLoader(stream, 1))
    batches = iter(data)
    expected = [next(batches)[0].tolist() for _ in range(5)][4]
    state = data.state_dict()
    state["num_batches"] = 4
    data.load_state_dict(state)
    stream.is_on = True
    with pytest.raises(KeyboardInterrupt):
        next(iter(data))
    assert data.state_dict() == state
    stream.is_on = False
    assert next(iter(data))[0].tolist() == expected


@pytest.mark.parametrize(
    "state", [None, {}, {"epoch": 0, "batch": 3, "generator": None, "loader": None}, {"epoch": 0, "length": 6}], ids=str
)
def test_what_is_no_position_is_refused(state: Any) -> None:
    data = ResumableLoader(DataLoader(DATA, 4))
    with pytest.raises(CheckpointMismatchError, match=r"what ResumableLoader.state_dict returned"):
        data.load_state_dict(state)


def test_another_number_of_generators_is_refused() -> None:
    state = ResumableLoader(LOADERS["shuffled by a generator"](1)).state_dict()
    data = ResumableLoader(LOADERS["shuffled"](1))
    with pytest.raises(CheckpointMismatchError, match=r"as many generators as when it was saved, 1 \(torch's\), got 0"):
        data.load_state_dict(state)


@pytest.mark.parametrize("in_feeder", [False, True])
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda: DataLoader(range(9), 2), "as many batches as when it was saved, 3, got 5"),
        (lambda: DataLoader(range(10), 4), "as many rows as when it was saved, 9, got 10"),
        (lambda: DataLoader(range(9), 3), "the same batch_size as when it was saved, 4, got 3"),
    ],
)
def test_a_pass_over_other_data_is_refused(other: Any, reason: str, in_feeder: bool) -> None:
    def wrapped(loader: DataLoader[Any]) -> Any:
        return everygpu.Feeder(loader, "cpu") if in_feeder else ResumableLoader(loader)

    data, target = wrapped(DataLoader(range(9), 4)), wrapped(other())
    between = data.state_dict()
    next(iter(data))
    with pytest.raises(CheckpointMismatchError, match=reason):
        target.load_state_dict(data.state_dict())
    target.load_state_dict(between)
    assert len(list(target)) == len(target)


def test_other_data_is_refused_and_nothing_changes() -> None:
    state = ResumableLoader(DataLoader(DATA, 4)).state_dict()
    data = ResumableLoader(DataLoader(DATA, 5))
    with pytest.raises(CheckpointMismatchError, match="as many batches as when it was saved, 6, got 5"):
        data.load_state_dict(state | {"epoch": 3, "num_batches": 1})
    assert data.epoch == 0
    data.load_state_dict(state | {"epoch": 3})  # between two passes
    assert data.epoch == 3


@pytest.mark.parametrize("name", ["shuffled", "batch sampler", "weighted", "no batches"])
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_pass_in_another_order_is_refused_and_nothing_changes(name: str, is_turned: bool) -> None:
    shuffled = LOADERS[name](1)
    in_order = DataLoader(DATA, 4 if shuffled.batch_sampler is not None else None)
    pair = [ResumableLoader(in_order), ResumableLoader(shuffled)]
    source, target = reversed(pair) if is_turned else pair
    between = source.state_dict()
    next(iter(source))
    middle, before = source.state_dict(), target.state_dict()
    with pytest.raises(CheckpointMismatchError, match=f"order that it was begun in.*shuffle={is_turned}"):
        target.load_state_dict(middle)
    assert target.state_dict() == before
    target.load_state_dict(between)
    del middle["in_order"]  # as earlier versions wrote it
    target.load_state_dict(middle)


@pytest.mark.parametrize("loader", [[1, 2], None, DATA])
def test_what_is_no_loader_is_refused(loader: Any) -> None:
    with pytest.raises(OptionError, match="must be a torch"):
        ResumableLoader(loader)


def test_the_loader_itself_stays_as_it_was() -> None:
    loader = DataLoader(DATA, 4)
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    ResumableLoader(loader)
    assert loader.sampler is sampler
    assert loader.batch_sampler is batch_sampler


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchdata_s_own_loader_is_saved_as_it_is(tmp_path: Path) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        torch.manual_seed(1)
        return torchdata.StatefulDataLoader(DATA, 4, shuffle=True, generator=seeded(1))

    expected = [batch[0].tolist() for batch in make()]
    interrupted, seen = make(), []
    for batch in interrupted:
        seen.append(batch[0].tolist())
        if len(seen) == 3:
            break
    everygpu.save(tmp_path / "ckpt", data=interrupted)
    resumed = make()
    everygpu.load(tmp_path / "ckpt", data=resumed)
    assert seen + [batch[0].tolist() for batch in resumed] == expected
    with pytest.raises(OptionError, match="torchdata"):
        ResumableLoader(resumed)
