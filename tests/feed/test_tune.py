"""The number of workers: measured on a twin of the loader, chosen small, nothing left behind."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from everygpu import tune_workers
from everygpu.errors import OptionError
from everygpu.feed import tune
from everygpu.feed.tune import GAIN, WorkerTrial, choose, with_workers


def trial(num_workers, rate):
    return WorkerTrial(num_workers=num_workers, batches_per_s=rate, first_batch_s=0.1, num_batches=10)


class Slow(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        time.sleep(0.004)
        return torch.tensor(float(i))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(100.0))


class TestChoosing:
    @pytest.mark.parametrize(
        ("rates", "chosen"),
        [
            ({0: 10}, 0),
            ({0: 10, 1: 10, 2: 20}, 2),
            ({0: 10, 1: 20, 2: 20.5, 4: 20.9}, 1),
            ({0: 10, 1: 9, 2: 8}, 0),
            ({4: 30, 2: 29, 1: 10}, 2),
        ],
        ids=str,
    )
    def test_the_smallest_that_is_as_fast(self, rates, chosen):
        assert choose(trial(n, rate) for n, rate in rates.items()) == chosen

    @given(st.dictionaries(st.integers(0, 64), st.floats(0.1, 1e4), min_size=1))
    def test_it_is_nearly_the_fastest(self, rates):
        chosen = choose(trial(n, rate) for n, rate in rates.items())
        assert rates[chosen] * (1 + GAIN) >= max(rates.values())


class TestTrials:
    @pytest.fixture
    def rates(self, monkeypatch):
        """Pretend that this many workers load at such a rate, on 16 cores."""
        known = {}
        monkeypatch.setattr(tune, "count_cores", lambda: 16)
        monkeypatch.setattr(tune, "_try", lambda loader, target, n, seconds: trial(n, known[n]))
        return known

    def run(self, **options):
        report = tune_workers(DataLoader(TensorDataset(torch.ones(4))), "cpu", **options)
        return report.num_workers, [t.num_workers for t in report.trials]

    def test_up_to_the_cores(self, rates):
        rates.update({0: 1, 1: 2, 2: 4, 4: 8, 8: 16, 16: 32})
        assert self.run() == (16, [0, 1, 2, 4, 8, 16])

    def test_until_more_bring_nothing(self, rates):
        rates.update({0: 10, 1: 10, 2: 20, 4: 20, 8: 20, 16: 99})
        assert self.run() == (2, [0, 1, 2, 4, 8])

    def test_a_slow_start_of_processes_does_not_end_it(self, rates):
        rates.update({0: 10, 1: 6, 2: 9, 4: 18, 8: 30, 16: 30})
        assert self.run() == (8, [0, 1, 2, 4, 8, 16])

    def test_all_candidates(self, rates):
        rates.update({3: 10, 5: 10, 7: 10, 6: 10, 1: 10, 2: 10, 9: 20})
        assert self.run(candidates=[3, 5, 7, 6, 1, 2, 9]) == (9, [3, 5, 7, 6, 1, 2, 9])


class TestMeasuring:
    def test_more_workers_load_a_slow_dataset_faster(self):
        loader = DataLoader(Slow(), batch_size=4)
        for _ in range(20):  # on a busy machine, the workers may wait for a core
            report = tune_workers(loader, ["cpu"] * 2, candidates=[0, 2], seconds=0.3)
            slow, fast = report.trials
            assert 0 < slow.batches_per_s * 0.016 <= 1  # four items of 4 ms
            if fast.batches_per_s > 1.2 * slow.batches_per_s:
                break
        assert report.num_workers == 2
        assert fast.batches_per_s > 1.2 * slow.batches_per_s
        assert 0 < slow.first_batch_s < 60
        assert loader.num_workers == 0

    def test_waiting_is_no_news_where_nothing_else_is_done(self, caplog):
        tune_workers(DataLoader(torch.arange(400.0), batch_size=2), "cpu", candidates=[0])
        assert caplog.messages == []

    def test_generators_are_as_before(self):
        loader = DataLoader(TensorDataset(torch.ones(8)), batch_size=2, shuffle=True)
        before = torch.get_rng_state()
        tune_workers(loader, "cpu", candidates=[0, 1], seconds=0.05)
        assert torch.get_rng_state().equal(before)

    def test_a_loader_of_one_batch(self):
        report = tune_workers(DataLoader(TensorDataset(torch.ones(2)), batch_size=2), "cpu", candidates=[0])
        assert report.trials[0].num_batches == 0
        assert report.trials[0].batches_per_s > 0

    def test_batches_that_are_none(self):
        loader = DataLoader(TensorDataset(torch.ones(3)), collate_fn=lambda items: None)
        assert tune_workers(loader, "cpu", candidates=[0], seconds=0.01).num_workers == 0


class TestTwins:
    def test_gives_the_same_batches(self):
        data = TensorDataset(torch.arange(10))
        for options in (
            {"batch_size": 4},
            {"batch_size": 4, "drop_last": True},
            {"batch_size": None},
            {"batch_sampler": BatchSampler(SequentialSampler(data), 3, False)},
            {"batch_size": 2, "collate_fn": len},
            {"batch_size": 2, "num_workers": 1, "prefetch_factor": 3, "persistent_workers": True, "timeout": 5},
        ):
            loader = DataLoader(data, **options)
            assert str(list(with_workers(loader, 0))) == str(list(loader))
            assert str(list(with_workers(loader, 1))) == str(list(loader))
            if loader.persistent_workers:
                loader._iterator._shutdown_workers()

    def test_a_stream(self):
        loader = DataLoader(Stream(), batch_size=7)
        assert str(list(with_workers(loader, 1))) == str(list(loader))

    def test_options_are_kept(self):
        loader = DataLoader(TensorDataset(torch.ones(4)), num_workers=1, prefetch_factor=7, timeout=3)
        twin = with_workers(loader, 2)
        assert (twin.num_workers, twin.prefetch_factor, twin.timeout) == (2, 7, 3)


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        ([1, 2], {}, "must be a torch.utils.data.DataLoader, got list"),
        (DataLoader(TensorDataset(torch.ones(2))), {"seconds": 0}, "seconds must be more than 0"),
        (DataLoader(TensorDataset(torch.ones(2))), {"candidates": []}, "candidates must be"),
        (DataLoader(TensorDataset(torch.ones(2))), {"candidates": [-1]}, r"got \[-1\]"),
        (DataLoader(TensorDataset(torch.ones(0))), {"candidates": [0]}, "gives no batch"),
        (DataLoader, {}, "must be a torch.utils.data.DataLoader, got the class DataLoader"),
        (DataLoader(TensorDataset(torch.ones(2))), {"seconds": "3"}, "seconds must be more than 0, got '3'"),
        (DataLoader(TensorDataset(torch.ones(2))), {"seconds": None}, "seconds must be more than 0, got None"),
        (DataLoader(TensorDataset(torch.ones(2))), {"candidates": 3}, "one or more whole numbers from 0, got 3"),
        (DataLoader(TensorDataset(torch.ones(2))), {"candidates": [True]}, r"got \[True\]"),
    ],
)
def test_wrong_options(loader, options, message):
    with pytest.raises(OptionError, match=message):
        tune_workers(loader, "cpu", **options)


def test_what_is_neither_model_nor_devices():
    optimizer = torch.optim.SGD([torch.ones(1)])
    with pytest.raises(OptionError, match="tune_workers: model_or_devices must be a model, .* got SGD"):
        tune_workers(DataLoader(TensorDataset(torch.ones(2))), optimizer)
