"""What ranks say to each other."""

import logging
import sys
import time
from multiprocessing import util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import everygpu
from everygpu.errors import RankError
from everygpu.ranks.group import FirstBatch, init_group
from everygpu.ranks.membership import find_membership
from tests.ranks.harness import environment, run_ranks

pytestmark = pytest.mark.usefixtures("warm_python")


@pytest.fixture
def environ(monkeypatch):
    for name in environment(0, 1, 0):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def talk():
    group = init_group()
    assert group is init_group(), "one group for a run"
    x, y = torch.full((3,), float(group.rank)), torch.arange(2) * (group.rank + 1)
    z = torch.full((2,), complex(1, group.rank))
    group.broadcast(y)
    group.all_reduce(x)()
    group.all_reduce(z)()
    return {
        "place": (group.rank, group.size, group.local_rank, group.local_size),
        "gather": group.gather({"rank": group.rank}),
        "first": group.broadcast_object(f"of rank {group.rank}"),
        "broadcast": y.tolist(),
        "reduced": [*x.tolist(), *z.tolist()],
        "is_main": everygpu.is_main(),
    }


def talk_in_a_group_of_the_users():
    dist.init_process_group("gloo")
    return talk()


@pytest.mark.parametrize("function", [talk, talk_in_a_group_of_the_users])
def test_ranks_exchange_values(tmp_path, function):
    results = run_ranks(function, size=3, local_size=1, folder=tmp_path)
    for rank, found in enumerate(results):
        assert found == {
            "place": (rank, 3, 0, 1),
            "gather": [{"rank": r} for r in range(3)],
            "first": "of rank 0",
            "broadcast": [0, 1],
            "reduced": [3.0, 3.0, 3.0, 3 + 3j, 3 + 3j],
            "is_main": rank == 0,
        }


def test_a_process_alone_has_no_group(environ):
    assert find_membership() is None
    assert init_group() is None
    assert everygpu.is_main()
    environ.setenv("WORLD_SIZE", "1")
    assert init_group() is None


def test_an_incomplete_environment(environ):
    environ.setenv("WORLD_SIZE", "2")
    assert find_membership() is None, "as a scheduler sets it that starts one process"
    environ.setenv("RANK", "1")
    assert find_membership() == (1, 2, 1, 2)
    assert not everygpu.is_main()
    environ.setenv("WORLD_SIZE", "two")
    with pytest.raises(RankError, match="WORLD_SIZE must be a whole number"):
        find_membership()


def read_late():
    group = init_group()
    if group.rank == 0:
        group.leave_note("done", "yes")
        return None
    time.sleep(1)  # until rank 0 would have ended, and the store with its process
    return group.read_note("done")


def test_rank_0_stays_until_others_have_read_its_notes(tmp_path):
    assert run_ranks(read_late, size=2, folder=tmp_path) == [None, "yes"]


def train_and_end(group):
    """Return the threads that are left at exit, when the optimizer has loaded what loads late."""
    if group != "of everygpu":
        dist.init_process_group("gloo")
    model = everygpu.DataParallel(nn.Linear(2, 3), ["cpu"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.rand(4, 2)).sum().backward()
    optimizer.step()
    before = thread_names()
    if group == "of the user, who ends it":
        dist.destroy_process_group()
    util._run_finalizers(0)  # as multiprocessing does at exit
    return before, thread_names()


def thread_names():
    return {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("group", ["of everygpu", "of the user", "of the user, who ends it"])
def test_no_thread_of_gloo_is_left_when_all_ranks_end(tmp_path, group):
    for before, after in run_ranks(train_and_end, group, size=2, folder=tmp_path):
        assert {name for name in before if "gloo" in name}
        assert not {name for name in after if "gloo" in name}


def train_on(x):
    """Return the warnings of a loop and of a training step."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("everygpu").addHandler(handler)
    model = everygpu.DataParallel(nn.Linear(2, 3), ["cpu"])
    with torch.no_grad():
        model(torch.ones(4, 2))  # an evaluation may have the same rows on all ranks
    for _ in range(2):
        model(x).sum().backward()
    step = everygpu.TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), capture=False)
    step(x, torch.zeros(4).long())
    return [text for text in told if "first batch" in text]


def train_on_the_same_rows_and_on_others():
    group = init_group()
    same = train_on(torch.ones(4, 2))
    group.first_batch = FirstBatch()  # as at a run's beginning
    return same, train_on(torch.ones(4, 2) + group.rank)


@pytest.mark.slow
def test_the_same_rows_on_all_ranks_are_told_once(tmp_path):
    first, second = run_ranks(train_on_the_same_rows_and_on_others, size=2, folder=tmp_path)
    (told,), others = first
    assert "2 ranks got the same rows" in told
    assert "Feeder" in told
    assert (others, second) == ([], ([], []))
