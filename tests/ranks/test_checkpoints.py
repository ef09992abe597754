"""Checkpoints of a run of several processes: one is written, all wait for it, and all load it."""

import os
import signal
import threading
import time
from importlib import import_module

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import everygpu
from everygpu.errors import CheckpointError, CheckpointForeignError, OptionError
from everygpu.ranks.group import init_group
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.usefixtures("warm_python")
writing = import_module("everygpu.checkpoint.save")


def slowly(monkeypatch, folder):
    """Have rank 0 take its time to write; while there is a file "hold", until both ranks have looked."""
    write = writing.write_checkpoint

    def write_slowly(*args, **options):
        time.sleep(0.03)
        while (folder / "hold").exists() and not all((folder / f"looked{rank}").exists() for rank in range(2)):
            time.sleep(0.01)
        return write(*args, **options)

    for module in (writing, import_module("everygpu.checkpoint.manager")):
        monkeypatch.setattr(module, "write_checkpoint", write_slowly)


def model_of(rank):
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, rank)
    return model


def save_and_load(folder):
    rank = init_group().rank
    with pytest.MonkeyPatch.context() as monkeypatch:
        slowly(monkeypatch, folder)
        save_alone(folder, rank)
        save_by_all(folder, rank)
        save_in_the_background(folder, rank)
        fail_on_all(folder, rank)


def save_alone(folder, rank):
    if rank == 0:
        everygpu.save(folder / "alone", model=model_of(0))
        everygpu.CheckpointManager(folder / "alone-run", model=model_of(0)).save(1)


def save_by_all(folder, rank):
    everygpu.save(folder / "one", model=model_of(7 + rank), rank=rank)
    model = model_of(-1)
    torch.manual_seed(5 + rank)
    assert everygpu.load(folder / "one", model=model, rng=True) == {"rank": 0}
    assert model.weight.tolist() == [[7, 7]]
    bound = model_of(0)
    manager = everygpu.CheckpointManager(folder / "run", every=2, best=("accuracy", "max", 1), model=bound)
    saved = []
    for step in (1, 2, 3, 4):
        torch.nn.init.constant_(bound.weight, step + rank)
        meter = everygpu.Meter()
        meter.update(1.0 if rank == 0 else step / 4, 1 + 3 * rank)  # rank 0 alone would find step 2 as good as 4
        saved.append(manager.save(step, accuracy=meter))
    assert saved == [None, folder / "run/step-00000002", None, folder / "run/step-00000004"]
    assert saved[3].exists()
    assert manager.latest() == manager.best() == saved[3]
    assert manager.resume() == 4
    assert bound.weight.tolist() == [[4, 4]]


def save_in_the_background(folder, rank):
    with everygpu.CheckpointManager(folder / "background", asynchronous=True, model=model_of(rank)) as manager:
        (folder / "hold").touch()
        path = manager.save(1)
        assert not path.exists(), "copied, but not written"
        (folder / f"looked{rank}").touch()
        assert manager.latest() == path
        assert threading.active_count() < 10
        manager.save(2)
        assert manager.resume() == 2
        path = manager.save(3)
    assert path.exists(), "close has waited for it"


def fail_on_all(folder, rank):
    (folder / "file").write_text("")
    with pytest.raises(CheckpointForeignError, match="is a file"):
        everygpu.save(folder / "file", model=model_of(rank))
    with pytest.raises(OptionError, match="no number"):
        everygpu.CheckpointManager(folder / "other", model=model_of(rank)).save(1, loss="low")
    with pytest.raises(NotImplementedError if rank == 0 else CheckpointError, match="not yet"):
        everygpu.save(folder / "none", state=Unready())
    manager = everygpu.CheckpointManager(folder / "file", asynchronous=True, model=model_of(rank))
    manager.save(1)
    with pytest.raises(CheckpointError, match="can't be written"):
        manager.save(2)
    manager.save(3)
    with pytest.raises(CheckpointError, match="can't be written"):
        manager.close()
    manager.close()


class Unready:
    def state_dict(self):
        raise NotImplementedError("not yet")

    def load_state_dict(self, state):
        pass


def test_rank_0_writes_and_the_others_wait(tmp_path):
    run_ranks(save_and_load, tmp_path, size=2, folder=tmp_path / "results")
    assert everygpu.load(tmp_path / "one", model=model_of(-1)) == {"rank": 0}
    assert (tmp_path / "alone-run/step-00000001").is_dir()


NUM_STEPS = 5


def train(folder):
    """Be killed at step 3, if this is the first try."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # else torchrun's own, as this is its fork
    torch.set_num_threads(1)
    group = init_group()
    model = model_of(0)
    manager = everygpu.CheckpointManager(folder / "run", keep=1, model=model)
    done = manager.resume()
    for step in range(done + 1, NUM_STEPS + 1):
        with torch.no_grad():
            model.weight.mul_(2).add_(sum(group.gather(step + group.rank)))
        manager.save(step)
        if step == 3 and group.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    return done, model.weight.tolist()


def launch(folder):
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=1,
        monitor_interval=0.1,
    )
    return elastic_launch(config, train)(folder)


def test_a_run_that_torchrun_restarts_goes_on_from_the_newest_checkpoint(tmp_path):
    [results] = run_ranks(launch, tmp_path, size=1, folder=tmp_path / "results")
    expected = 0
    for step in range(1, NUM_STEPS + 1):
        expected = 2 * expected + 2 * step + 1
    assert results == {rank: (3, [[expected] * 2]) for rank in range(2)}
