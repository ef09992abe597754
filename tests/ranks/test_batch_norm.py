"""SyncBatchNorm normalizes over the batches of all ranks."""

import copy

import pytest
import torch
from torch import nn

import everygpu
from everygpu.errors import CallError
from everygpu.ranks.group import join
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.usefixtures("warm_python")


def train(sizes, num_devices):
    group = join()
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


def everything():
    for sizes, num_devices in (([3, 1], 1), ([4, 0], 1), ([3, 4], 2)):
        train(sizes, num_devices)
    differentiate_again()


def test_training_equals_one_device_and_second_derivatives_are_refused(tmp_path):
    run_ranks(everything, size=2, folder=tmp_path)
