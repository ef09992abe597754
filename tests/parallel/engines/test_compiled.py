"""Compiled replicas: the same results, Python included, and a way back to threads."""

import contextlib
import copy
import logging

import pytest
import torch
from torch import nn
from torch._dynamo import lookup_backend
from torch.nn import functional as F

import everygpu
from everygpu.errors import ReplicaError
from everygpu.parallel.engines import compiled

# torch's own modules warn about themselves when its compiler is imported.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("quick_guards"),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def quick(monkeypatch):
    """Trace and guard as ever, without generating code: seconds less for each replica."""
    monkeypatch.setattr(compiled, "InductorBackend", lambda _: lookup_backend("aot_eager"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.scale = 1.0
        self.calls = 0

    def forward(self, x):
        return self.body(x) * self.scale


class Counting(Net):
    """For every value of its counter, the compiler makes a graph."""

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def build(device, make=Net):
    torch.manual_seed(0)
    return make().to(device)


def train(model, x, y, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batch(device, rows=12):
    torch.manual_seed(1)
    return torch.randn(rows, 4, device=device), torch.randint(0, 3, (rows,), device=device)


class TestSameAsThreads:
    @pytest.fixture
    def made(self, monkeypatch):
        """The graphs that are compiled."""
        found = []

        def counting(graph, inputs):
            found.append(graph)
            return lookup_backend("aot_eager")(graph, inputs)

        monkeypatch.setattr(compiled, "InductorBackend", lambda _: counting)
        return found

    @pytest.mark.parametrize("by_user", [True, False])
    def test_training_with_one_compilation_for_each_device(self, devices, made, by_user):
        used = devices(3)
        x, y = batch(used[0])
        net = build(used[0])
        eager = everygpu.DataParallel(copy.deepcopy(net), used, engine="threads")
        inner = torch.compile(net, backend=compiled.InductorBackend({})) if by_user else net
        ours = everygpu.DataParallel(inner, used, engine="auto" if by_user else "compile")
        assert ours.engine_in_use == "compile"
        assert train(ours, x, y) == pytest.approx(train(eager, x, y))
        torch.testing.assert_close(list(ours.parameters()), list(eager.parameters()))
        torch.testing.assert_close(list(ours.buffers()), list(eager.buffers()))
        assert list(ours.state_dict()) == list(net.state_dict())
        assert len(made) == len(set(used))

    def test_python_state_means_what_it_does_eagerly(self, devices, quick):
        used = devices(2)
        x, _ = batch(used[0])
        model = everygpu.DataParallel(build(used[0], Counting), used, engine="compile").eval()
        first = everygpu.parallel.gather(model(x))
        model.module.scale = 3.0
        torch.testing.assert_close(everygpu.parallel.gather(model(x)), first * 3)
        assert model.module.calls == 2

    def test_weights_swapped_for_an_evaluation_before_backward(self, devices, quick):
        used = devices(2)
        x, _ = batch(used[0])
        bare = build(used[0]).eval()
        model = everygpu.DataParallel(copy.deepcopy(bare), used, engine="compile")
        for net in (bare, model):
            out = net(x)
            kept = [p.detach().clone() for p in net.parameters()]
            for p in net.parameters():
                p.data.mul_(0.5)
            with torch.no_grad():
                net(x)
            for p, k in zip(net.parameters(), kept):
                p.data.copy_(k)
            out.square().sum().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in bare.parameters()])

    @pytest.mark.parametrize("inner", [0, 2])
    def test_a_child_that_is_compiled_itself(self, quick, inner):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4) for _ in range(3)]
        net = nn.Sequential(*layers)
        expected = net(torch.ones(4, 4))
        net[inner] = torch.compile(layers[inner], backend="aot_eager")
        model = everygpu.DataParallel(torch.compile(net, backend="aot_eager"), ["cpu"] * 2)
        for _ in range(2):
            torch.testing.assert_close(everygpu.parallel.gather(model(torch.ones(4, 4))), expected)

    def test_what_its_user_has_compiled_runs_as_it_is_on_one_device(self, made):
        x, y = batch("cpu")
        net = torch.compile(Net(), backend=compiled.InductorBackend({}))
        net(x)
        train(everygpu.DataParallel(net, ["cpu"]), x, y)
        assert len(made) == 1

    def test_one_device_is_compiled_too(self, quick):
        x, y = batch("cpu")
        eager = everygpu.DataParallel(build("cpu"), ["cpu"])
        ours = everygpu.DataParallel(build("cpu"), ["cpu"], engine="compile")
        assert train(ours, x, y) == pytest.approx(train(eager, x, y))
        assert len(ours._engine._compiled) == 1


class TestWaysBack:
    @torch._dynamo.config.patch(recompile_limit=2)
    def test_many_shapes_are_torchs_to_limit(self, quick):
        model = everygpu.DataParallel(build("cpu"), ["cpu"] * 2, engine="compile").eval()
        bare = copy.deepcopy(model.module)
        for rows in range(2, 9):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(everygpu.parallel.gather(model(x)), bare(x))
        assert model.engine_in_use == "compile"

    @pytest.mark.parametrize("count", [1, 2])
    def test_a_whole_graph_that_cant_be_is_an_error_as_on_one_device(self, count, caplog):
        class Breaking(nn.Linear):
            def forward(self, x):
                torch._dynamo.graph_break()
                return super().forward(x)

        x = torch.ones(4, 4)
        for fullgraph in (True, False):
            torch.compiler.reset()
            net = torch.compile(Breaking(4, 2), fullgraph=fullgraph, backend="eager")
            model = everygpu.DataParallel(net, ["cpu"] * count)
            with pytest.raises(torch._dynamo.exc.Unsupported) if fullgraph else contextlib.nullcontext():
                model(x)
        assert "eagerly" not in caplog.text

    def test_compiler_that_fails_is_done_without(self, monkeypatch, caplog):
        def broken(graph, inputs):
            raise NotImplementedError("no such operation")

        monkeypatch.setattr(compiled, "InductorBackend", lambda _: broken)
        model = everygpu.DataParallel(build("cpu"), ["cpu"] * 2, engine="compile").eval()
        x, _ = batch("cpu")
        with caplog.at_level(logging.WARNING, "everygpu"):
            torch.testing.assert_close(everygpu.parallel.gather(model(x)), model.module(x))
        assert "compiling failed" in caplog.text

    def test_exception_in_a_replica_is_the_users(self, quick):
        class Picky(Net):
            def forward(self, x):
                if x.shape[0] == 1:
                    raise ValueError("one row")
                return super().forward(x)

        model = everygpu.DataParallel(Picky(), ["cpu"] * 2, engine="compile").eval()
        with pytest.raises(ValueError, match="one row") as caught:
            model(torch.randn(3, 4))
        assert isinstance(caught.value.__cause__, ReplicaError)
        assert "replica 1" in str(caught.value.__cause__)
        assert model(torch.randn(4, 4)).shape == (4, 3)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_compiled_wrapper_runs_as_ever(devices, count):
    used = devices(count)
    x, y = batch(used[0])
    net = build(used[0])
    eager = everygpu.DataParallel(copy.deepcopy(net), used)
    ours = torch.compile(everygpu.DataParallel(net, used), backend="eager")
    assert train(ours, x, y) == pytest.approx(train(eager, x, y))
    torch.testing.assert_close(list(ours.parameters()), list(eager.parameters()))
