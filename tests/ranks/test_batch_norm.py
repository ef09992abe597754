"""SyncBatchNorm normalizes over the batches of all ranks."""

import copy

import pytest
import torch
from torch import nn

import everygpu
from everygpu.errors import CallError
from everygpu.ranks.group import init_group
from tests.ranks.harness import run_checks

pytestmark = pytest.mark.usefixtures("warm_python")


def train(sizes, num_devices):
    group = init_group()
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 1)).double()
    model = everygpu.DataParallel(
        everygpu.SyncBatchNorm.convert(copy.deepcopy(bare)), ["cpu"] * num_devices, split="even"
    )
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (bare, model)]
    for step in range(3):
        x = torch.randn(sum(sizes), 2, 2, 2, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        begin = sum(sizes[: group.rank])
        mine = x[begin : begin + sizes[group.rank]]
        for net, rows, optimizer in zip((bare, model), (x, mine), optimizers):
            optimizer.zero_grad()
            net(rows).square().mean().backward()
            optimizer.step()
    assert "_ranks" not in vars(model.module)
    for name, value in bare.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, msg=name)


def differentiate_again():
    net = nn.Sequential(nn.Linear(2, 3), everygpu.SyncBatchNorm(3))
    model = everygpu.DataParallel(net, ["cpu"])
    (g,) = torch.autograd.grad(net(torch.randn(3, 2)).square().sum(), net[0].weight, create_graph=True)
    g.sum().backward()  # by itself, over its own rows
    x = torch.randn(3, 2, requires_grad=True)
    with pytest.raises(CallError, match="differentiated again"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


class Labelled(nn.Module):
    """Returns its loss, the mean over labels that aren't -100."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.layers(x), labels)


def share_without_labels(rank):
    """The whole of a batch, and what a rank has of it: the first rank has no label that counts."""
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.tensor([-100, -100, -100, 0, 1, 1])
    return (x, y), (x[3 * rank : 3 * rank + 3], y[3 * rank : 3 * rank + 3])


def train_without_labels():
    bare, whole = Labelled(), share_without_labels(0)[0]
    net = everygpu.SyncBatchNorm.convert(copy.deepcopy(bare))
    step = everygpu.TrainStep(everygpu.DataParallel(net, ["cpu"]), None, torch.optim.SGD(net.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    x, labels = share_without_labels(init_group().rank)[1]
    for _ in range(3):
        optimizer.zero_grad()
        bare(*whole).backward()
        optimizer.step()
        step(x, labels=labels)
    for name, value in bare.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, msg=name)


def loop_without_labels():
    bare, whole = Labelled(), share_without_labels(0)[0]
    net = everygpu.SyncBatchNorm.convert(copy.deepcopy(bare))
    x, labels = share_without_labels(init_group().rank)[1]
    everygpu.DataParallel(net, ["cpu"])(x, labels=labels).mean().backward()
    bare(*whole).backward()
    for p, q in zip(net.parameters(), bare.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


def train_with_every_split():
    for sizes, num_devices in (([3, 1], 1), ([4, 0], 1), ([3, 4], 2)):
        train(sizes, num_devices)


def test_training_equals_one_device_and_second_derivatives_are_refused(tmp_path):
    checks = train_with_every_split, differentiate_again, train_without_labels, loop_without_labels
    run_checks(*checks, size=2, folder=tmp_path)
