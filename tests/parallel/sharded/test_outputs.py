"""What DataParallel returns: outputs that stay on their devices, in scripts that know nothing of it."""

import copy
import gc
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import everygpu
from everygpu.errors import CallError
from everygpu.parallel import ShardedBatch

LOSSES = {
    "cross_entropy": lambda out, y: F.cross_entropy(out, y),
    "ignoring a class": lambda out, y: F.cross_entropy(out, y, ignore_index=1),
    "weighted": lambda out, y: F.cross_entropy(out, y, weight=torch.arange(1, 5).to(out)),
    "smoothed": lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1),
    "module": lambda out, y: nn.CrossEntropyLoss()(out, y),
    "nll": lambda out, y: F.nll_loss(F.log_softmax(out, 1), y),
    "mse": lambda out, y: F.mse_loss(out, F.one_hot(y, 4).to(out.dtype)),
    "by hand": lambda out, y: ((out - y[:, None]) ** 2).mean(),
    "sum over rows": lambda out, y: out.exp().sum(0).log().mean(),
    "unreduced": lambda out, y: F.cross_entropy(out, y, reduction="none").mean(),
    "bce": lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], (y > 1).to(out.dtype)),
}
SIZES = [(12, 3), (11, 3), (7, 4), (1, 3), (5, 1)]


def build(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double().to(device)


def batch(rows, device):
    torch.manual_seed(1)
    return torch.randn(rows, 5, device=device).double(), torch.randint(0, 4, (rows,), device=device)


def pair(devices, **options):
    bare = build(devices[0])
    return bare, everygpu.DataParallel(copy.deepcopy(bare), devices, **options)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize(("rows", "count"), SIZES)
def test_losses_and_gradients_equal_one_device(devices, loss, rows, count):
    used = devices(count)
    bare, model = pair(used)
    x, y = batch(rows, used[0])
    y[:2] = torch.tensor([0, 2], device=y.device)[: len(y[:2])]  # never all rows of one ignored class
    expected, actual = loss(bare(x), y), loss(model(x), y)
    torch.testing.assert_close(everygpu.parallel.gather(actual, used[0]) if actual.ndim else actual, expected)
    expected.backward()
    actual.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in bare.parameters()])


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_no_device_gets_the_others_outputs(devices, loss):
    used = devices(3)
    _, model = pair(used)
    x, y = batch(12, used[0])
    out = model(x)
    loss(out, y).backward()
    assert isinstance(out, ShardedBatch)
    assert [s.device for s in out.shards] == used
    assert out._joined.tensor is None, "the joined tensor was made"


OTHER_USES = {  # test_use.py has all of them, on the CPU
    "numpy": lambda out: out.detach().cpu().numpy(),
    "mask": lambda out: out[out[:, 0] > 0].detach(),
    "norm": lambda out: torch.linalg.norm(out).detach(),
    "matmul": lambda out: (out @ out.T).detach(),
    "deepcopy": lambda out: copy.deepcopy(out.detach()),
    "in place": lambda out: out.detach().clone().mul_(2).add_(1),
}


def plain(value):
    return everygpu.parallel.gather(value) if isinstance(value, ShardedBatch) else value


@pytest.mark.parametrize("use", OTHER_USES.values(), ids=OTHER_USES.keys())
def test_any_other_use_sees_the_joined_tensor(devices, use):
    used = devices(3)
    bare, model = pair(used)
    x, _ = batch(11, used[0])
    torch.testing.assert_close(plain(use(model(x))), use(bare(x)))


class WithLoss(nn.Module):
    def __init__(self, net, shape):
        super().__init__()
        self.net = net
        self.shape = shape

    def forward(self, x, y):
        return F.cross_entropy(self.net(x), y).reshape(self.shape)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize(("rows", "count"), [*SIZES, (3, 3)])
def test_loss_inside_the_module_is_weighed_by_rows(devices, rows, count, shape):
    used = devices(count)
    bare = WithLoss(build(used[0]), shape)
    model = everygpu.DataParallel(copy.deepcopy(bare), used)
    x, y = batch(rows, used[0])
    expected, losses = bare(x, y).reshape(()), model(x, y)
    torch.testing.assert_close(losses.mean(), expected)
    losses.mean().backward()
    expected.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in bare.parameters()])


def test_rows_of_one_element_are_no_results(devices):
    used = devices(3)
    model = everygpu.DataParallel(nn.Linear(5, 1).double(), used)
    with torch.no_grad():
        assert [model(batch(rows, used[0])[0]).shard_rows for rows in (3, 4, 12)] == [None] * 3


def test_hooks_and_retained_gradients(devices):
    used = devices(3)
    bare, model = pair(used)
    x, _ = batch(11, used[0])
    seen = []
    for net in (bare, model):
        out = net(x)
        out.retain_grad()
        out.register_hook(lambda g: seen.append(plain(g)))
        (out * 2).pow(2).sum().backward()
        seen.append(plain(out.grad))
    torch.testing.assert_close(seen[2:], seen[:2])


class Features(nn.Module):
    """Returns its features beside what it computes from them."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x):
        h = self.body(x).tanh()
        return h, self.head(h)


@pytest.mark.parametrize("engine", ["threads", "auto"])
@pytest.mark.parametrize("uses_both", [False, True])
def test_gradients_that_come_by_another_output_are_retained(devices, engine, uses_both):
    used = devices(3)
    bare = Features().to(used[0])
    model = everygpu.DataParallel(copy.deepcopy(bare), used, engine=engine)
    x, y = batch(11, used[0])
    for _ in range(2):
        grads = []
        for net in (bare, model):
            h, out = net(x)
            h.retain_grad()
            (F.cross_entropy(out, y % 3) + h.pow(2).mean() * uses_both).backward()
            grads.append(plain(h.grad))
        torch.testing.assert_close(grads[1], grads[0])


def test_a_hook_that_gradients_pass_by_is_an_error(devices):
    used = devices(3)
    model = everygpu.DataParallel(Features().to(used[0]), used, engine="threads")
    x, y = batch(11, used[0])
    h, out = model(x)
    seen = []
    h.register_hook(seen.append)
    h.pow(2).mean().backward(retain_graph=True)
    assert len(seen) == 1
    with pytest.raises(CallError, match="retain_grad"):
        F.cross_entropy(out, y % 3).backward()


def test_joined_under_no_grad_and_used_with_grad(devices):
    used = devices(3)
    bare, model = pair(used)
    x, _ = batch(11, used[0])
    for net in (bare, model):
        out = net(x)
        with torch.no_grad():
            out.cpu()
        torch.linalg.norm(out).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in bare.parameters()])


def num_tensors():
    gc.collect()
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


@pytest.mark.parametrize("end", ["no backward", "retain_graph", "create_graph"])
@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        lambda out, y: (out.softmax(1)[:, 0] - 1).square().mean(),
        lambda out, y: out.exp().view(-1).sum(),
    ],
)
def test_no_graph_keeps_itself_alive(devices, loss, end):
    used = devices(2)
    model = everygpu.DataParallel(nn.Linear(4, 3).to(used[0]), used)
    x, y = torch.randn(6, 4, device=used[0]), torch.arange(6, device=used[0]) % 3
    counts = []
    for _ in range(4):
        value = loss(model(x), y)
        if end != "no backward":
            torch.autograd.grad(value, model.module.weight, retain_graph=True, create_graph=end == "create_graph")
        del value
        deadline = time.monotonic() + 60  # a replica's thread lets go of its last call a moment later
        while (count := num_tensors()) > min(counts, default=count) and time.monotonic() < deadline:
            time.sleep(0.01)
        counts.append(count)
    assert max(counts) == counts[0]
