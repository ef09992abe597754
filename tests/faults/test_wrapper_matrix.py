"""Saved from any wrapper on any number of replicas, loaded into any other; every cell bit-equal."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import everygpu
from tests.checkpoint.models import Net, same_state, snapshot

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

CELLS = [(wrapper, n) for n in (1, 3) for wrapper in ("bare", "wrapped", "compiled", "compiled inside", "ddp")]
NAMES = [f"{wrapper} on {n}" for wrapper, n in CELLS]


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    place = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(wrapper: str, num_replicas: int, net: Net) -> nn.Module:
    """Wrap a model as a user would; bare and DDP models have as many copies of the batch instead of replicas."""
    if wrapper == "bare":
        return net
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if wrapper == "compiled inside":
        return everygpu.DataParallel(torch.compile(net, backend="eager"), ["cpu"] * num_replicas)
    parallel = everygpu.DataParallel(net, ["cpu"] * num_replicas)
    return torch.compile(parallel, backend="eager") if wrapper == "compiled" else parallel  # type: ignore[return-value]


def train(net: Net) -> torch.optim.Optimizer:
    """Two steps, so that the optimizer, BatchNorm and tied weights have a state."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(("wrapper", "num_replicas"), CELLS, ids=[f"from {name}" for name in NAMES])
def test_every_cell_is_bit_equal(tmp_path: Path, wrapper: str, num_replicas: int) -> None:
    net = Net(seed=1)
    optimizer = train(net)
    model = build(wrapper, num_replicas, net)
    path = everygpu.save(tmp_path / "ckpt", model=model, optimizer=optimizer)
    for target_wrapper, n in CELLS:
        target = Net(seed=2)
        wrapped = build(target_wrapper, n, target)
        own = torch.optim.AdamW(target.parameters())
        everygpu.load(path, model=wrapped, optimizer=own)
        assert same_state(snapshot(target, own), snapshot(net, optimizer)), f"{target_wrapper} on {n} differs"
        assert target.head.weight is target.embed.weight
    alone = Net(seed=3).cpu()
    everygpu.load(path, model=alone)
    assert same_state(snapshot(alone), snapshot(net))
