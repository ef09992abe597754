"""Checkpoints of models that are sharded: written by all ranks, loaded on any number of them, and on none."""

import itertools
import json
import time
from importlib import import_module

import pytest
import torch
from torch.nn import functional as F

import everygpu
from everygpu.errors import CheckpointContentError, CheckpointError, CheckpointMismatchError, RankError
from everygpu.parallel.fully_sharded.shards import full_tensor, is_shard
from everygpu.ranks.group import init_group
from tests.parallel.fully_sharded.training import Net, batch, whole_state
from tests.ranks.harness import run_ranks, running

saving = import_module("everygpu.checkpoint.save")
pytestmark = pytest.mark.usefixtures("warm_python")

PLACES = [(None, 1), ("parameters", 2), ("gradients", 3), ("gradients", 2), ("optimizer", 2), ("parameters", 3)]
"""Levels and numbers of ranks: from each to each are 36 cells."""
FEW = PLACES[:3]


def make(level, seed=0):
    torch.manual_seed(seed)
    net = Net(tied=True)
    net.register_buffer("counted", torch.zeros(3))
    model = net if level is None else everygpu.DataParallel(net, ["cpu"], shard=level)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        ids, y = batch(step, 6)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def everything(model, optimizer):
    """Return all that is saved, whole."""
    states = {
        f"{i}.{name}": full_tensor(value) if is_shard(value) else value
        for i, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }
    return {**{k: v.clone() for k, v in whole_state(model).items()}, **states}


def save_then_load_all(folder, places, size):
    """Save at each level that has so many ranks; load what all have saved, to each level."""
    rank = init_group().rank if size > 1 else 0
    own = [place for place in places if place[1] == size]
    for level, _ in own:
        model, optimizer = make(level, seed=size)
        train(model, optimizer, range(3))
        if level == "gradients":
            with torch.no_grad():
                model(batch(0, 2)[0])
        everygpu.save(folder / f"{level}-{size}", model=model, optimizer=optimizer, note=[rank, torch.tensor(rank)])
        if rank == 0:
            torch.save(everything(model, optimizer), folder / f"{level}-{size}.pt")
        else:
            everything(model, optimizer)
    found = {}
    for level, there in itertools.product([level for level, _ in own], places):
        saved = folder / f"{there[0]}-{there[1]}"
        while not saved.with_suffix(".pt").exists():
            time.sleep(0.05)
        time.sleep(0.05)
        model, optimizer = make(level, seed=9)
        rest = everygpu.load(saved, model=model, optimizer=optimizer)
        expected, loaded = torch.load(saved.with_suffix(".pt")), everything(model, optimizer)
        is_equal = expected.keys() == loaded.keys() and all(torch.equal(loaded[k], v) for k, v in expected.items())
        found[(level, size, *there)] = is_equal and rest["note"] == [0, torch.tensor(0)]
        train(model, optimizer, [4])
    return found


@pytest.mark.parametrize("places", [FEW, pytest.param(PLACES, marks=pytest.mark.slow)], ids=["few", "all"])
def test_any_number_of_ranks_loads_what_any_has_saved(places, tmp_path):
    call = save_then_load_all, tmp_path, places
    with (
        running(*call, 2, size=2, folder=tmp_path / "2") as two,
        running(*call, 3, size=3, folder=tmp_path / "3") as three,
    ):
        found = save_then_load_all(tmp_path, places, 1)
        for result in (*two.results(), *three.results()):
            found |= result
    assert len(found) == len(places) ** 2
    assert all(found.values()), [cell for cell, is_equal in found.items() if not is_equal]
    index = json.loads((tmp_path / "parameters-2/training.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2, "each rank has written one"


def resume(folder, num_steps, asynchronous):
    """Go on for so many steps, and be killed then."""
    model, optimizer = make("parameters" if init_group().size == 4 else "gradients", seed=init_group().size)
    objects = {"model": model, "optimizer": optimizer}
    found = []
    with everygpu.CheckpointManager(folder, keep=2, asynchronous=asynchronous, **objects) as checkpoints:
        done = checkpoints.resume()
        while len(found) < num_steps:
            found += train(model, optimizer, [done])
            done += 1
            checkpoints.save(done, loss=found[-1])
    return found


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_fewer_ranks(asynchronous, tmp_path):
    torch.manual_seed(4)
    expected = train(*make(None, seed=4), range(5))
    losses = run_ranks(resume, tmp_path / "run", 2, asynchronous, size=4, folder=tmp_path / "four")
    more = run_ranks(resume, tmp_path / "run", 3, asynchronous, size=2, folder=tmp_path / "two")
    for first, last in zip(losses, more):
        assert first + last == pytest.approx(expected, rel=1e-4)
    net = Net(tied=True)
    net.register_buffer("counted", torch.zeros(3))
    assert everygpu.load(tmp_path / "run", model=net)["step"] == 5


def faults(folder):
    """What goes wrong on one rank, all raise."""
    rank = init_group().rank
    model, optimizer = make("parameters")
    (folder / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        everygpu.save(folder / "file", model=model)
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(saving, "write_tensors", fail)
        found = "full" if rank else "rank 1 couldn't write its files: OSError: full"
        with pytest.raises((CheckpointError, OSError), match=found):
            everygpu.save(folder / "whole", model=model)
    assert not (folder / "whole").exists()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(saving, "write_document", fail)
        with pytest.raises((CheckpointError, OSError), match="can't be written: full"):
            everygpu.save(folder / "whole", model=model)
    everygpu.save(folder / "whole", model=model, optimizer=optimizer)
    with pytest.raises(CheckpointContentError, match="is sharded over ranks"):
        everygpu.save(folder / "state", ema=model.state_dict())
    net, _ = make(None)
    factored = torch.optim.Adafactor(net.parameters())
    F.cross_entropy(net(batch(0, 2)[0]), batch(0, 2)[1]).backward()
    factored.step()
    everygpu.save(folder / "factored", model=net, optimizer=factored)
    with pytest.raises(CheckpointMismatchError, match="of another shape than its parameter's, as Adafactor does"):
        everygpu.load(folder / "factored", model=model, optimizer=torch.optim.Adafactor(model.parameters()))
    saving.MEET_S = 0.2
    if rank == 0:
        with pytest.raises(RankError, match="Call save on all ranks"):
            everygpu.save(folder / "alone", model=model)
    init_group().gather(None)
    return True


def fail(*args):
    raise OSError("full")


def test_faults_are_those_of_all_ranks(tmp_path):
    assert run_ranks(faults, tmp_path, size=2, folder=tmp_path / "ranks") == [True, True]
