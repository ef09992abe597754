"""How replicas follow their module."""

import copy
import functools
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import everygpu
from tests.parallel.oracle import TOLERANCE, Mlp, assert_same, assert_same_grads, pair, rows, run, score

pytestmark = pytest.mark.usefixtures("in_threads")


def test_rows_of_a_table_that_forward_shortens(devices):
    """The replicas shorten the rows that they look up; those of the first replica stay so."""
    devs = devices(2)
    model, bare = pair(lambda: nn.Embedding(8, 3, max_norm=0.1), devs)
    index = torch.arange(8, device=devs[0])
    torch.testing.assert_close(model(index), bare(index), **TOLERANCE)
    first = len(index.chunk(len(devs))[0])
    torch.testing.assert_close(model.module.weight[:first], bare.weight[:first], **TOLERANCE)
    assert (model.module.weight[first:].norm(dim=1) > 0.1).all()


class Seeing(Mlp):
    """Calls a function with each replica that runs."""

    def __init__(self, see) -> None:
        super().__init__()
        self.see = see

    def forward(self, x):
        self.see(self)
        return super().forward(x)


def test_replicas_persist(devices):
    devs = devices(3)
    seen = []
    model, _ = pair(lambda: Seeing(seen.append), devs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    for _ in range(3):
        model(rows(6, 3, device=devs[0])).sum().backward()
        optimizer.step()
        calls.append({id(m): m.first.weight.data_ptr() for m in seen})
    assert list(calls[2]) == list(calls[0]), "the same modules"
    assert len(calls[0]) == len(set(calls[0].values())) == len(devs), "no two replicas share memory"


def clamp_data(m):
    for p in m.parameters():
        p.data.clamp_(-0.1, 0.1)


def replace_data(m):
    for p in m.parameters():
        p.data = p.data * 2 + 1


def swap_data(m):
    kept = m.first.weight.data.clone()
    m.first.weight.data.copy_(kept.flip(0))


def write_without_grad(m):
    with torch.no_grad():
        m.second.weight.mul_(3)
        m.first.bias[1] = 7


def assign_parameter(m):
    m.first.weight = nn.Parameter(m.first.weight.detach() + 1)


def assign_parameter_of_another_shape(m):
    m.second = nn.Linear(4, 5).to(m.first.weight)
    with torch.no_grad():
        m.second.weight.fill_(0.5)
        m.second.bias.fill_(0.25)


def drop_parameter(m):
    m.first.bias = None


def load(m):
    m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()})


def load_assigning(m):
    m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True)


def freeze(m):
    m.first.requires_grad_(False)


def tie(m):
    m.second = nn.Linear(4, 3).to(m.first.weight)
    m.second.weight = nn.Parameter(m.first.weight.detach().t().clone().contiguous())
    m.second.bias = nn.Parameter(m.first.bias.detach()[:3].clone())
    m.first.bias = nn.Parameter(torch.zeros_like(m.first.bias))
    m.first = nn.Sequential(m.first, m.second, m.first)


@pytest.mark.parametrize(
    "change",
    [
        clamp_data,
        replace_data,
        swap_data,
        write_without_grad,
        assign_parameter,
        assign_parameter_of_another_shape,
        drop_parameter,
        load,
        load_assigning,
        freeze,
        tie,
    ],
)
def test_every_forward_sees_the_present_parameters(devices, change):
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    x = rows(7, 3, device=devs[0])
    before = assert_same(model, bare, x)
    change(model.module)
    change(bare)
    for m in (model, bare):
        m.zero_grad()
    after = assert_same(model, bare, x)
    if change is not freeze:
        assert not torch.equal(before.output, after.output) or before.output.shape != after.output.shape


@pytest.mark.parametrize(
    "kind",
    [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
        functools.partial(torch.optim.AdamW, lr=0.1, foreach=True),
        functools.partial(torch.optim.Adam, lr=0.1, fused=True),
    ],
    ids=["sgd", "foreach", "fused"],
)
def test_training_equals_one_device(devices, kind):
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    optimizers = [kind(m.parameters()) for m in (model, bare)]
    for step in range(6):
        for m, optimizer in zip((model, bare), optimizers):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            score(m(rows(7 - step, 3, device=devs[0], seed=step))).backward()
            optimizer.step()
        torch.testing.assert_close(model.state_dict(), OrderedDict(bare.state_dict()))


def test_buffers_reach_the_replicas(devices):
    devs = devices(3)
    model, bare = pair(lambda: nn.BatchNorm1d(3), devs)
    x = rows(7, 3, device=devs[0])
    for m in (model, bare):
        m.eval()
        run(m, x)
        inner = getattr(m, "module", m)
        inner.running_mean.data.add_(2)
        inner.running_var = torch.full_like(inner.running_var, 3)
    assert_same(model, bare, x)


@pytest.mark.parametrize("buffers", ["first", "mean"])
def test_batchnorm_statistics_follow_the_rule(devices, buffers):
    devs = devices(3)
    model, bare = pair(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), devs, buffers=buffers)
    for step in range(3):
        x = rows(8, 3, device=devs[0], seed=step)
        shards = x.chunk(len(devs))
        replicas = [copy.deepcopy(bare) for _ in shards]
        expected = torch.cat([replica(shard) for replica, shard in zip(replicas, shards)])
        torch.testing.assert_close(model(x), expected)
        norms = [replica[1] for replica in replicas] if buffers == "mean" else [replicas[0][1]]
        total = sum(len(shard) for _, shard in zip(norms, shards))
        for name in ("running_mean", "running_var"):
            mean = sum(getattr(norm, name) * (len(shard) / total) for norm, shard in zip(norms, shards))
            torch.testing.assert_close(getattr(model.module[1], name), mean)
        assert model.module[1].num_batches_tracked == step + 1
        bare.load_state_dict(model.state_dict())
    model.eval()
    bare.eval()
    assert_same(model, bare, x)


def old_spectral_norm():
    return nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


def new_spectral_norm():
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


def old_weight_norm():
    return nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


def new_weight_norm():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


def orthogonal():
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


# torch announces the end of the old weight_norm; people's models still have it.
old_weight_norm_warns = pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")


def train_two_forwards_per_backward(model, bare, devs):
    """Train as GANs do: real and fake rows through one discriminator, then one backward."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, bare)]
    for step in range(4):
        outputs = []
        for m, optimizer in zip((model, bare), optimizers):
            optimizer.zero_grad()
            real = m(rows(7, 3, device=devs[0], seed=step))
            fake = m(rows(5, 3, device=devs[0], seed=100 + step))
            outputs.append((real, fake))
            (score(real) - score(fake)).backward()
        torch.testing.assert_close(*outputs)
        assert_same_grads(model, bare)
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(dict(model.module.state_dict()), dict(bare.state_dict()))


@pytest.mark.parametrize("make", [old_spectral_norm, new_spectral_norm])
def test_spectral_norm_one_forward(devices, make):
    devs = devices(3)
    model, bare = pair(make, devs)
    for step in range(3):
        assert_same(model, bare, rows(7, 3, device=devs[0], seed=step))


@pytest.mark.parametrize("make", [old_spectral_norm, new_spectral_norm])
def test_spectral_norm_two_forwards(devices, make):
    devs = devices(3)
    train_two_forwards_per_backward(*pair(make, devs), devs)


@old_weight_norm_warns
@pytest.mark.parametrize("make", [old_weight_norm, new_weight_norm, orthogonal])
def test_weight_norm_and_parametrizations(devices, make):
    devs = devices(3)
    train_two_forwards_per_backward(*pair(make, devs), devs)


class Remembering(nn.Module):
    """Keeps attributes of several kinds from forward to forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)
        self.calls = 0
        self.log = []
        self.stats = {"sizes": [], "last": None}
        self.hidden = None

    def forward(self, x):
        self.calls += 1
        self.log.append(x.shape[0])
        self.stats["sizes"].append(x.shape[0])
        self.stats["last"] = x.detach()
        self.lin.seen = x.shape[0]
        h = self.lin(x)
        carried = 0 if self.hidden is None else self.hidden.mean()
        self.hidden = h.detach()
        self.fresh = self.calls
        return h + carried + self.calls


def test_attributes_set_in_forward_persist(devices):
    devs = devices(3)
    model, bare = pair(Remembering, devs)
    batches = [rows(7, 3, device=devs[0], seed=step) for step in range(4)]
    size = len(batches[0].chunk(len(devs))[0])
    for step, x in enumerate(batches):
        hidden = None if model.module.hidden is None else model.module.hidden.clone()
        out = model(x)
        # All replicas start from what replica 0 left behind.
        expected = bare.lin(x) + (0 if hidden is None else hidden.mean()) + step + 1
        torch.testing.assert_close(out, expected)
    assert model.calls == model.fresh == 4
    assert model.log == model.stats["sizes"] == [size] * 4
    assert model.module.lin.seen == size
    assert torch.equal(model.stats["last"], batches[-1][:size])
    assert model.hidden.shape == (size, 2)


class Trail(nn.Module):
    """Marks itself when it sees a negative row; says whether it was marked before."""

    def __init__(self) -> None:
        super().__init__()
        self.marked = False
        self.notes = []

    def forward(self, x):
        before = self.marked or bool(self.notes) or hasattr(self, "extra")
        if bool((x < 0).any()):
            self.marked = True
            self.notes.append(1)
            self.extra = 1
        return x.new_full((x.shape[0],), float(before))


def test_attributes_set_on_another_replica_do_not_come_back(devices):
    devs = devices(2)
    model = everygpu.DataParallel(Trail(), devs)
    x = torch.ones(4, 1, device=devs[0])
    model(x)
    marking = x.clone()
    marking[-1] = -1
    assert model(marking).tolist() == [0, 0, 0, 0]
    assert (model.marked, model.notes) == (False, [])
    assert model(x).tolist() == [0, 0, 0, 0], "the last replica is a copy of the module as it is now"


class Counting(nn.Module):
    """Counts its calls in every plain way, and scales by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)
        self.calls, self.log, self.seen, self.stats = 0, [], {0}, {"calls": 0}
        self.kept = {"last": torch.zeros(1), "own": self.lin}

    def forward(self, x):
        self.calls += 1
        self.log.append(self.calls)
        self.seen.add(self.calls)
        self.stats["calls"] += 1
        self.fresh = f"call {self.calls}"
        self.kept["last"] = x.detach()
        return self.lin(x) * len(self.log) / (self.calls + self.stats["calls"])


@pytest.mark.parametrize("split", [[1.0, 3.0, 1.0], [0.01, 1.0, 1.0]])
def test_attributes_of_the_first_replica(devices, split):
    """A last batch may have few rows, of which the first device gets one: its counters count."""
    devs = devices(3)
    model, bare = pair(Counting, devs, split=split[: len(devs)])
    log = model.log
    for num_rows in (1, 6, 1, 1, 2):
        assert_same(model, bare, rows(num_rows, 3, device=devs[0]))
        for name in ("calls", "log", "seen", "stats", "fresh"):
            assert getattr(model.module, name) == getattr(bare, name), name
    assert model.module.log is log
    assert model.module.kept["own"] is model.module.lin, "what belongs to a replica stays there"


def test_a_new_attribute_reaches_the_replicas(devices):
    devs = devices(3)

    class Scaled(nn.Module):
        scale = 1.0

        def forward(self, x):
            return x * self.scale * getattr(self, "more", {"f": 1.0})["f"]

    model = everygpu.DataParallel(Scaled(), devs)
    x = torch.ones(6, 1, device=devs[0])
    for scale, more in ((1.0, 1.0), (2.0, 3.0), (2.0, 5.0)):
        model.module.scale = scale
        model.module.more = {"f": more}
        assert model(x).flatten().tolist() == [scale * more] * 6
        model.module.more["f"] = 7.0
        assert model(x).flatten().tolist() == [scale * 7] * 6
    del model.module.scale, model.module.more
    assert model(x).flatten().tolist() == [1] * 6


class Recurrent(nn.Module):
    def __init__(self, kind, **options) -> None:
        super().__init__()
        self.rnn = kind(3, 4, num_layers=2, batch_first=True, bidirectional=True, **options)
        self.head = nn.Linear(8, 2)

    def forward(self, x, lengths=None):
        if lengths is None:
            return self.head(self.rnn(x)[0])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.head(out)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_nets_without_a_warning(devices, kind):
    devs = devices(3)
    model, bare = pair(lambda: Recurrent(kind), devs)
    for step in range(3):
        assert_same(model, bare, rows(7, 5, 3, device=devs[0], seed=step).requires_grad_())
    model.eval()
    bare.eval()
    with torch.no_grad():
        x = rows(7, 5, 3, device=devs[0])
        torch.testing.assert_close(model(x), bare(x))
    assert_same(model.train(), bare.train(), x)


def test_recurrent_nets_on_packed_sequences(devices):
    devs = devices(3)
    model, bare = pair(lambda: Recurrent(nn.LSTM), devs)
    lengths = torch.tensor([5, 2, 3, 1, 4, 5, 2], device=devs[0])
    assert_same(model, bare, rows(7, 5, 3, device=devs[0]), lengths)


def test_recurrent_nets_after_a_step(devices):
    devs = devices(2)
    model, bare = pair(lambda: Recurrent(nn.LSTM), devs)
    x = rows(6, 5, 3, device=devs[0])
    for m in (model, bare):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            score(m(x)).backward()
            optimizer.step()
    assert_same(model, bare, x)
