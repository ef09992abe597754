"""Every way to train is training: all end with the parameters that one device ends with."""

import pytest
import torch
from torch import nn

from everygpu.bench.rows import ROWS, Work
from everygpu.bench.training import find_training

OWN = "tests.bench.own:"


def train(peer, name, devices):
    """Take three steps; return the parameters."""
    torch.manual_seed(0)
    work = Work(training=find_training(name), devices=devices, precision="fp32")
    step = ROWS[peer](work)
    for _ in range(3):
        step()
    return [p.detach().cpu() for p in work.training.model.parameters()]


NAMES = ["classifier", "keywords", "positional", "small_bert"]


@pytest.mark.parametrize("name", [OWN + name for name in NAMES])
@pytest.mark.parametrize("peer", ["ours", "step"])
def test_several_devices_train_as_one_does(peer, name, devices):
    # Its own rows again for each device: the mean gradient is that of one.
    one = train("single", name, devices(1))
    torch.testing.assert_close(train(peer, name, devices(2)), one, rtol=1e-3, atol=1e-5)
    untrained = [p.detach() for p in find_training(name).model.parameters()]
    assert not torch.allclose(untrained[0].cpu(), one[0])


@pytest.mark.gpu
@pytest.mark.cards(2)
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")  # of nn.DataParallel's new threads
def test_nn_data_parallel_trains_too():
    gpus = [torch.device("cuda", index) for index in range(2)]
    one = train("single", f"{OWN}classifier", gpus[:1])
    torch.testing.assert_close(train("dp", f"{OWN}classifier", gpus), one, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_precision_is_that_of_the_forward(precision, dtype):
    seen = []
    training = find_training(f"{OWN}classifier")

    def loss(output, target):
        seen.append(output.dtype)
        return nn.functional.cross_entropy(output, target)

    for peer in ("single", "ours", "step"):
        work = Work(training=training._replace(loss=loss), devices=[torch.device("cpu")], precision=precision)
        ROWS[peer](work)()
    assert seen == [dtype] * 3
