"""What decides over ranks which gradients are averaged, and how much each rank's count."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import everygpu
from everygpu.errors import CallError
from everygpu.ranks.group import init_group
from tests.ranks.harness import run_checks

pytestmark = pytest.mark.usefixtures("warm_python")


def mine(x, sizes):
    """This rank's rows of a batch."""
    return x.split(sizes)[init_group().rank]


def draw(*shape):
    """Draw the same on all ranks: a forward has each rank's own generator go on by itself."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_equal(own, bare):
    for (name, p), q in zip(own.named_parameters(), bare.parameters()):
        torch.testing.assert_close(p.grad, q.grad, msg=lambda text, name=name: f"{name}: {text}")


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x), x * 2


def a_backward_that_reaches_no_parameter_on_one_rank():
    bare = Both()
    model = everygpu.DataParallel(copy.deepcopy(bare), ["cpu"])
    x = draw(4, 4).requires_grad_()
    y, z = model(mine(x, [2, 2]))
    (y.square().mean() + z.mean() if init_group().rank == 0 else z.mean()).backward()
    bare(x[:2])[0].square().mean().mul(0.5).backward()
    assert_equal(model.module, bare)


def a_micro_batch_that_is_given_up():
    bare = nn.Linear(4, 4)
    model = everygpu.DataParallel(copy.deepcopy(bare), ["cpu"])
    x, dropped = draw(12, 4), draw(10, 4)
    with model.no_sync():
        model(mine(dropped, [1, 9])).square().mean().backward()
    model.zero_grad()
    model(mine(x, [6, 6])).square().mean().backward()
    bare(x).square().mean().backward()
    assert_equal(model.module, bare)


class Gated(nn.Module):
    """Backward needs a buffer; another one counts forwards; one layer keeps statistics that it doesn't train by."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("gate", torch.linspace(0, 1, 4))
        self.register_buffer("count", torch.zeros(()))
        self.norm, self.frozen = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x):
        self.frozen.eval()
        self.count.add_(1)
        x = self.frozen(self.inner(x)) * self.gate
        self.norm(x.detach())
        return x.tanh()


def two_forwards_before_a_backward_that_needs_a_buffer():
    bare = Gated()
    for is_held in (False, True):
        bare.zero_grad()
        model = everygpu.DataParallel(copy.deepcopy(bare), ["cpu"])
        x = draw(4, 4)
        with model.no_sync() if is_held else contextlib.nullcontext():
            (model(mine(x, [2, 2])).square().mean() + model(mine(x + 1, [2, 2])).square().mean()).backward()
        if is_held:
            model(mine(x, [2, 2])).mul(0).sum().backward()
        (bare(x).square().mean() + bare(x + 1).square().mean()).backward()
        assert_equal(model.module.inner, bare.inner)


class Tiled(torch.autograd.Function):
    """Goes backward within its own backward, tile by tile, as tiled MLPs do."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        ctx.save_for_backward(x)
        return torch.cat([module(tile) for tile in x.split(1)])

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        found = []
        for tile, g in zip(x.split(1), grad.split(1)):
            tile = tile.detach().requires_grad_()
            with torch.enable_grad():
                torch.autograd.backward(ctx.module(tile), g)
            found.append(tile.grad)
        return None, torch.cat(found)


class WithTiles(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.mlp, self.last = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)
        self.kind = kind

    def forward(self, x):
        x = self.first(x)
        if self.kind == "reentrant":
            x = checkpoint(self.mlp, checkpoint(self.mlp, x, use_reentrant=True), use_reentrant=True)
        else:
            x = Tiled.apply(self.mlp, x)
        return self.last(x)


def backwards_within_a_backward():
    for kind in ("tiles", "reentrant"):
        torch.manual_seed(1)
        bare = WithTiles(kind)
        x, y = draw(5, 4), draw(5, 1)
        model = everygpu.DataParallel(copy.deepcopy(bare), ["cpu"], bucket_cap_mb=1e-4)
        nn.functional.mse_loss(model(mine(x, [3, 2])), mine(y, [3, 2])).backward()
        nn.functional.mse_loss(bare(x), y).backward()
        assert_equal(model.module, bare)
        before = copy.deepcopy(bare)
        for make in (lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)):
            own, bare = copy.deepcopy(before), copy.deepcopy(before)
            optimizer = make(bare.parameters())
            wrapped = everygpu.DataParallel(own, ["cpu"], bucket_cap_mb=1e-4)
            step = everygpu.TrainStep(wrapped, nn.functional.mse_loss, make(own.parameters()))
            for _ in range(2):
                optimizer.zero_grad()
                nn.functional.mse_loss(bare(x), y).backward()
                optimizer.step()
                step(mine(x, [3, 2]), mine(y, [3, 2]))
            for p, q in zip(own.parameters(), bare.parameters()):
                torch.testing.assert_close(p, q)


class CenterLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(3, 4))

    def forward(self, output, y):
        return (output - self.centers[y]).square().mean()


def a_loss_with_parameters_of_its_own():
    torch.manual_seed(init_group().rank)
    net, loss = nn.Linear(4, 4), CenterLoss()
    step = everygpu.TrainStep(
        everygpu.DataParallel(net, ["cpu"]), loss, torch.optim.SGD([*net.parameters(), *loss.parameters()], lr=0.1)
    )
    step(draw(4, 4), torch.tensor([0, 1, 2, 0]))
    assert init_group().broadcast_object(loss.centers.tolist()) == loss.centers.tolist()


def parameters_that_change():
    bare = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
    own = copy.deepcopy(bare)
    model = everygpu.DataParallel(own, ["cpu"])

    def larger(net):
        net[0].weight.data = torch.cat([net[0].weight.data, torch.ones(2, 4)])

    def smaller(net):
        net[1].bias.data = net[1].bias.data[:1]

    for change in (lambda net: None, larger, smaller, nn.Module.float, nn.Module.double):
        change(bare), change(own)
        for _ in range(2):
            bare.zero_grad(), own.zero_grad()
            ids = torch.randint(0, 5, (4,), generator=torch.Generator().manual_seed(1))
            model(mine(ids, [3, 1])).square().mean().backward()
            bare(ids).square().mean().backward()
            assert_equal(own, bare)


def an_accumulated_batch_without_labels():
    bare = nn.Linear(4, 3)
    own = copy.deepcopy(bare)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    step = everygpu.TrainStep(
        everygpu.DataParallel(own, ["cpu"]),
        nn.CrossEntropyLoss(),
        torch.optim.SGD(own.parameters(), lr=0.1),
        accumulate=2,
    )
    x = draw(4, 4)
    for y in (torch.full((4,), -100), torch.tensor([0, 1, -100, 2])):
        step(mine(x, [2, 2]), mine(y, [2, 2]))
    nn.CrossEntropyLoss()(bare(x), y).backward()
    optimizer.step()
    torch.testing.assert_close(own.weight, bare.weight)
    assert step.stats().num_skipped == 0


def samples_of_one_rank_without_no_grad():
    bare = nn.Linear(4, 4)
    model = everygpu.DataParallel(copy.deepcopy(bare), ["cpu"])
    x = draw(4, 4)
    for _ in range(3):
        if init_group().rank == 0:
            model.eval()
            model(x[:1])
            model.train()
        bare.zero_grad(), model.zero_grad()
        model(mine(x, [3, 1])).square().mean().backward()
        bare(x).square().mean().backward()
        assert_equal(model.module, bare)


def backwards_to_some_leaves():
    bare = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = everygpu.DataParallel(copy.deepcopy(bare), ["cpu"])
    x = draw(4, 4)
    model(mine(x, [3, 1])).square().mean().backward(inputs=[model.module[2].weight])
    bare(x).square().mean().backward(inputs=[bare[2].weight])
    assert_equal(model.module, bare)
    assert model.module[0].weight.grad is None
    x = mine(x, [3, 1]).requires_grad_()
    (found,) = torch.autograd.grad(model(x).sum(), x)
    (expected,) = torch.autograd.grad(bare(x).sum(), x)
    torch.testing.assert_close(found, expected)
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, expected)


def a_copy_that_was_never_in_training():
    model = copy.deepcopy(everygpu.DataParallel(nn.Linear(4, 4), ["cpu"])).eval()
    loss = model(torch.ones(1, 4)).sum()
    with pytest.raises(CallError, match=r"Call copy.train\(\)"):
        loss.backward()


def outputs_of_sixteen_bits():
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(1)
        bare = nn.Linear(4, 4).float()
        model = everygpu.DataParallel(copy.deepcopy(bare), ["cpu"])
        x = draw(1025, 4).float()
        with torch.autocast("cpu", dtype):
            model(mine(x, [1024, 1])).float().square().mean().backward()
            bare(x).float().square().mean().backward()
        for p, q in zip(model.module.parameters(), bare.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=2e-3, atol=1e-3)


def in_double():
    torch.set_default_dtype(torch.float64)


def test_rules(tmp_path):
    run_checks(
        in_double,
        outputs_of_sixteen_bits,
        a_backward_that_reaches_no_parameter_on_one_rank,
        a_micro_batch_that_is_given_up,
        two_forwards_before_a_backward_that_needs_a_buffer,
        backwards_within_a_backward,
        a_loss_with_parameters_of_its_own,
        parameters_that_change,
        an_accumulated_batch_without_labels,
        samples_of_one_rank_without_no_grad,
        backwards_to_some_leaves,
        a_copy_that_was_never_in_training,
        size=2,
        folder=tmp_path,
    )
