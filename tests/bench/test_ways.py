"""Every way to train is training: all end with the parameters that one device ends with."""

import pytest
import torch
from torch import nn

from everygpu.bench.training import find_training
from everygpu.bench.ways import WAYS, Work
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
