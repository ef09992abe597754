"""Gradients of a batch that is spread over ranks are those of one device on the whole batch."""

import contextlib
import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import everygpu
from everygpu.errors import CallError, RankError
from everygpu.ranks.group import init_group
from tests.ranks.harness import run_checks, run_ranks

pytestmark = pytest.mark.usefixtures("warm_python")


class Net(nn.Module):
    """Some parameters take no part, one layer is used twice, an embedding has sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4, sparse=True)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2)
        self.sometimes = nn.Linear(4, 4)

    def forward(self, ids, is_used=False):
        x = self.first(self.first(self.table(ids)).tanh())
        return self.second(self.sometimes(x) if is_used else x)

    def encode(self, ids, is_used=False):
        return self.forward(ids, is_used)


class Noted(everygpu.DataParallel):
    """Has a scatter of its own."""

    def scatter(self, inputs, kwargs, device_ids):
        self.num_scattered = vars(self).get("num_scattered", 0) + 1
        return super().scatter(inputs, kwargs, device_ids)


def make():
    torch.manual_seed(0)
    return Net().double()


def rows_of(group, sizes, step):
    """The whole batch, and where this rank's rows are."""
    generator = torch.Generator().manual_seed(step)
    total = sum(sizes)
    ids = torch.randint(0, 7, (total,), generator=generator)
    targets = torch.randn(total, 3, generator=generator, dtype=torch.float64)
    begin = sum(sizes[: group.rank])
    return ids, targets, slice(begin, begin + sizes[group.rank])


def grads_of(module):
    return {n: None if p.grad is None else p.grad.to_dense() for n, p in module.named_parameters()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, g in expected.items():
        assert (g is None) == (found[name] is None), name
        if g is not None:
            torch.testing.assert_close(found[name], g, msg=lambda text, name=name: f"{name}: {text}")


def mean_loss(output, targets):
    return (output - targets).square().mean()


def train(sizes, devices, bucket_cap_mb):
    group = init_group()
    bare = make()
    model = (Noted if len(devices) > 1 else everygpu.DataParallel)(make(), devices, bucket_cap_mb=bucket_cap_mb)
    bare_opt, opt = torch.optim.SGD(bare.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        ids, targets, mine = rows_of(group, sizes, step)
        if step != 2:  # gradients of two batches
            bare_opt.zero_grad(), opt.zero_grad()
        is_used = step == 3
        mean_loss(bare(ids, is_used), targets).backward()
        call = partial(model.call_method, "encode") if step == 4 else model
        mean_loss(call(ids[mine], is_used), targets[mine]).backward()
        assert_same(grads_of(model.module), grads_of(bare))
        bare_opt.step(), opt.step()
    if len(devices) > 1:
        assert model.num_scattered == 5
        with pytest.raises(CallError, match="leave forward to DataParallel"):
            model.replicate(model.module, devices)
    return grads_of(model.module)


CASES = {
    "equal": ([4, 4], ["cpu"], None),
    "uneven": ([3, 1], ["cpu"], 1e-4),
    "empty": ([4, 0], ["cpu"], None),
    "two devices each": ([3, 4], ["cpu"] * 2, 1e-4),
}


def train_each():
    return {name: train(*case) for name, case in CASES.items()}


def test_three_ranks(tmp_path):
    run_ranks(train, [3, 1, 2], ["cpu"], 1e-4, size=3, folder=tmp_path)


def differentiate():
    group = init_group()
    bare, model = make(), everygpu.DataParallel(make(), ["cpu"])
    for net in (bare, model.module):
        net.table.sparse = False
    ids, targets, mine = rows_of(group, [3, 2], 0)
    used = [p for n, p in model.module.named_parameters() if not n.startswith(("unused", "sometimes"))]
    with pytest.raises(CallError, match=r"by torch.autograd.grad can't be averaged"):
        torch.autograd.grad(mean_loss(model(ids[mine]), targets[mine]), used)
    with pytest.raises(CallError, match=r"by torch.autograd.grad can't be averaged"):
        torch.autograd.grad(mean_loss(model(ids[mine]), targets[mine]), used[-1], create_graph=True)
    with pytest.raises(CallError, match="by create_graph=True can't be averaged"):
        mean_loss(model(ids[mine]), targets[mine]).backward(create_graph=True)
    # A penalty on gradients of inputs, as WGAN-GP has.
    for net in (bare, model):
        net.zero_grad()
    for net, rows in ((bare, slice(None)), (model, mine)):
        inner = getattr(net, "module", net)
        inner.table.weight.grad = None
        x = targets[rows].clone().requires_grad_()
        output = net(ids[rows]) * x
        (g,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (g.square().sum(1).mean()).backward()
    assert_same(grads_of(model.module), grads_of(bare))


def weigh_by_tokens():
    group = init_group()
    torch.manual_seed(0)
    bare = nn.Linear(3, 5).double()
    model = everygpu.DataParallel(copy.deepcopy(bare), ["cpu"], weight=lambda x, y: (y >= 0).sum())
    model.module.forward = lambda x, y: nn.functional.linear(x, model.module.weight, model.module.bias)
    x = torch.randn(8, 3, dtype=torch.float64)
    y = torch.tensor([0, -100, -100, -100, 1, 2, 3, 4])
    mine = slice(4 * group.rank, 4 * group.rank + 4)
    loss = nn.CrossEntropyLoss()
    loss(bare(x), y).backward()
    loss(model(x[mine], y[mine]), y[mine]).backward()
    torch.testing.assert_close(model.module.weight.grad, bare.weight.grad)


def replace_layers():
    """Train with a layer that each rank has drawn by itself, after the model was wrapped, or was copied."""
    found = []
    for is_copied, by_step in itertools.product((False, True), repeat=2):
        model = everygpu.DataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), ["cpu"])
        torch.manual_seed(init_group().rank)
        model.module[1] = nn.Linear(4, 2)
        model = copy.deepcopy(model) if is_copied else model
        if is_copied and init_group().rank == 0:  # evaluates it alone
            model.eval()(torch.ones(2, 3))
            model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if by_step:
            everygpu.TrainStep(model, nn.MSELoss(), optimizer)(torch.ones(2, 3), torch.ones(2, 2))
        else:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        found += [p.tolist() for p in model.parameters()]
    assert init_group().gather(found) == [found] * 2


class Product(torch.autograd.Function):
    """Has among its inputs a parameter that it gives no gradient."""

    @staticmethod
    def forward(ctx, x, weight, _):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, None


class WithProduct(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight, self.bias)


def forward_more_often_than_backward():
    """Each is weighed by the rows of its own forward."""
    for num_devices in (1, 2):
        go_forward_more_often(num_devices)


def go_forward_more_often(num_devices):
    group = init_group()
    torch.manual_seed(0)
    bare = WithProduct(3, 2).double()
    model = everygpu.DataParallel(copy.deepcopy(bare), ["cpu"] * num_devices)
    batches = [torch.randn(n, 3, dtype=torch.float64) for n in (8, 3, 1)]
    mine = [[slice(0, 6), slice(6, 8)], [slice(0, 1), slice(1, 3)], [slice(0, 1), slice(1, 1)]]
    for net, rows in ((bare, [slice(None)] * 3), (model, [rows[group.rank] for rows in mine])):
        kept = net(batches[2][rows[2]])  # without no_grad, and without a backward
        first, second = (net(batches[i][rows[i]]).square().mean() for i in (0, 1))
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        assert kept.requires_grad
    torch.testing.assert_close(model.module.weight.grad, bare.weight.grad, rtol=1e-12, atol=1e-12)
    assert model.module.bias.grad is None


def checkpoint_whole():
    group = init_group()
    bare = make()
    model = everygpu.DataParallel(make(), ["cpu"])
    ids, targets, mine = rows_of(group, [3, 2], 0)
    for net, rows in ((bare, slice(None)), (model, mine)):
        output = checkpoint(net, ids[rows], use_reentrant=False) + checkpoint(net, ids[rows] // 2, use_reentrant=False)
        mean_loss(output, targets[rows]).backward()
    assert_same(grads_of(model.module), grads_of(bare))


def backward_again():
    for path in ("0", "0.first"):
        fail_and_go_backward(path)


def fail_and_go_backward(path):
    """Go backward twice, where the first time an error comes before, or after, some of the gradients."""
    group = init_group()
    bare, net = nn.Sequential(make(), nn.Tanh()), nn.Sequential(make(), nn.Tanh())
    ids, targets, mine = rows_of(group, [3, 2], 0)
    errors = iter([ValueError("once")])

    def fail(grad):
        for error in errors:
            raise error

    hook = net.get_submodule(path).register_forward_hook(
        lambda module, args, output: output.register_hook(fail) and None
    )
    mean_loss(bare(ids), targets).backward()
    loss = mean_loss(everygpu.DataParallel(net, ["cpu"])(ids[mine]), targets[mine])
    hook.remove()
    with pytest.raises(ValueError, match="once"):
        loss.backward(retain_graph=True)
    net.zero_grad()
    loss.backward()
    assert_same(grads_of(net), grads_of(bare))


def wrap_again():
    group = init_group()
    bare, net = make(), make()
    ids, targets, mine = rows_of(group, [3, 2], 0)
    model = everygpu.DataParallel(net, ["cpu"])

    def override():
        model.gather = lambda outputs, device: everygpu.parallel.gather(outputs, "cpu")

    def wrap():
        return everygpu.DataParallel(net, ["cpu"])

    renewals = [model.release, override, lambda: setattr(model, "device_ids", ["cpu", "cpu"])]
    for is_before, renew in [*itertools.product([True, False], renewals), (False, wrap)]:
        mean_loss(bare(ids), targets).backward()
        loss = mean_loss(model(ids[mine]), targets[mine])
        renewed = renew() if is_before else None
        loss.backward()
        model = renewed or (None if is_before else renew()) or model
        assert_same(grads_of(net), grads_of(bare))
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p is not m.table.weight], lr=0.1) for m in (bare, net)]
    net.zero_grad(), bare.zero_grad()
    net.table.requires_grad_(False)
    step = everygpu.TrainStep(everygpu.DataParallel(net, ["cpu"]), mean_loss, optimizers[1])
    for _ in range(2):
        optimizers[0].zero_grad()
        mean_loss(bare(ids), targets).backward()
        optimizers[0].step()
        step(ids[mine], targets[mine])
        step.model.release()
    torch.testing.assert_close(net.state_dict(), bare.state_dict(), rtol=1e-6, atol=1e-6)


def accumulate():
    group = init_group()
    bare, model = make(), everygpu.DataParallel(make(), ["cpu"])
    sums = []
    all_reduce = group.all_reduce
    group.all_reduce = lambda x, **options: sums.append(x.numel()) or all_reduce(x, **options)
    for step in range(8):
        ids, targets, mine = rows_of(group, [3, 1], step)
        mean_loss(bare(ids), targets).backward()
        with model.no_sync() if step % 4 < 3 else contextlib.nullcontext():
            mean_loss(model(ids[mine]), targets[mine]).backward()
        if step % 4 == 3:
            assert_same(grads_of(model.module), grads_of(bare))
    del group.all_reduce
    assert len(sums) == 8 + 2, "the weights of each forward, and one bucket an update"


def hook():
    net = make()
    model = everygpu.DataParallel(net, ["cpu"])
    step = everygpu.TrainStep(model, mean_loss, torch.optim.SGD(net.first.parameters(), lr=0.1))
    batch = torch.tensor([1, 2]), torch.zeros(2, 3, dtype=torch.float64)
    for register in (net.first.bias.register_hook, net.first.bias.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        with pytest.raises(
            CallError, match=r"a hook on parameter first.bias would see the gradient of this rank's rows"
        ):
            model(batch[0])
        with pytest.raises(CallError, match=r"first.bias"):
            step(*batch)
        handle.remove()
        model(batch[0])
    model(batch[0]).sum().backward()
    copy.deepcopy(net), model(batch[0])


def start_with_other_weights():
    group = init_group()
    torch.manual_seed(group.rank)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model = everygpu.DataParallel(net, ["cpu"])
    model(torch.randn(4, 2) + group.rank)
    model(torch.randn(4, 2) + group.rank)
    return {k: v.tolist() for k, v in model.state_dict().items() if "running" not in k}


def start_with_other_shapes():
    group = init_group()
    with pytest.raises(RankError, match=r"(?s)weight.*3.*rank 0.*4.*rank 1"):
        everygpu.DataParallel(nn.Linear(2, 3 + group.rank), ["cpu"])


def default_devices():
    model = everygpu.DataParallel(nn.Linear(2, 2))
    assert torch.cuda.is_available() or [str(d) for d in model.replica_devices] == ["cpu"]


def test_two_ranks_are_as_one_device(tmp_path):
    first, second = run_checks(
        train_each,
        differentiate,
        weigh_by_tokens,
        replace_layers,
        forward_more_often_than_backward,
        checkpoint_whole,
        backward_again,
        wrap_again,
        accumulate,
        hook,
        start_with_other_weights,
        start_with_other_shapes,
        default_devices,
        size=2,
        folder=tmp_path,
    )
    for name, grads in first["train_each"].items():
        for key, g in grads.items():
            other = second["train_each"][name][key]
            assert (g is None and other is None) or torch.equal(g, other), f"{name}: the ranks differ in {key}"
    assert first["start_with_other_weights"] == second["start_with_other_weights"]
