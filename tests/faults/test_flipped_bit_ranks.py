"""A bit of one rank's copy of a weight flips."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import everygpu
from everygpu.errors import DivergedError
from everygpu.ranks.group import init_group
from tests.ranks.harness import run_ranks


class RankNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.frozen


class OwnSGD(torch.optim.SGD):
    """Steps on the first device, as what a subclass does is unknown."""


def train_rank() -> list[str]:
    group = init_group()
    x, y = torch.randn(2, 3, generator=torch.Generator().manual_seed(group.rank)), torch.tensor([0, 1])
    texts = []

    def flip(rank: int, p: Tensor, element: int, bit: int = 20) -> None:
        if group.rank == rank:
            p.data.view(-1).view(torch.int32)[element] ^= 1 << bit

    for kind in (OwnSGD, torch.optim.SGD):
        net = RankNet()
        model = everygpu.DataParallel(net, ["cpu"])
        step = everygpu.TrainStep(model, F.cross_entropy, kind(net.parameters(), lr=0.1), check_every=2)
        for flipped in (net.first.weight, net.frozen):
            step(x, y)
            step(x, y)
            step(x, y)
            flip(1, flipped, 1)
            with pytest.raises(DivergedError) as raised:
                step(x, y)
            texts.append(str(raised.value))
            flip(1, flipped, 1)
    return texts


@pytest.mark.usefixtures("warm_python")
@pytest.mark.slow
def test_ranks_are_compared(tmp_path: Path) -> None:
    results = run_ranks(train_rank, size=3, folder=tmp_path)
    assert results[0] == results[1] == results[2]
    assert len(results[0]) == 4
    for text, name in zip(results[0], ["first.weight", "frozen"] * 2):
        wanted = f"of {name} in rank 1, replica 0 (cpu) than in rank 0, replica 0 (cpu) and rank 2, replica 0 (cpu). "
        assert wanted in text


def train_pair() -> tuple[str, str]:
    group = init_group()
    device = torch.device("cuda", group.local_rank % torch.cuda.device_count())
    net = RankNet().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = everygpu.TrainStep(everygpu.DataParallel(net, [device]), F.cross_entropy, optimizer, check_every=2)
    x, y = torch.randn(2, 3, generator=torch.Generator().manual_seed(group.rank)), torch.tensor([0, 1])
    for _ in range(9):
        step(x.to(device), y.to(device))
    engine = step.stats().engine
    if group.rank == 1:
        net.first.weight.data.view(torch.int32)[1, 2] ^= 1 << 20
    try:
        step(x.to(device), y.to(device))
    except DivergedError as error:
        return engine, str(error)
    return engine, ""


@pytest.mark.gpu
def test_ranks_with_a_gpu_each_are_compared(tmp_path: Path, nccl_ranks: None) -> None:
    (engine, first), (_, second) = run_ranks(train_pair, size=2, folder=tmp_path)
    assert engine == "capture"
    assert first == second
    second_gpu = 1 % torch.cuda.device_count()
    assert f"of first.weight in rank 1, replica 0 (cuda:{second_gpu}) than in rank 0, replica 0 (cuda:0). " in first
