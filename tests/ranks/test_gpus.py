"""Two ranks on GPUs, by NCCL and by gloo; on one card where there is one."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import everygpu
from everygpu.errors import DeviceError
from everygpu.ranks.group import init_group
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.gpu

ROWS = 12
"""On each of two ranks; one has fewer in the last step."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 5)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


class Asking(Net):
    """Asks the device, which no capture can: steps become those of a plain loop on the way."""

    def forward(self, x):
        return super().forward(x) if x.sum().item() > -1e9 else x


def data(num_steps):
    generator = torch.Generator().manual_seed(1)
    for step in range(num_steps):
        rows = [ROWS, ROWS - 5 if step == num_steps - 1 else ROWS]
        x, y = torch.randn(sum(rows), 6, generator=generator), torch.randint(0, 5, (sum(rows),), generator=generator)
        yield x, y, rows


def train_loop(net, model, device, group, num_steps):
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01), torch.optim.AdamW(model.parameters(), lr=0.01)]
    for x, y, rows in data(num_steps):
        mine = slice(sum(rows[: group.rank]), sum(rows[: group.rank + 1]))
        for module, optimizer, part in zip((net, model), optimizers, (slice(None), mine)):
            optimizer.zero_grad()
            F.cross_entropy(module(x[part].to(device)), y[part].to(device)).backward()
            optimizer.step()


def train_step(net, model, device, group, num_steps, **options):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    step = everygpu.TrainStep(model, F.cross_entropy, torch.optim.AdamW(model.parameters(), lr=0.01), **options)
    for x, y, rows in data(num_steps):
        mine = slice(sum(rows[: group.rank]), sum(rows[: group.rank + 1]))
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x.to(device)), y.to(device))
        loss.backward()
        if options.get("clip_norm"):
            nn.utils.clip_grad_norm_(net.parameters(), options["clip_norm"])
        optimizer.step()
        found = step(x[mine].to(device), y[mine].to(device))
        torch.testing.assert_close(found, loss.detach(), rtol=1e-4, atol=1e-5)
    return step.stats().engine


def train(backend, way, options, kind=Net):
    if backend == "gloo":
        dist.init_process_group("gloo")
    group = init_group()
    has_card = backend == "nccl" and torch.cuda.device_count() >= group.size
    device = torch.device("cuda", group.rank if has_card else 0)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    bare = kind().to(device)
    model = everygpu.DataParallel(copy.deepcopy(bare), None if has_card else [device])
    assert model.replica_devices == (device,)
    result = {"loop": train_loop, "step": train_step}[way](bare, model, device, group, 16, **options)
    for name, value in bare.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-3, atol=1e-4, msg=name)
    return result, {k: v.tolist() for k, v in model.state_dict().items()}


@pytest.mark.parametrize(
    ("way", "options", "kind"),
    [
        ("loop", {}, Net),
        ("step", {}, Net),
        ("step", {"clip_norm": 0.3}, Net),
        ("step", {"capture": False}, Net),
        ("step", {"clip_norm": 0.3}, Asking),
    ],
)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_training_equals_one_device(request, tmp_path, backend, way, options, kind):
    if backend == "nccl":
        request.getfixturevalue("nccl_ranks")
    (engine, first), (_, second) = run_ranks(train, backend, way, options, kind, size=2, folder=tmp_path)
    assert first == second
    if kind is Asking:
        assert engine == "threads"
    elif way == "step" and options.get("capture") is not False:
        assert engine in ("capture", "threads")


def share_a_gpu():
    group = init_group()
    with pytest.raises(DeviceError, match="got one on ranks 0 and 1"):
        everygpu.DataParallel(nn.Linear(2, 2), [0])
    return group.uses_nccl


def test_ranks_with_one_gpu_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("EVERYGPU_SHARE_GPU", raising=False)
    assert run_ranks(share_a_gpu, size=2, folder=tmp_path) == [True, True]


def wait_for_nothing():
    group = init_group()
    device = torch.device("cuda", group.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    net = nn.Sequential(nn.Linear(6, 16), everygpu.SyncBatchNorm(16), nn.Linear(16, 5)).to(device)
    model = everygpu.DataParallel(net, [device], engine="threads")
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    x, y = torch.randn(ROWS, 6, device=device), torch.randint(0, 5, (ROWS,), device=device)
    other = Net().to(device)
    del other.unused
    trained = everygpu.DataParallel(other, [device])
    step = everygpu.TrainStep(trained, F.cross_entropy, torch.optim.AdamW(other.parameters(), lr=0.01))

    def train():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        step(x, y)

    for _ in range(12):
        train()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return step.stats().engine


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_waits_for_nothing_in_a_step(tmp_path, nccl_ranks):
    assert run_ranks(wait_for_nothing, size=2, folder=tmp_path) == ["capture"] * 2
