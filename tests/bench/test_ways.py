"""Every way to train is training: all see the same batches, and end with the parameters that one device ends with."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import everygpu
from everygpu.bench import Batches
from everygpu.bench.measure import time_rounds
from everygpu.bench.training import find_training
from everygpu.bench.ways import WAYS, Work
from tests.bench import own
from tests.bench.measuring import OWN, measure


def train(way, name, devices):
    """Take three steps; return the parameters."""
    torch.manual_seed(0)
    work = Work(training=find_training(name), devices=devices, precision="fp32")
    step = WAYS[way].make(work)
    for _ in range(3):
        step()
    return [p.detach().cpu() for p in work.training.model.parameters()]


NAMES = ["classifier", "keywords", "positional", "small_bert"]


@pytest.mark.parametrize("name", [OWN + name for name in NAMES])
@pytest.mark.parametrize("way", ["loop", "step"])
def test_several_devices_train_as_one_does(way, name, devices):
    # Its own rows again for each device: the mean gradient is that of one.
    one = train("bare", name, devices(1))
    torch.testing.assert_close(train(way, name, devices(2)), one, rtol=1e-3, atol=1e-5)
    untrained = [p.detach() for p in find_training(name).model.parameters()]
    assert not torch.allclose(untrained[0].cpu(), one[0])


@pytest.mark.gpu
@pytest.mark.cards(2)
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")  # of nn.DataParallel's new threads
def test_nn_data_parallel_trains_too():
    gpus = [torch.device("cuda", index) for index in range(2)]
    one = train("bare", f"{OWN}classifier", gpus[:1])
    torch.testing.assert_close(train("dp", f"{OWN}classifier", gpus), one, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_precision_is_that_of_the_forward(precision, dtype):
    seen = []
    training = find_training(f"{OWN}classifier")

    def loss(output, target):
        seen.append(output.dtype)
        return nn.functional.cross_entropy(output, target)

    for way in ("bare", "loop", "step"):
        work = Work(training=training._replace(loss=loss), devices=[torch.device("cpu")], precision=precision)
        WAYS[way].make(work)()
    assert seen == [dtype] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", [OWN + name for name in NAMES])
def test_a_graph_by_hand_trains_as_the_eager_step(name):
    gpu = [torch.device("cuda", 0)]

    def losses(way):
        torch.manual_seed(0)
        step = WAYS[way].make(Work(training=find_training(name), devices=gpu))
        return [float(step()) for _ in range(15)]

    torch.testing.assert_close(losses("graph"), losses("bare"), rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("way", ["ddp", "fsdp2", "loop_ranks", "step_ranks"])
def test_ranks_train_as_one_does(way):
    one = measure("bare", f"{OWN}classifier")
    row = measure(way, f"{OWN}classifier")
    assert [row["first_loss"], row["last_loss"]] == pytest.approx([one["first_loss"], one["last_loss"]], rel=1e-3)
    assert one["last_loss"] < one["first_loss"]


def test_ways_need_as_many_devices_as_they_train_on():
    assert [WAYS[way].num_devices(1) for way in ("bare", "graph", "loop", "dp", "ddp")] == [1, 1, 1, 0, 0]
    assert [WAYS[way].num_devices(4) for way in ("bare", "graph", "loop", "dp", "ddp")] == [1, 1, 4, 4, 4]


@pytest.mark.parametrize(("way", "num_devices"), [("bare", 1), ("loop", 2), ("step", 2)])
def test_steps_take_them_in_turn(way, num_devices):
    seen = []
    training = find_training(f"{OWN}several")

    def loss(output, target):
        seen.append((len(output), target.flatten().tolist()))
        return output.square().mean()

    work = Work(training=training._replace(loss=loss), devices=[torch.device("cpu")] * num_devices, precision="fp32")
    step = WAYS[way].make(work)
    for _ in range(4):
        step()
    assert seen == [(n * num_devices, [n] * n * num_devices) for n in (6, 4, 2, 6)]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("way", ["bare", "ddp"])  # whose loss is an error when another batch comes
def test_a_round_is_whole_cycles(way):
    row = measure(way, f"{OWN}several")
    assert (row["num_batches"], row["num_steps"], row["rows_per_device"]) == (3, 3, 4)
    assert row["samples_per_s"] == pytest.approx(4 * WAYS[way].num_devices(2) * 1e3 / row["ms"])


def test_each_is_trained_on_before_rounds_begin(monkeypatch):
    seen = []

    class Noting(nn.Linear):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x)

    def many():
        model = Noting(1, 1)
        return model, lambda output: output.mean(), own.sgd(model), Batches([(torch.ones(n, 1),) for n in range(1, 21)])

    monkeypatch.setattr(own, "several", many)
    row = measure("bare", f"{OWN}several")
    assert seen == list(range(1, 21)) * (6 + 3)
    assert row["rows_per_device"] == 10.5


def test_rows_as_asked_for():
    assert measure("bare", f"{OWN}small_bert", rows=2)["rows_per_device"] == 2
    row = measure("bare", f"{OWN}small_bert", rows=9)
    assert row["samples_per_s"] == pytest.approx(9e3 / row["ms"])


def test_the_engine_that_ran_is_told(monkeypatch):
    stats = everygpu.TrainStep.stats
    monkeypatch.setattr(everygpu.DataParallel, "engine_in_use", property(lambda net: "threads"), raising=False)
    monkeypatch.setattr(
        everygpu.TrainStep, "stats", lambda step: SimpleNamespace(loss=stats(step).loss, engine="capture")
    )
    assert [measure(way)["engine"] for way in ("bare", "loop", "step")] == ["", "threads", "capture"]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("way", ["bare", "ddp"])
def test_what_goes_wrong_is_told(way):
    assert "Return (model, loss, optimizer, batch)" in measure(way, f"{OWN}three", num_devices=1)["refused"]
    assert "fewer rows for each GPU (--rows)" in measure(way, f"{OWN}too_large", num_devices=1)["error"]
    with pytest.raises(Exception, match="mine"):
        measure(way, f"{OWN}failing", num_devices=1)


def test_what_does_not_run_here_is_an_error():
    assert "needs a GPU. Leave out" in measure("dp")["error"]


def test_rounds_are_whole_cycles_between_waits():
    done, waits = [], []
    row = time_rounds(lambda: done.append(1), lambda: waits.append(len(done)), rounds=3, steps=2)
    assert waits == [0, 2, 2, 4, 4, 6]
    assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
