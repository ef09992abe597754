"""How much the result of each replica counts: by its rows, what its loss is the mean of, or what ``weight=`` says."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import everygpu
from everygpu.errors import OptionError


class Tagger(nn.Module):
    """Returns its loss, as models of ``transformers`` do: the mean over the targets that aren't -100."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 5)

    def forward(self, x, labels=None, y=None):
        targets = labels if y is None else y
        return {"loss": F.cross_entropy(self.linear(x).flatten(0, 1), targets.flatten())}


@pytest.fixture
def batch():
    x, y = torch.randn(6, 4, 3), torch.randint(0, 5, (6, 4))
    y[0], y[1, 1:], y[4] = -100, -100, -100  # of two replicas three rows, of three two rows with 1, 8, 4 targets
    return x, y


def tensor(x, y):
    return (y != -100).sum()


def number(x, y):
    return int(tensor(x, y))


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("weight", [None, tensor, number])
def test_the_mean_of_losses_is_that_of_the_whole_batch(batch, num, weight):
    x, y = batch
    bare, net = Tagger(), Tagger()
    model = everygpu.DataParallel(net, ["cpu"] * num, weight=weight)
    x = x.double()
    bare.double(), net.double()
    expected = bare(x, y=y)["loss"]
    expected.backward()
    found = (model(x, labels=y) if weight is None else model(x, y=y))["loss"].mean()
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(net.linear.weight.grad, bare.linear.weight.grad)


def test_a_share_without_targets_counts_nothing(batch):
    x, y = batch
    y[3:] = -100
    model = everygpu.DataParallel(Tagger(), ["cpu"] * 2)
    loss = model(x, labels=y)["loss"]
    assert loss[1].isnan()
    torch.testing.assert_close(loss.mean(), model.module(x, labels=y)["loss"])
    assert list(loss.shard_rows) == [tensor(x, y), 0]


def test_a_caller_who_normalizes_is_left_alone():
    class Summed(nn.Module):
        def forward(self, x, labels, num_items):
            return x.sum() / num_items

    x, labels = torch.arange(5.0), torch.tensor([-100, -100, 1, 1, 1])
    model = everygpu.DataParallel(Summed(), ["cpu"] * 2)
    found = model(x, labels=labels, num_items=torch.tensor([3, 3]))
    torch.testing.assert_close(found.mean() * 2, x.sum() / 3)


@pytest.mark.parametrize("engine", ["threads", "capture"])
def test_a_step_weighs_the_models_losses(batch, engine, in_threads):
    x, y = batch
    bare, net = Tagger(), Tagger()
    step = everygpu.TrainStep(
        everygpu.DataParallel(net, ["cpu"] * 2, engine=engine), None, torch.optim.SGD(net.parameters(), 0.1)
    )
    optimizer = torch.optim.SGD(bare.parameters(), 0.1)
    for _ in range(3):
        loss = bare(x, labels=y)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step({"x": x, "labels": y}), loss.detach())
    torch.testing.assert_close(net.linear.weight, bare.linear.weight)


CLASSES = torch.tensor([1.0, 2.0, 3.0, 0.5, 0.1])


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=CLASSES),
        nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1),
        F.cross_entropy,
    ],
    ids=["ignored", "class weights", "another index", "function"],
)
def test_accumulated_batches_make_one(batch, num, loss):
    x, y = (t.flatten(0, 1) for t in batch)
    y = torch.where(y == -100, 2, y) if getattr(loss, "ignore_index", -100) == 2 else y

    def trained(accumulate):
        torch.manual_seed(1)
        net = nn.Linear(3, 5)
        model = everygpu.DataParallel(net, ["cpu"] * num)
        step = everygpu.TrainStep(model, loss, torch.optim.SGD(net.parameters(), 1.0), accumulate=accumulate)
        for part in zip(x.chunk(accumulate), y.chunk(accumulate)):
            step(*part)
        return net.weight.detach()

    whole = trained(1)
    for accumulate in (2, 3, 4):
        torch.testing.assert_close(trained(accumulate), whole)


def test_a_weight_of_other_arguments_is_refused():
    model = everygpu.DataParallel(nn.Linear(2, 1), ["cpu"] * 2, weight=lambda x, y: len(y))
    with pytest.raises(OptionError, match=r"weight must take each input .*here weight\(Tensor\)"):
        model(torch.ones(4, 2))
