"""Worker processes: that they start, what they draw and keep, and what a run that is resumed finds of it."""

import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader

from everygpu import Feeder
from everygpu.errors import WorkerError
from everygpu.feed import one_pass
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
    monkeypatch.setattr(one_pass, "STARTS_S", (0.3, 10.0, 10.0))
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
    monkeypatch.setattr(one_pass, "STARTS_S", (0.1, 0.1))
    forks.plan = [False] + [True] * 9
    feeder = Feeder(numbered(8, num_workers=2), "cpu")
    with pytest.raises(WorkerError, match=r"hasn't come out of its fork in 2 tries, of 0\.2 s together\. Pass multipr"):
        list(feeder)
    forks.plan = []
    assert not torch.multiprocessing.active_children()
    assert len(list(feeder)) == 8


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
