"""``num_replicas`` over ranks: the same parameters as in one process."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import everygpu
from everygpu.errors import CallError, OptionError, RankError
from everygpu.ranks.group import init_group
from tests.ranks.harness import run_checks, run_ranks

pytestmark = pytest.mark.usefixtures("warm_python")


def make() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.LayerNorm(16),
        nn.Dropout(0.2), nn.Linear(16, 3),
    )  # fmt: skip


def train(num_devices: int, num_replicas: int) -> list[Tensor]:
    """Train on this process's part of each batch; return the parameters, and on rank 0 the buffers, which count."""
    group = init_group()
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    everygpu.seed_all(3)
    module = make()
    model = everygpu.DataParallel(module, ["cpu"] * num_devices, num_replicas=num_replicas)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    data = torch.Generator().manual_seed(1)
    for _ in range(12):
        x, y = torch.randn(24, 6, generator=data), torch.randint(3, (24,), generator=data)
        mine = slice(24 * rank // size, 24 * (rank + 1) // size)
        optimizer.zero_grad()
        F.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
        assert torch.rand(1) >= 0  # the loop's own numbers, alike on all ranks
    return [t.detach().clone() for t in (*module.parameters(), *(module.buffers() if rank == 0 else ()))]


def assert_same(expected: list[Tensor], found: list[list[Tensor]]) -> None:
    assert len(found[0]) == len(expected)
    for tensors in found:
        assert all(map(torch.equal, expected, tensors))


@pytest.mark.parametrize(("size", "num_devices"), [(2, 1), (2, 2), (2, 4), (4, 1)])
def test_ranks_have_the_bits_of_one_process(size: int, num_devices: int, tmp_path: Path) -> None:
    assert_same(train(1, 8), run_ranks(train, num_devices, 8, size=size, folder=tmp_path))


def test_one_replica_each(tmp_path: Path) -> None:
    assert_same(train(1, 2), run_ranks(train, 1, 2, size=2, folder=tmp_path))


def check_what_depends_on_ranks() -> None:
    group = init_group()
    assert group is not None

    def wrap(module: nn.Module, num_replicas: int = 4, **options: object) -> everygpu.DataParallel:
        return everygpu.DataParallel(module, ["cpu"] * 2, num_replicas=num_replicas, **options)  # type: ignore[arg-type]

    for module, options in (
        (nn.Linear(2, 2), {"num_replicas": 6}),
        (nn.Linear(2, 2), {"buffers": "mean"}),
        (nn.Linear(2, 2), {"engine": "capture"}),
        (everygpu.SyncBatchNorm(2), {}),
    ):
        with pytest.raises(OptionError, match="num_replicas"):
            wrap(module, **options)
    everygpu.seed_all(0)
    layer = nn.Linear(2, 2)
    model = wrap(layer)
    with pytest.raises(OptionError, match="num_replicas"):
        everygpu.TrainStep(model, nn.MSELoss(), torch.optim.SGD(layer.parameters(), 0.1))
    with pytest.raises(CallError, match="num_replicas"):
        model.no_sync()
    model(torch.ones(4, 2)).mean().backward()
    with pytest.raises(CallError, match="zero_grad"):
        model(torch.ones(4, 2)).mean().backward()


def check_uneven_batches() -> None:
    group = init_group()
    assert group is not None
    everygpu.seed_all(0)
    model = everygpu.DataParallel(nn.Linear(2, 2), ["cpu"] * 2, num_replicas=4)
    output = model(torch.ones(4 + group.rank, 2))
    with pytest.raises(CallError, match="count alike"):
        output.mean().backward()


def check_other_seeds() -> None:
    group = init_group()
    assert group is not None
    everygpu.seed_all(group.rank)
    model = everygpu.DataParallel(nn.Linear(2, 2), ["cpu"] * 2, num_replicas=4)
    with pytest.raises(RankError, match="seed"):
        model(torch.ones(4, 2))


def test_what_depends_on_ranks_is_refused(tmp_path: Path) -> None:
    run_checks(check_what_depends_on_ranks, size=2, folder=tmp_path / "a")
    run_checks(check_uneven_batches, size=2, folder=tmp_path / "b")
    run_checks(check_other_seeds, size=2, folder=tmp_path / "c")
