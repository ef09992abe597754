"""The number of workers: measured on a twin of the loader, chosen small, nothing left behind."""

import time

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from everygpu import tune_workers
from everygpu.errors import OptionError
from everygpu.feed import tune

SMALL = DataLoader(TensorDataset(torch.ones(2)))


class Slow(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        time.sleep(0.004)
        return torch.tensor(float(i))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(100.0))


@pytest.mark.parametrize(
    ("rates", "candidates", "chosen", "tried"),
    [
        ({0: 1, 1: 2, 2: 4, 4: 8, 8: 16, 16: 32}, None, 16, [0, 1, 2, 4, 8, 16]),
        ({0: 10, 1: 10, 2: 20, 4: 20, 8: 20, 16: 99}, None, 2, [0, 1, 2, 4, 8]),
        ({0: 10, 1: 6, 2: 9, 4: 18, 8: 30, 16: 30}, None, 8, [0, 1, 2, 4, 8, 16]),  # processes start slowly
        ({3: 10, 5: 10, 7: 10, 6: 10, 1: 10, 2: 10, 9: 20}, [3, 5, 7, 6, 1, 2, 9], 9, [3, 5, 7, 6, 1, 2, 9]),
        ({0: 10, 1: 20, 2: 20.5, 4: 20.9}, [0, 1, 2, 4], 1, [0, 1, 2, 4]),
        ({4: 30, 2: 29, 1: 10}, [4, 2, 1], 2, [4, 2, 1]),
    ],
)
def test_the_smallest_that_is_as_fast(monkeypatch, rates, candidates, chosen, tried):
    monkeypatch.setattr(tune, "count_cores", lambda: 16)
    monkeypatch.setattr(tune, "_measure", lambda loader, target, seconds: rates[loader.num_workers])
    report = tune_workers(SMALL, "cpu", candidates=candidates)
    assert (report.num_workers, list(report.batches_per_s)) == (chosen, tried)


def test_more_workers_load_a_slow_dataset_faster():
    loader = DataLoader(Slow(), batch_size=4)
    for _ in range(20):  # on a busy machine, the workers may wait for a core
        report = tune_workers(loader, ["cpu"] * 2, candidates=[0, 2], seconds=0.3)
        slow, fast = report.batches_per_s.values()
        assert 0 < slow * 0.016 <= 1  # four items of 4 ms
        if fast > 1.2 * slow:
            break
    assert report.num_workers == 2
    assert loader.num_workers == 0


def test_generators_are_as_before_and_waiting_is_no_news(caplog):
    loader = DataLoader(torch.arange(400.0), batch_size=2, shuffle=True)
    before = torch.get_rng_state()
    tune_workers(loader, "cpu", candidates=[0, 1], seconds=0.05)
    assert torch.get_rng_state().equal(before)
    assert caplog.messages == []


def test_a_loader_of_one_batch_and_batches_that_are_none():
    for loader in (DataLoader(range(2), 2), DataLoader(range(3), collate_fn=lambda items: None)):
        assert tune_workers(loader, "cpu", candidates=[0], seconds=0.01).batches_per_s[0] > 0


def test_a_twin_gives_the_same_batches():
    data = TensorDataset(torch.arange(10))
    for options in (
        {"batch_size": 4, "drop_last": True},
        {"batch_size": None},
        {"batch_sampler": BatchSampler(SequentialSampler(data), 3, False)},
        {"batch_size": 2, "num_workers": 1, "prefetch_factor": 3, "persistent_workers": True, "timeout": 5},
    ):
        loader = DataLoader(data, **options)
        assert str(list(tune.with_workers(loader, 0))) == str(list(loader))
        assert str(list(tune.with_workers(loader, 1))) == str(list(loader))
        if loader.persistent_workers:
            loader._iterator._shutdown_workers()
    stream = DataLoader(Stream(), batch_size=7)
    assert str(list(tune.with_workers(stream, 1))) == str(list(stream))
    twin = tune.with_workers(DataLoader(data, num_workers=1, prefetch_factor=7, timeout=3), 2)
    assert (twin.num_workers, twin.prefetch_factor, twin.timeout) == (2, 7, 3)


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        ([1, 2], {}, "list is no DataLoader"),
        (SMALL, {"seconds": 0}, "seconds must be more than 0, got 0"),
        *((SMALL, {"candidates": value}, "candidates are whole numbers") for value in ([], [-1], 3, [True])),
        (DataLoader(TensorDataset(torch.ones(0))), {"candidates": [0]}, "gives no batch"),
    ],
    ids=lambda value: str(value) if isinstance(value, (str, dict)) else "loader",
)
def test_wrong_options(loader, options, message):
    with pytest.raises(OptionError, match=message):
        tune_workers(loader, "cpu", **options)
