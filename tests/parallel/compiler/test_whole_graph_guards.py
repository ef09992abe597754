"""When a proof holds for another call: what forward has read is as it was. And what a proof leaves behind: nothing."""

import collections
import contextlib
import copy
import gc
import os
import random
import sys
import threading
import weakref
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from everygpu.parallel.compiler.whole_graph import WholeGraph
from everygpu.torch_private.compiler import cache_entries
from tests.parallel.cuda_graphs.places import FLOATS, PLACES, InObjectArray, Place, number_of

# Importing torch's compiler warns of torch.jit.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("quick_guards"),
]


class Config:
    base = 1.0

    def __init__(self):
        self.scale = 1.0

    def apply(self, x):
        return x * self.scale * self.base

    @property
    def double(self):
        return self.scale * 2

    @classmethod
    def shift(cls, x):
        return x + 1


class OtherConfig(Config):
    pass


def make_scale():
    factor = 1.0

    def scale(x):
        return x * factor

    def set_factor(value):
        nonlocal factor
        factor = value

    return scale, set_factor


def shifted(x, by=1.0):
    return x + by


factor, bias, activation = 2.0, torch.ones(4), torch.relu


class Net(nn.Module):
    gain = 1.5

    def __init__(self):
        super().__init__()
        self.lin, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.register_buffer("buf", torch.ones(4))
        self.scale, self.config, self.weights, self.table = 2.0, Config(), [1.0], {"k": 3.0}
        self.tensor, self.tensors, self.flag = torch.ones(4), [torch.ones(4)], None
        self.closure, self.set_factor = make_scale()

    def helper(self, x):
        return x * self.gain

    def forward(self, x, k=1.0):
        x = self.drop(self.norm(self.lin(x))) * self.scale * k
        x = Config.shift(self.config.apply(x) * self.config.double)
        x = x * self.weights[0] * self.table["k"] + self.buf + self.tensor + self.tensors[0]
        for layer in self.layers:
            x = layer(x)
        x = shifted(self.helper(self.closure(x))) * factor + bias
        if self.flag is not None:
            x = x + 1
        return F.gelu(activation(x))


@pytest.fixture(scope="module")
def latest():
    """What ``proven`` gave last: proving takes most of a test's time."""
    return []


@pytest.fixture
def proven(monkeypatch, latest):
    """A module, its proof, and a call; modules' and classes' attributes are set by ``monkeypatch``."""
    if not latest or not latest[1].holds((latest[2],), {}):
        module, x = Net(), torch.rand(3, 4)
        whole_graph = WholeGraph(module)
        assert whole_graph.prove((x,), {}) is None
        assert whole_graph.holds((x,), {})
        latest[:] = module, whole_graph, x
    return tuple(latest)


def sets(path, value):
    """Return a change of an attribute, by the path from the module or a name in this file."""

    def change(module, monkeypatch):
        first, *others, last = path.split(".")
        owner = module if first == "module" else globals()[first]
        for name in others:
            owner = getattr(owner, name)
        monkeypatch.setattr(owner, last, value, raising=False)

    return change


def sets_global(name, value):
    return lambda module, monkeypatch: monkeypatch.setitem(globals(), name, value)


CHANGES = {
    "eval": lambda m, _: m.eval(),
    "None": sets("module.flag", 1),
    "rate of dropout": sets("module.drop.p", 0.5),
    "configuration's class": sets("module.config.__class__", OtherConfig),
    "global": sets_global("factor", 3.0),
    "global tensor": sets_global("bias", torch.ones(4)),
    "global function": sets_global("activation", torch.tanh),
    "code": lambda m, patch: patch.setattr(shifted, "__code__", (lambda x, by=1.0: x).__code__),
    "torch's function": lambda m, patch: patch.setattr(F, "gelu", F.relu),
    "hook": lambda m, _: m.lin.register_forward_hook(lambda *args: None),
    "hook of backward": lambda m, _: m.lin.register_full_backward_hook(lambda *args: None),
    "parameter": lambda m, _: setattr(m.lin, "weight", nn.Parameter(torch.ones(4, 4))),
    "parameter's dtype": lambda m, _: m.lin.double(),
    "requires_grad": lambda m, _: m.lin.weight.requires_grad_(False),
    "buffer": sets("module.buf", torch.ones(4)),
    "tensor": sets("module.tensor", torch.ones(4)),
    "tensor in a list": lambda m, _: m.tensors.__setitem__(0, torch.ones(4)),
    "child": lambda m, _: setattr(m, "lin", nn.Linear(4, 4)),
    "one layer fewer": lambda m, _: m.layers.__delitem__(0),
    "forward of a child": lambda m, _: setattr(m.lin, "forward", lambda x: x),
    "method": sets("Net.helper", lambda self, x: x),
    "method of torch": lambda m, patch: patch.setattr(nn.Linear, "forward", lambda self, x: x),
    "method's code": lambda m, patch: patch.setattr(Net.helper, "__code__", (lambda self, x: x).__code__),
    "method of another class": sets("Config.apply", lambda self, x: x),
    "property": sets("Config.double", property(lambda self: 3.0)),
    "class method": lambda m, patch: patch.setattr(Config, "shift", classmethod(lambda cls, x: x)),
    "another attribute of a class": sets("Net.new", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_forward_has_read_ends_the_proof(name, proven, monkeypatch):
    module, whole_graph, x = proven
    CHANGES[name](module, monkeypatch)
    assert not whole_graph.holds((x,), {})


SAME = {
    "nothing": lambda m: None,
    "the same number": lambda m: setattr(m, "scale", 2.0),
    "an equal configuration": lambda m: setattr(m, "config", Config()),
    # Python notes in its class which slots that has, and that it has no annotations.
    "a first copy": lambda m: copy.copy(m.config),
    "a first look at annotations": lambda m: type(m.config).__annotations__,
    "values": lambda m: m.lin.weight.data.zero_(),
    # What comes is not seen: a capture compares addresses, and looks for hooks on tensors, itself.
    "data": lambda m: setattr(m.lin.weight, "data", torch.ones(4, 4)),
    "hook on a parameter": lambda m: m.lin.weight.register_hook(lambda grad: grad),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_a_proof_holds_where_forward_reads_the_same(name, proven):
    module, whole_graph, x = proven
    SAME[name](module)
    assert whole_graph.holds((x,), {})


@contextlib.contextmanager
def hooked_everywhere():
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    yield
    handle.remove()


MODES = {
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "saved tensors' hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "attention": lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
    "hooks on all modules": hooked_everywhere,
}


@pytest.mark.parametrize("name", MODES)
def test_modes_end_the_proof_while_they_last(name, proven):
    _, whole_graph, x = proven
    with MODES[name]():
        assert not whole_graph.holds((x,), {})
    assert whole_graph.holds((x,), {})


class Surroundings(nn.Module):
    def forward(self, x):
        scale = 2.0 if os.environ.get("EVERYGPU_TEST_SCALE") else 1.0
        return x * scale * (3.0 if depth.get() else 1.0)


depth: ContextVar[int | None] = ContextVar("depth", default=None)


def test_the_environment_and_context_variables_are_guarded(monkeypatch):
    x, module = torch.ones(3, 4), Surroundings()
    whole_graph = WholeGraph(module)
    assert whole_graph.prove((x,), {}) is None
    token = depth.set(1)
    assert not whole_graph.holds((x,), {})
    depth.reset(token)
    assert whole_graph.holds((x,), {})
    monkeypatch.setenv("EVERYGPU_TEST_SCALE", "1")
    assert not whole_graph.holds((x,), {})
    monkeypatch.delenv("EVERYGPU_TEST_SCALE")
    assert whole_graph.holds((x,), {})


def test_arguments_are_guarded_by_shape_and_by_value(proven):
    _, whole_graph, x = proven
    assert whole_graph.holds((torch.rand(6, 4)[3:],), {})
    others = [torch.rand(4, 4), torch.rand(3, 4).double(), torch.rand(4, 3).t(), torch.rand(3, 4, requires_grad=True)]
    for args in [*((other,) for other in others), (x, 2.0), (x.numpy(),), (nn.Parameter(x),), ()]:
        assert not whole_graph.holds(args, {})
    assert whole_graph.prove((x,), {"k": 2.0}) is None
    assert whole_graph.holds((x,), {"k": 2.0})
    for kwargs in ({"k": 3.0}, {"k": 2}, {"k": torch.ones(())}, {}, {"j": 2.0}):
        assert not whole_graph.holds((x,), kwargs)


def test_an_argument_that_is_an_attribute_as_well_is_not_captured(proven):
    module, whole_graph, _ = proven
    x = module.tensor.expand(3, 4).clone()
    module.tensor = x
    assert whole_graph.prove((x,), {}) is None
    assert not whole_graph.holds((x,), {})
    assert whole_graph.holds((x.clone(),), {})


class Sized(nn.Module):
    """Notes what it was given, as transformers' Swin does."""

    def __init__(self):
        super().__init__()
        self.lin, self.width = nn.Linear(4, 4), None

    def forward(self, x):
        self.width = x.shape[1]
        return self.lin(x) * self.width


def test_an_attribute_may_be_written_with_the_value_that_it_has():
    module, call = Sized(), ((torch.ones(3, 4),), {})
    graph = WholeGraph(module)
    assert "forward writes to module.width" in graph.prove(*call)
    module(*call[0])
    assert graph.prove(*call) is None
    assert graph.holds(*call)
    module.width = 5  # a replay would leave it so
    assert not graph.holds(*call)


def test_one_tensor_given_twice_stays_one():
    whole_graph, x = WholeGraph(nn.Bilinear(4, 4, 2)), torch.rand(3, 4)
    assert whole_graph.prove((x, x), {}) is None
    assert whole_graph.holds((x, x), {})
    assert not whole_graph.holds((x, x.clone()), {})


def test_many_shapes_are_proven_without_reaching_a_limit():
    graphs = [WholeGraph(nn.Linear(4, 4)) for _ in range(12)]
    for rows, graph in enumerate(graphs, 2):
        assert graph.prove((torch.rand(rows, 4),), {}) is None
    one = graphs[0]
    for rows in range(2, 14):
        assert one.prove((torch.rand(rows, 4),), {}) is None
    assert [graph.holds((torch.rand(13, 4),), {}) for graph in graphs] == [True] + [False] * 10 + [True]


def test_dropping_it_frees_the_module_and_the_guards():
    module, x = nn.Sequential(nn.Linear(4, 4)), torch.rand(3, 4)
    whole_graph = WholeGraph(module)
    assert whole_graph.prove((x,), {}) is None
    first = weakref.ref(whole_graph._proof.code)
    assert whole_graph.prove((x,), {}) is None
    gc.collect()
    kept = [weakref.ref(o) for o in (module, module[0].weight, whole_graph._proof.code, x)]
    assert first() is None
    del module, whole_graph, x
    gc.collect()
    assert [ref() for ref in kept] == [None] * 4


def test_a_reset_of_the_compiler_ends_the_proof(proven):
    _, whole_graph, x = proven
    torch.compiler.reset()
    assert not whole_graph.holds((x,), {})
    assert whole_graph.prove((x,), {}) is None
    assert whole_graph.holds((x,), {})


def test_the_callers_own_compiled_functions_stay_as_they_are():
    from torch._dynamo import config

    module, compiled = nn.Sequential(nn.Linear(4, 4)), []
    settings = config.get_config_copy()

    def backend(graph, inputs):
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    forward, x = torch.compile(module, backend=backend), torch.rand(3, 4)
    forward(x)
    code = nn.Sequential.forward.__code__
    entries = len(cache_entries(code))
    whole_graph = WholeGraph(module)
    assert whole_graph.prove((x,), {}) is None
    assert whole_graph.prove((torch.rand(5, 4),), {}) is None
    assert len(cache_entries(code)) == entries
    forward(x)
    assert len(compiled) == 1
    answers = torch.compile(lambda x: x + torch.compiler.is_compiling(), backend=backend, fullgraph=True)
    assert answers(torch.zeros(())) == 1
    after = config.get_config_copy()
    assert {name for name, value in settings.items() if after[name] != value} == set()


def test_threads_prove_and_ask_beside_each_other():
    modules = [nn.Sequential(nn.Linear(4, n), nn.ReLU()) for n in range(1, 5)]
    graphs, found, x = [WholeGraph(m) for m in modules], {}, torch.rand(3, 4)

    def work(i):
        reasons = [graphs[i].prove((x,), {}) for _ in range(2)]
        found[i] = reasons, [graphs[i].holds((x,), {}) for _ in range(50)], graphs[i].holds((x[:2],), {})

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: ([None, None], [True] * 50, False) for i in range(4)}


class ReadsPlace(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.place = place

    def forward(self, x):
        return x * number_of(self.place.read())


class FirstOfSet(Place):
    def __init__(self):
        self.held = SimpleNamespace(kept={1.0})
        super().__init__()

    def read(self):
        return next(iter(self.held.kept))

    def write(self, value):
        self.held.kept = frozenset([value]) if isinstance(self.held.kept, frozenset) else {value}


class OtherOrder(Place):
    """Another dict with the same keys, in another order."""

    values = FLOATS

    def read(self):
        return next(iter(self.held))

    def write(self, value):
        first = collections.OrderedDict.fromkeys(FLOATS)
        first.move_to_end(value, last=False)
        self.held = first


class Attempted(Place):
    """A name that wasn't there, which is tried."""

    def __init__(self):
        self.module = sys.modules[__name__]
        super().__init__()

    def read(self):
        try:
            return sometimes
        except NameError:
            return 7.0

    def write(self, value):
        if "sometimes" in globals():
            del globals()["sometimes"]
        else:
            globals()["sometimes"] = value

    def drop(self):
        globals().pop("sometimes", None)


def check_place(kind, value):
    """A proof that holds is of a call that does the same."""
    place = kind()
    try:
        module, x = ReadsPlace(place), torch.rand(3, 4)
        whole_graph = WholeGraph(module)
        if whole_graph.prove((x,), {}) is not None or kind.is_written:
            return
        assert whole_graph.holds((x,), {})
        before = module(x)
        place.write(value)
        assert not whole_graph.holds((x,), {}) or torch.equal(module(x), before)
    finally:
        place.drop()


KINDS = [*PLACES, FirstOfSet, OtherOrder, Attempted]


@pytest.mark.parametrize("kind", KINDS)
def test_a_proof_sees_each_change(kind):
    chance = random.Random(kind.__name__)
    check_place(kind, chance.choice(kind.values))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_proof_sees_all_changes(kind):
    for value in kind.values:
        check_place(kind, value)


def test_under_a_default_device():
    """Operators are traced as methods there, among them what tells whether Dynamo is at work."""
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.rand(3, 4)
    try:
        torch.set_default_device("cpu")
        whole_graph = WholeGraph(module)
        assert whole_graph.prove((x,), {}) is None
        assert whole_graph.holds((x,), {})
        torch.set_default_device("meta")
        assert not whole_graph.holds((x,), {})
    finally:
        torch.set_default_device(None)


def test_an_array_is_named():
    reason = WholeGraph(ReadsPlace(InObjectArray())).prove((torch.rand(3, 4),), {})
    assert reason == "forward reads NumPy's array module.place.held.array, whose values Dynamo doesn't guard"
