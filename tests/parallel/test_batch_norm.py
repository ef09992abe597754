"""Batch normalisation over all replicas is that of one device on the whole batch."""

import copy
import importlib
import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import everygpu
from everygpu.errors import CallError, ModuleError, ReplicaError
from tests.source import say_again

pytestmark = pytest.mark.usefixtures("in_threads")

MODULE = importlib.import_module("everygpu.parallel.data_parallel")
"""Not the function of that name, which the package has."""

Devices = Callable[[int], list[torch.device]]


def convolutional(*, momentum: float | None = 0.1, affine: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6, momentum=momentum, affine=affine),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3),
        nn.BatchNorm2d(4, momentum=momentum, track_running_stats=affine),
        nn.Flatten(),
        nn.BatchNorm1d(16),
        nn.Linear(16, 3),
    ).double()


def pair(devices: list[torch.device], **options: float | None) -> tuple[nn.Module, nn.Module, everygpu.DataParallel]:
    plain = convolutional(**options).to(devices[0])  # type: ignore[arg-type]
    ours = everygpu.SyncBatchNorm.convert(copy.deepcopy(plain))
    return plain, ours, everygpu.DataParallel(ours, devices)


def images(rows: int, device: torch.device) -> Tensor:
    return torch.randn(rows, 3, 6, 6, generator=torch.Generator().manual_seed(rows)).double().to(device)


def assert_same(ours: nn.Module, plain: nn.Module) -> None:
    for (name, a), b in zip(ours.state_dict().items(), plain.state_dict().values()):
        exact = a.dtype is torch.float64
        torch.testing.assert_close(a, b, rtol=1e-10 if exact else 1e-5, atol=1e-12 if exact else 1e-7, msg=name)


def both_ways(model: nn.Module, plain: nn.Module, use: Callable[[nn.Module], list[Tensor]]) -> None:
    """Compare what a use returns of both, and their gradients."""
    found = []
    for net in (model, plain):
        net.zero_grad()
        found.append([*use(net), *(p.grad for p in net.parameters())])
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize(("momentum", "affine"), [(0.1, True), (None, False)])
def test_equals_one_device_on_the_whole_batch(devices: Devices, momentum: float | None, affine: bool) -> None:
    for rows, count in ((2, 1), (2, 2), (7, 3), (3, 5), (20, 6)):
        used = devices(count)
        plain, ours, model = pair(used, momentum=momentum, affine=affine)

        def use(net: nn.Module, rows: int = rows, device: torch.device = used[0]) -> list[Tensor]:
            x = images(rows, device).requires_grad_()
            out = net(x)
            out.square().mean().backward()
            return [everygpu.parallel.gather(out) if isinstance(net, everygpu.DataParallel) else out, x.grad]

        for _ in range(2):
            both_ways(model, plain, use)
        assert_same(ours, plain)
        for net in (plain, model):
            net.eval()
        both_ways(model, plain, use)


@pytest.mark.parametrize("buffers", ["first", "mean"])
def test_statistics_are_kept_where_the_first_device_has_few_rows(devices: Devices, buffers: str) -> None:
    used = devices(3)
    plain, ours, _ = pair(used)
    model = everygpu.DataParallel(ours, used, split=[0.01, 1, 2][: len(used)], buffers=buffers)
    for rows in (7, 6):
        torch.testing.assert_close(everygpu.parallel.gather(model(images(rows, used[0]))), plain(images(rows, used[0])))
    assert_same(ours, plain)


def test_second_derivatives_are_refused(devices: Devices) -> None:
    used = devices(2)
    _, _, model = pair(used)
    x = images(5, used[0]).requires_grad_()
    with pytest.raises(CallError, match=r"model\.module"):
        torch.autograd.grad(everygpu.parallel.gather(model(x)).square().sum(), x, create_graph=True)
    torch.autograd.grad(model.module(x).square().sum(), x, create_graph=True)[0].sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_whole", [False, True])
def test_half_precision_keeps_its_dtype(devices: Devices, dtype: torch.dtype, is_whole: bool) -> None:
    """Of inputs alone, or of the layer as well."""
    used = devices(2)
    layer = everygpu.SyncBatchNorm(4).to(used[0], dtype if is_whole else torch.float32)
    plain = nn.BatchNorm1d(4).to(used[0])
    x = torch.randn(10, 4, device=used[0]) * 3 + 1
    out = everygpu.parallel.gather(everygpu.DataParallel(layer, used)(x.to(dtype).requires_grad_()))
    assert out.dtype is dtype
    torch.testing.assert_close(out.float(), plain(x), rtol=0.02, atol=0.02)
    out.float().square().sum().backward()
    assert layer.weight.grad.dtype is layer.weight.dtype
    torch.testing.assert_close(layer.running_var.float(), plain.running_var, rtol=0.01, atol=0.01)


def test_under_a_training_step(devices: Devices) -> None:
    used = devices(3)
    plain, ours, model = pair(used)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (ours, plain)]
    step = everygpu.TrainStep(model, F.cross_entropy, optimizers[0])
    for rows in (7, 9, 4, 8):
        x, y = images(rows, used[0]), torch.arange(rows, device=used[0]) % 3
        got = step(x, y)
        optimizers[1].zero_grad()
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        optimizers[1].step()
        torch.testing.assert_close(got, loss.detach())
    for (name, a), b in zip(ours.state_dict().items(), plain.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8, msg=name)


class Checkpointed(nn.Module):
    """A normalisation in a region that is run again in backward, or beside one."""

    def __init__(self, *, reentrant: bool = False, is_within: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.reentrant, self.is_within = reentrant, is_within

    def block(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return (self.norm(x) if self.is_within else x).sin()

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return (x if self.is_within else self.norm(x)).flatten(1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_with_this_layer_is_refused(devices: Devices, reentrant: bool) -> None:
    used = devices(2)
    ours = everygpu.SyncBatchNorm.convert(Checkpointed(reentrant=reentrant).double().to(used[0]))
    for _ in range(2):
        out = everygpu.DataParallel(ours, used)(images(6, used[0]).requires_grad_())
        with pytest.raises(CallError, match="Leave this layer out"):
            out.sum().backward()
    # On one device it is an ordinary layer: a copy knows of no other replicas.
    alone = copy.deepcopy(ours)
    everygpu.DataParallel(alone, used[:1])(images(6, used[0]).requires_grad_()).sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_beside_this_layer(devices: Devices, reentrant: bool) -> None:
    used = devices(3)
    plain = Checkpointed(reentrant=reentrant, is_within=False).double().to(used[0])
    ours = everygpu.SyncBatchNorm.convert(copy.deepcopy(plain))

    def use(net: nn.Module) -> list[Tensor]:
        xs = [images(7 + k, used[0]).requires_grad_() for k in range(2)]
        sum(net(x).square().mean() for x in xs).backward()
        return [x.grad for x in xs]

    for _ in range(2):
        both_ways(everygpu.DataParallel(ours, used), plain, use)
    assert_same(ours, plain)


def test_saved_tensor_hooks_of_others(devices: Devices) -> None:
    """A hook that closes over a variable with the name that torch's checkpoints have for theirs is no checkpoint."""
    used = devices(2)
    plain, ours, model = pair(used)
    frame: list[int] = []

    def pack(x: Tensor) -> Tensor:
        frame.append(x.numel())
        return x

    def use(net: nn.Module) -> list[Tensor]:
        x = images(6, used[0]).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autograd.graph.save_on_cpu():
            loss = net(x).square().mean()
        loss.backward()
        return [x.grad]

    both_ways(model, plain, use)
    assert_same(ours, plain)


class Chosen(nn.Module):
    """Normalises the rows that are chosen: a share may have none."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        return x.index_put((chosen,), self.norm(x[chosen]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_shares_without_rows_count_nothing(devices: Devices, dtype: torch.dtype, momentum: float | None) -> None:
    used = devices(3)
    plain = Chosen(nn.BatchNorm1d(4, momentum=momentum)).to(used[0], dtype)
    ours = everygpu.SyncBatchNorm.convert(copy.deepcopy(plain))
    model = everygpu.DataParallel(ours, used)
    draw = torch.Generator().manual_seed(0)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 2e-2)
    for counts in [(3, 0, 2), (0, 0, 0), (0, 4, 0), (1, 1, 1)]:
        x = torch.randn(12, 4, generator=draw, dtype=torch.float64)
        x[:, 0] = -x[:, 0].abs()
        for i, num in enumerate(counts):
            x[4 * i : 4 * i + num, 0] *= -1
        x = x.to(used[0], dtype)
        found = []
        for net in (model, plain):
            net.zero_grad()
            y = x.detach().requires_grad_()
            out = net(y)
            out.float().square().mean().backward()
            found.append(
                [everygpu.parallel.gather(out) if net is model else out, y.grad, *(p.grad for p in net.parameters())]
            )
        torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)
        assert not any(value.isnan().any() for value in ours.state_dict().values())
        torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_empty_batch_leaves_statistics_alone_as_torch_does(devices: Devices, dtype: torch.dtype) -> None:
    plain = nn.BatchNorm1d(4).to(devices(1)[0], dtype)
    ours = everygpu.SyncBatchNorm.convert(copy.deepcopy(plain))
    for net in (plain, everygpu.DataParallel(ours, devices(2))):
        net(torch.zeros(0, 4, device=devices(1)[0], dtype=dtype))
    assert_same(ours, plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_whole_model(devices: Devices, reentrant: bool) -> None:
    used = devices(2)
    plain, _, model = pair(used)

    def use(net: nn.Module) -> list[Tensor]:
        x = images(6, used[0]).requires_grad_()
        checkpoint(net, x, use_reentrant=reentrant).square().mean().backward()
        return [x.grad, *net.buffers()]

    both_ways(model, plain, use)


def test_convert_keeps_parameters_buffers_and_flags() -> None:
    net = nn.ModuleDict(
        {
            "a": nn.BatchNorm3d(3, eps=0.1, momentum=0.3, affine=False).eval(),
            "b": nn.Sequential(nn.SyncBatchNorm(5), nn.InstanceNorm1d(5), nn.Dropout()),
            "c": nn.BatchNorm1d(2, track_running_stats=False),
        }
    )
    before = dict(net.state_dict(keep_vars=True))
    assert everygpu.SyncBatchNorm.convert_sync_batchnorm(net) is net
    after = dict(net.state_dict(keep_vars=True))
    assert before.keys() == after.keys()
    assert all(before[k] is after[k] for k in before)
    assert [type(m).__name__ for m in (net["a"], net["b"][0], net["b"][1], net["c"])] == [
        "SyncBatchNorm",
        "SyncBatchNorm",
        "InstanceNorm1d",
        "SyncBatchNorm",
    ]
    assert (net["a"].eps, net["a"].momentum, net["a"].training) == (0.1, 0.3, False)
    again = everygpu.SyncBatchNorm.convert(net["a"])
    assert again is net["a"]


def test_a_single_layer_alone_is_an_ordinary_one() -> None:
    plain = nn.BatchNorm1d(3)
    layer = everygpu.SyncBatchNorm.convert(copy.deepcopy(plain))
    assert isinstance(layer, everygpu.SyncBatchNorm)
    x = torch.randn(5, 3)
    torch.testing.assert_close(layer(x), plain(x))
    assert_same(layer, plain)
    assert_same(copy.deepcopy(layer), layer)


def test_layers_that_are_not_known_are_refused() -> None:
    class NormAct(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    for layer, words in (
        (nn.LazyBatchNorm1d(), "LazyBatchNorm1d doesn't know its channels"),
        (NormAct(3), "NormAct has a forward of its own"),
    ):
        with pytest.raises(ModuleError, match=words):
            everygpu.SyncBatchNorm.convert(nn.Sequential(layer))
    other = nn.Sequential(nn.LazyInstanceNorm1d())  # which stays as it is
    assert everygpu.SyncBatchNorm.convert(other) is other


def test_a_single_value_per_channel_is_refused_as_by_torch(devices: Devices) -> None:
    model = everygpu.DataParallel(everygpu.SyncBatchNorm(3).to(devices(1)[0]), devices(2))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.randn(1, 3, device=devices(1)[0]))
    # One row for each replica is enough: together they are two.
    assert everygpu.parallel.gather(model(torch.randn(2, 3, device=devices(1)[0]))).shape == (2, 3)


class Fickle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = everygpu.SyncBatchNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if x[0, 0] > 0 else x


class Crossing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = everygpu.SyncBatchNorm(2), everygpu.SyncBatchNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if x[0, 0] > 0 else self.a(self.b(x))


@pytest.mark.parametrize(
    ("kind", "says"),
    [(Fickle, "which replica 1 ended without reaching"), (Crossing, "replicas came to different layers")],
)
def test_replicas_that_take_different_ways_are_an_error(devices: Devices, kind: type[nn.Module], says: str) -> None:
    used = devices(2)
    model = everygpu.DataParallel(kind().to(used[0]), used)
    x = torch.ones(4, 2, device=used[0])
    x[2:] = -1
    with pytest.raises(ReplicaError, match=says):
        model(x)
    assert everygpu.parallel.gather(model(torch.ones(4, 2, device=used[0]))).shape == (4, 2)


def test_compiled_replicas_fall_back_to_threads(caplog: pytest.LogCaptureFixture) -> None:
    plain, ours, _ = pair([torch.device("cpu")])
    model = everygpu.DataParallel(ours, ["cpu"] * 2, engine="compile")
    with caplog.at_level(logging.WARNING, "everygpu"):
        out = everygpu.parallel.gather(model(images(6, torch.device("cpu"))))
    torch.testing.assert_close(out, plain(images(6, torch.device("cpu"))))
    assert "SyncBatchNorm" in caplog.text


def test_statistics_of_shares_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    say_again(MODULE)
    caplog.set_level(logging.INFO, logger="everygpu")
    everygpu.DataParallel(convolutional(), ["cpu"])
    everygpu.DataParallel(convolutional().eval(), ["cpu"] * 2)
    everygpu.DataParallel(everygpu.SyncBatchNorm.convert(convolutional()), ["cpu"] * 2)
    assert caplog.records == []
    for _ in range(2):
        everygpu.DataParallel(convolutional(), ["cpu"] * 2)
    (record,) = caplog.records
    assert "SyncBatchNorm.convert(module)" in record.message
    say_again(MODULE)
