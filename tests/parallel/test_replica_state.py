"""Replicas follow their module: its parameters, buffers and attributes of the moment, however they were changed."""

import copy
import functools
import io
import pickle
from collections import OrderedDict

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import parametrize

import everygpu
from everygpu import comm
from tests.parallel.oracle import Mlp, assert_same, assert_same_grads, pair, rows, score

pytestmark = pytest.mark.usefixtures("in_threads")


class Buffered(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        return super().forward(x + self.shift)


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
    nn.init.constant_(m.second.weight, 0.5)
    nn.init.constant_(m.second.bias, 0.25)


def drop_parameter(m):
    m.first.bias = None


def load(m):
    m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()})


def load_assigning(m):
    m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True)


def tie(m):
    m.second = nn.Linear(4, 3).to(m.first.weight)
    m.second.weight = nn.Parameter(m.first.weight.detach().t().clone().contiguous())
    m.second.bias = nn.Parameter(m.first.bias.detach()[:3].clone())
    m.first.bias = nn.Parameter(torch.zeros_like(m.first.bias))
    m.first = nn.Sequential(m.first, m.second, m.first)


def write_buffer(m):
    m.shift.data.add_(2)


def assign_buffer(m):
    m.shift = torch.full_like(m.shift, 3)


CHANGES = [clamp_data, replace_data, swap_data, write_without_grad, assign_parameter, assign_parameter_of_another_shape,
           drop_parameter, load, load_assigning, tie, write_buffer, assign_buffer]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_every_forward_sees_the_present_values(devs, x, change):
    model, bare = pair(Buffered, devs)
    before = assert_same(model, bare, x)
    for m in (model.module, bare):
        change(m)
    after = assert_same(model, bare, x)
    assert before.output.shape != after.output.shape or not torch.equal(before.output, after.output)


def test_a_weight_may_be_tied_to_another(devs, x):
    """There are as many weights as before, of the same shapes."""

    def make():
        layers = [nn.Linear(3, 3, bias=False) for _ in range(3)]
        layers[1].weight = layers[0].weight
        return nn.Sequential(*layers)

    model, bare = pair(make, devs)
    assert_same(model, bare, x)
    for m in (model.module, bare):
        m[1].weight = m[2].weight
    assert_same(model, bare, x)


def test_dtype_layout_and_what_is_frozen_may_change(devs):
    model, bare = pair(lambda: nn.Conv2d(3, 2, 3), devs)
    x = rows(4, 3, 5, 5, device=devs[0])
    assert_same(model, bare, x)
    for m in (model, bare):
        m.to(memory_format=torch.channels_last)
        m.bias.requires_grad_(False)
    assert assert_same(model, bare, x).param_grads["bias"] is None
    model.float()
    assert model(x.float()).dtype == torch.float32


@pytest.mark.parametrize(
    "kind",
    [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
        functools.partial(torch.optim.AdamW, lr=0.1, foreach=True),
        functools.partial(torch.optim.Adam, lr=0.1, fused=True),
    ],
    ids=["sgd", "foreach", "fused"],
)
def test_training_equals_one_device(model, bare, devs, kind):
    optimizers = [kind(m.parameters()) for m in (model, bare)]
    for step in range(6):
        for m, optimizer in zip((model, bare), optimizers):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            score(m(rows(7 - step, 3, device=devs[0], seed=step))).backward()
            optimizer.step()
        torch.testing.assert_close(model.state_dict(), OrderedDict(bare.state_dict()))


def test_replicas_persist(devs, x):
    class Seeing(Mlp):
        def forward(self, x):
            seen.append(self)
            return super().forward(x)

    seen, calls = [], []
    model, _ = pair(Seeing, devs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
        calls.append({id(m): m.first.weight.data_ptr() for m in seen})
    assert list(calls[2]) == list(calls[0]), "the same modules"
    assert len(calls[0]) == len(set(calls[0].values())) == len(devs), "no two replicas share memory"


class Introspective(Mlp):
    """Looks at its own parameters in forward, as transformers does."""

    class Special(nn.Parameter):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(1))
        self.first.weight.gain = 2.0
        self.other = self.Special(torch.ones(2))

    def forward(self, x):
        p = next(self.parameters())
        facts = (
            [type(q).__name__ for q in self.parameters()],
            all(isinstance(q, nn.Parameter) for q in self.parameters()),
            isinstance(self.shift, nn.Parameter),
            (p.dtype, p.requires_grad, p is self.first.weight or p is self.other),
            [name for name, _ in self.named_parameters()],
            list(self.state_dict()),
            len(list(self.buffers())),
            sum(q.numel() for q in self.parameters()),
            self.training,
            (p.device == x.device, self.first.weight.gain),
        )
        return super().forward(x.to(p.device, p.dtype)) * self.other + self.shift, facts


def test_parameters_are_real_in_every_replica(devs, x):
    model, bare = pair(Introspective, devs)
    for _ in range(2):
        out, facts = model(x)
        expected, theirs = bare(x)
        torch.testing.assert_close(out, expected)
        assert facts == theirs  # a list of replicas' answers where they differ
        with torch.no_grad():
            assert model(x)[1] == theirs


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Copying(nn.Module):
    """Copies a part of itself in forward, as averaging and meta-learning code does."""

    def __init__(self, copied) -> None:
        super().__init__()
        self.copied = copied
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.rnn = nn.LSTM(3, 2, batch_first=True)

    def forward(self, x):
        twin, rnn, whole = self.copied(self.body), self.copied(self.rnn), self.copied(self)
        assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in twin.parameters())
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(2)
        out = self.body[0](x).sum(1, keepdim=True) + rnn(twin(x)[:, None])[0][:, 0].detach()
        return out + whole.body[0].bias.detach().sum()


@pytest.mark.filterwarnings("ignore:RNN module weights")  # so does a copy of any recurrent net on a GPU
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch_save])
def test_copies_made_inside_a_replicas_forward(devs, x, copied):
    model, bare = (m.eval() for m in pair(lambda: Copying(copied), devs))
    for _ in range(2):
        assert_same(model, bare, x)
        with torch.no_grad():
            torch.testing.assert_close(model(x), bare(x))


class Counting(nn.Module):
    """Counts its calls in every plain way, and scales by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)
        self.calls, self.log, self.seen, self.stats = 0, [], {0}, {"calls": 0, "deep": {"list": []}}
        self.kept = {"last": torch.zeros(1), "own": self.lin}

    def forward(self, x):
        self.calls += 1
        self.lin.seen = self.calls
        self.log.append(self.calls)
        self.seen.add(self.calls)
        self.stats["calls"] += 1
        self.stats["deep"]["list"].append(self.calls)
        self.fresh = f"call {self.calls}"
        self.kept["last"] = x.detach()
        return self.lin(x) * len(self.log) / (self.calls + self.stats["calls"])


@pytest.mark.parametrize("split", ["chunk", [1.0, 3.0, 1.0], [0.01, 1.0, 1.0]])
def test_attributes_of_the_first_replica_stay(devs, split):
    """A last batch may have few rows, of which the first device gets one: its counters count."""
    model, bare = pair(Counting, devs, split=split)
    log = model.log
    for num_rows in (1, 6, 1, 1, 2):
        assert_same(model, bare, rows(num_rows, 3, device=devs[0]))
        for name in ("calls", "log", "seen", "stats", "fresh"):
            assert getattr(model.module, name) == getattr(bare, name), name
    assert model.module.log is log
    assert model.module.lin.seen == 5
    assert model.module.kept["own"] is model.module.lin, "what belongs to a replica stays there"
    assert len(model.module.kept["last"]) < 2 or split == "chunk"


class Carrying(nn.Module):
    """Keeps its last output."""

    hidden = None

    def forward(self, x):
        before = self.hidden.mean() if self.hidden is not None else x.new_zeros(())
        self.hidden = x.detach() + before
        return x + before


def test_all_replicas_start_from_what_the_first_left_behind(devs):
    model, carried = everygpu.DataParallel(Carrying(), devs), 0.0
    for step in range(3):
        x = rows(7, 1, device=devs[0], seed=step)
        torch.testing.assert_close(model(x), x + carried)
        torch.testing.assert_close(model.hidden, x[:3] + carried)
        carried = float(model.hidden.mean())


class Trail(nn.Module):
    """Marks itself when it sees a negative row; says whether it was marked before."""

    def __init__(self) -> None:
        super().__init__()
        self.notes = []

    def forward(self, x):
        before = bool(self.notes) or hasattr(self, "extra")
        if bool((x < 0).any()):
            self.notes.append(1)
            self.extra = 1
        return x.new_full((len(x),), float(before))


def test_what_another_replica_leaves_behind_is_undone(devs):
    model, x = everygpu.DataParallel(Trail(), devs), torch.ones(6, 1, device=devs[0])
    x[-1] = -1
    for _ in range(2):
        assert model(x).tolist() == [0] * 6
        assert (model.notes, hasattr(model.module, "extra")) == ([], False)


def test_a_new_attribute_reaches_the_replicas(devs):
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


class TestFrozen:
    """Within ``frozen`` the module is sent once; outside, and where gradients are recorded, at every forward."""

    @pytest.fixture
    def sent(self, monkeypatch):
        """How often buffers were sent."""
        counts = []
        plain = comm.broadcast
        monkeypatch.setattr(comm, "broadcast", lambda *args: counts.append(1) or plain(*args))
        return counts

    def run(self, model, x):
        return everygpu.parallel.gather(model(x))

    def test_sent_once_then_again_afterwards(self, devs, x, sent):
        model, bare = pair(Buffered, devs)
        with torch.no_grad():
            for _ in range(2):
                model.first.weight.data.mul_(3)
                bare.first.weight.data.mul_(3)
                with model.frozen():
                    torch.testing.assert_close(self.run(model, x), bare(x))
                    with model.frozen():
                        self.run(model, x)
                    before = len(sent)
                    for num_rows in (1, 7, 2, 7):
                        torch.testing.assert_close(self.run(model, x[:num_rows]), bare(x[:num_rows]))
                    assert len(sent) == before > 0
            with pytest.raises(KeyError), model.frozen():
                raise KeyError
            self.run(model, x)
            self.run(model, x)
        assert len(sent) > before + 1

    def test_more_replicas_than_at_first(self, model, bare, x):
        with model.frozen(), torch.no_grad():
            for num_rows in (1, 7):
                torch.testing.assert_close(self.run(model, x[:num_rows]), bare(x[:num_rows]))

    def test_gradients_are_as_ever(self, model, bare, x):
        with model.frozen():
            with torch.no_grad():
                self.run(model, x)
            for m in (model, bare):
                m.first.weight.data.mul_(2)
                for _ in range(2):
                    score(m(x)).backward()
            with torch.no_grad():
                torch.testing.assert_close(self.run(model, x), bare(x))
        assert_same_grads(model, bare)

    def test_a_new_module_within(self, model, bare, x):
        with model.frozen(), torch.no_grad():
            self.run(model, x)
            model.module = bare
            bare.first.weight.data.zero_()
            torch.testing.assert_close(self.run(model, x), bare(x))

    def test_copies_are_not_frozen(self, model, x):
        with model.frozen(), torch.no_grad():
            self.run(model, x)
            copied = copy.deepcopy(model)
            for _ in range(2):
                copied.second.bias.data.add_(1)
                torch.testing.assert_close(self.run(copied, x), copied.module(x))

    def test_one_device(self):
        model = everygpu.DataParallel(Buffered(), ["cpu"])
        with model.frozen():
            assert model(torch.randn(4, 3)).shape == (4, 2)


class Squashed(nn.Module):
    """Normalises a weight by what is around it, and notes where it found it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        parametrize.register_parametrization(self.layer, "weight", nn.Tanh())
        self.seen = []

    def forward(self, x):
        seen.append(self.layer.weight)
        return self.layer(self.layer(x)) + torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)


seen = []


@pytest.mark.parametrize("is_trained", [False, True])
def test_cached_parametrizations_are_each_replicas_own(devices, is_trained):
    used = devices(3)
    plain, model = Squashed().to(used[0]), None
    ours = copy.deepcopy(plain)
    model = everygpu.DataParallel(ours, used)
    x = torch.randn(6, 4, device=used[0])
    for _ in range(3):
        seen.clear()
        with parametrize.cached(), torch.set_grad_enabled(is_trained):
            outputs = [everygpu.parallel.gather(model(x) * model(x)), plain(x) * plain(x)]
            torch.testing.assert_close(*outputs)
            weights = {id(t): t for t in seen}  # each is computed once
            assert len(weights) == 4
            assert len({t.data_ptr() for t in weights.values()}) == len(weights)
            if is_trained:
                for out in outputs:
                    out.square().sum().backward()
        for a, b in zip(ours.parameters(), plain.parameters()):
            if is_trained:
                torch.testing.assert_close(a.grad, b.grad)
            with torch.no_grad():
                for p in (a, b):
                    p.mul_(0.9)


class Replicating(nn.Module):
    """Has torch's way of its own to be replicated: each replica's scale is its own, and is counted."""

    def __init__(self):
        super().__init__()
        self.layer, self.num_copies, self.kept = nn.Linear(4, 2), 0, []

    def _replicate_for_data_parallel(self):
        replica = super()._replicate_for_data_parallel()
        self.num_copies += 1
        replica.number, replica.kept = self.num_copies, []
        return replica

    def forward(self, x):
        self.kept.append(1)
        return self.layer(x) * 0 + getattr(self, "number", 0), len(self.kept)


def test_modules_that_replicate_themselves(devices):
    used = devices(3)
    module = nn.Sequential(Replicating()).to(used[0])
    model = everygpu.DataParallel(module, used)
    for step in range(3):
        out, counts = model(torch.ones(3, 4, device=used[0]))
        assert everygpu.parallel.gather(out)[:, 0].tolist() == [0, 2 * step + 1, 2 * step + 2]
        assert counts == (1 if step == 0 else [step + 1, 1, 1])
    assert everygpu.parallel.gather(out).requires_grad
