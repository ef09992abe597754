"""Worker processes: that they start, what they draw and keep, and what a run that is resumed finds of it."""

import itertools
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from everygpu import Feeder, child
from everygpu.errors import WorkerError
from tests.feed.loaders import numbered, values
from tests.feed.rank_loaders import Stream
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


class Forks:
    """Which of the next forks of this process get stuck, as where CPython waits for a lock that nobody will release."""

    def __init__(self):
        self.plan, self.pid, self.num, self.is_stuck = [], os.getpid(), 0, False
        os.register_at_fork(before=self.before, after_in_child=self.after)

    def before(self):
        if os.getpid() == self.pid:
            self.num += 1
            self.is_stuck = bool(self.plan) and self.plan.pop(0)

    def after(self):
        while self.is_stuck:
            time.sleep(60)


@pytest.fixture(scope="module")
def all_forks():
    return Forks()  # for good: what is registered stays


@pytest.fixture
def forks(all_forks, monkeypatch):
    monkeypatch.setattr(child, "STARTS_S", (0.3, 10.0, 10.0), raising=False)
    all_forks.num = 0
    yield all_forks
    all_forks.plan, all_forks.is_stuck = [], False


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=str)
@pytest.mark.parametrize("plan", [[True], [False, True], [True, False, True]], ids=str)
def test_a_worker_that_is_stuck_in_its_fork_is_forked_again(forks, plan, options):
    forks.plan = list(plan)
    with Feeder(numbered(8, batch_size=2, num_workers=2, **options), "cpu", timeout=30) as feeder:
        assert values(feeder) == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert forks.num == 2 + sum(plan)
    assert not torch.multiprocessing.active_children()


def test_one_that_never_starts_is_an_error_and_no_wait(forks, monkeypatch):
    monkeypatch.setattr(child, "STARTS_S", (0.1, 0.1), raising=False)
    forks.plan = [False] + [True] * 9
    feeder = Feeder(numbered(8, num_workers=2), "cpu")
    with pytest.raises(WorkerError, match=r"hasn't come out of its fork in 2 tries\. Pass multiprocessing_context"):
        list(feeder)
    forks.plan = []
    assert not torch.multiprocessing.active_children()
    assert len(list(feeder)) == 8


def test_workers_that_die_between_two_epochs_are_named_and_others_begin():
    with Feeder(numbered(8, batch_size=2, num_workers=2, persistent_workers=True), "cpu") as feeder:
        expected = values(feeder)
        for worker in torch.multiprocessing.active_children():
            worker.kill()
            worker.join()
        with pytest.raises(WorkerError, match=r"died: pid \d+ with exit code -9, pid \d+ with"):
            iter(feeder)
        assert values(feeder) == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_first_item_is_the_datasets(workers):
    class Ended(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            raise EOFError("the shelf")

    class Own(DataLoader):
        def __iter__(self):
            yield from super().__iter__()

    for kind in (DataLoader, Own):
        with pytest.raises(EOFError, match="the shelf"):
            list(Feeder(kind(Ended(), num_workers=workers), "cpu"))


SLOW_LOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
/* CPython asks for a thread's id within the lock of its list of thread states. */
long syscall(long n, ...) {
    long (*real)(long, ...) = dlsym(RTLD_NEXT, "syscall"), x[6];
    char name[17] = "";
    va_list given;
    va_start(given, n);
    for (int i = 0; i < 6; i++)
        x[i] = va_arg(given, long);
    if (n == SYS_gettid && !prctl(PR_GET_NAME, name) && !strncmp(name, "pt_gloo", 7))
        usleep(20000);
    return real(n, x[0], x[1], x[2], x[3], x[4], x[5]);
}
"""


def many_epochs():
    feeder = Feeder(DataLoader(Stream(range(6)), 2, num_workers=2), "cpu", timeout=30)
    return [len(list(feeder)) for _ in range(15)]


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="compiles a library that is preloaded"
)
def test_gloos_threads_that_take_the_gil_while_workers_are_forked(tmp_path, monkeypatch):
    (tmp_path / "slow.c").write_text(SLOW_LOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "slow.so", "slow.c", "-ldl"], cwd=tmp_path, check=True)
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "slow.so"))
    assert run_ranks(many_epochs, size=2, folder=tmp_path) == [[6] * 15] * 2


class Drawing(Dataset):
    """Items that are random numbers, as augmentations draw them."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.tensor([torch.rand(()).item(), random.random(), numpy.random.rand()], dtype=torch.float64)


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_after_a_resume_in_an_epoch_other_random_numbers_are_drawn(options):
    def drawn(stop, state):
        with Feeder(DataLoader(Drawing(), 1, **options), "cpu", seed=3) as feeder:
            if state is not None:
                feeder.load_state_dict(state)
            return [x.flatten().tolist() for x in itertools.islice(feeder, stop)], feeder.state_dict()

    whole, _ = drawn(8, None)
    seen, state = drawn(2, None)
    assert seen == whole[:2]
    for _ in range(3):  # preempted again and again
        again, state = drawn(2, state)
        seen += again
    assert len(seen) == 8
    for kind in zip(*seen):
        assert len(set(kind)) == 8


class Counting(IterableDataset):
    """A stream that counts its epochs, each in another order; workers take turns."""

    def __init__(self):
        self.epoch, self.first = 0, 0

    def __iter__(self):
        info = get_worker_info()
        order = torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1
        for i in order[info.id :: info.num_workers] if info else order:
            yield torch.tensor([i + self.first, os.getpid()])


class Told(Counting):
    """One that is told the epoch."""

    def set_epoch(self, epoch):
        self.epoch = epoch


def set_first(worker):
    """What torch's documentation does in ``worker_init_fn``."""
    get_worker_info().dataset.first = 100


def numbers(epoch):
    return [i for x in epoch for i in x[:, 0].tolist()]


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_stream_stay_with_what_they_keep(context):
    options = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": context}
    options["worker_init_fn"] = set_first
    loader = DataLoader(Counting(), 3, **options)
    plain = [numbers(loader) for _ in range(3)]
    loader._iterator = None
    with Feeder(loader, "cpu", prefetch=0) as feeder:
        epochs = [list(feeder) for _ in range(3)]
        assert [numbers(epoch) for epoch in epochs] == plain
        assert min(plain[0]) == 100
        assert len({pid for epoch in epochs for x in epoch for pid in x[:, 1].tolist()}) == 2
        next(iter(feeder))
        assert sorted(numbers(feeder)) == list(range(100, 112)), "after one that was left"


def orders(feeder, num, stop=None):
    """The orders of some epochs; the last one is left after ``stop`` batches."""
    found = [numbers(feeder) for _ in range(num)]
    return [*found, numbers(itertools.islice(feeder, stop))] if stop is not None else found


@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
)
@pytest.mark.parametrize("stop", [0, 2])
def test_a_resumed_stream_is_told_its_epoch_or_you_are(options, stop, caplog):
    def resumed(kind):
        caplog.clear()
        with Feeder(DataLoader(kind(), 3, **options), "cpu", seed=1) as first:
            before = orders(first, 2, stop)
            state = first.state_dict()
        with Feeder(DataLoader(kind(), 3, **options), "cpu") as second:
            second.load_state_dict(state)
            return before, orders(second, 2), [text for text in caplog.messages if "has no set_epoch" in text]

    (one, two, part), (rest, last), said = resumed(Told)
    with Feeder(DataLoader(Told(), 3, **options), "cpu", seed=1) as feeder:
        assert [one, two, part + rest, last] == orders(feeder, 4)
    assert len({str(order) for order in (one, two, part + rest, last)}) == 4
    assert said == []
    assert resumed(Counting)[2] == [
        "Feeder: Counting has no set_epoch. If it counts its epochs, it begins again with the first one, where the run "
        "continues with epoch 2 (from 0). Give it set_epoch(epoch), or state_dict and load_state_dict."
    ]


GUARDLESS = """
import torch, everygpu
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.zeros({num}))
loader = DataLoader(data, 2, num_workers=1, multiprocessing_context={context!r})
for _ in everygpu.Feeder(loader, "cpu"):
    pass
"""


@pytest.mark.usefixtures("warm_python")
@pytest.mark.slow
@pytest.mark.parametrize(("context", "num"), [("spawn", 4), ("spawn", 100_000), ("forkserver", 4)])
def test_a_script_without_its_main_line_is_told_so(context, num, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(GUARDLESS.format(context=context, num=num))
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environ, timeout=120, check=False)
    *_, last = done.stderr.strip().splitlines()
    assert "WorkerError: Feeder: a worker process" in last
    assert "run the script again: put what it does under `if __name__ == '__main__':`." in last
