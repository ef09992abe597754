"""Which forwards may be captured by Dynamo's proof, which may not, and that a proof runs and changes nothing."""

import copy
import functools
import logging
import os
import random
import re
import time
import warnings
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from everygpu.parallel.compiler.whole_graph import WholeGraph

# Importing torch's compiler warns of torch.jit; what forward does here is warned of, too.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("quick_guards"),
]

calls = 0
seen: list[int] = []
generator = random.Random(0)


class Calls(nn.Module):
    """A module whose forward is a function of the module and a tensor."""

    def __init__(self, function=None):
        super().__init__()
        self.lin, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1)
        self.layers = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.register_buffer("buf", torch.zeros(4))
        self.calls, self.items, self.table, self.scale, self.function = 0, [], {}, 1.5, function

    def forward(self, x, **kwargs):
        return self.function(self, x, **kwargs)


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Block(nn.Module):
    def __init__(self, width: int = 8, num_heads: int = 2):
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 16), nn.Linear(16, width), nn.Dropout(0.1)
        self.num_heads = num_heads

    def forward(self, x):
        b, t, d = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(b, t, 3, self.num_heads, d // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def writes_buffer(self, x):
    self.buf.add_(1)
    return self.lin(x)


def autocasts(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        return self.lin(x)


def runs_eagerly(self, x):
    if torch.compiler.is_compiling():
        seen.append(1)
    return self.lin(x)


active = ContextVar("active", default=None)


def collects(self, x):
    token = active.set([])
    try:
        h = self.lin(x)
        if active.get() is not None:
            active.get().append(h)
        return h, active.get()[0]
    finally:
        active.reset(token)


def sets_a_part(self, x):
    h = torch.zeros_like(x)
    h[:, 1:] = x[:, :-1]
    return self.lin(h)


def asks_for_a_capture(self, x):
    return self.lin(x) if torch.cuda.is_current_stream_capturing() else self.lin(x) * x.sum().item()


def warns_once(self, x):
    logger.say_once("once")
    return self.lin(x)


@functools.lru_cache(None)
def say_once(self, message):
    self.debug(message)


@pytest.fixture(autouse=True)
def loggers_say_once(monkeypatch):
    monkeypatch.setattr(logging.Logger, "say_once", say_once, raising=False)


PROVEN = {
    "context variable": collects,
    "part of a tensor": sets_a_part,
    "asks for a capture": asks_for_a_capture,
    "log that comes once": warns_once,
    "environment": lambda self, x: self.lin(x) * len(os.environ.get("HOME", "")),
    "address in the standard library": lambda self, x: self.lin(x) * copy.deepcopy(self.table).get("a", 2),
    "batch norm": lambda self, x: self.norm(self.lin(x)),
    "dropout": lambda self, x: self.drop(x),
    "dict": lambda self, x: {"logits": self.lin(x), "loss": self.lin(x).sum()},
    "dataclass": lambda self, x: Output(logits=self.lin(x)),
    "checkpoint": lambda self, x: checkpoint(self.lin, x, use_reentrant=False),
    "branch on training": lambda self, x: self.lin(x) if self.training else x * 2,
    "containers": lambda self, x: sum(layer(x) for layer in self.layers.values()),
    "attributes": lambda self, x: self.lin(x) * self.scale * len(self.items) + self.table.get("bias", 0),
    "function of autograd": lambda self, x: Double.apply(self.lin(x)),
    "tensor of a constant": lambda self, x: self.lin(x) * torch.tensor(self.scale),
    "buffer": writes_buffer,
    "modes": autocasts,
    "asks for the compiler": runs_eagerly,
}  # fmt: skip


def prove(module, *args, **kwargs):
    """Return the reason, and check that nothing has run or changed."""
    attributes = [{**vars(m)} for m in module.modules()]
    tensors = [*module.parameters(), *module.buffers()]
    values, names = [t.clone() for t in tensors], [set(vars(t)) for t in tensors]
    torch_rng, host_rng, numpy_rng = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    before = seen.copy(), calls, torch.is_grad_enabled(), torch.get_default_dtype(), generator.getstate()
    whole_graph = WholeGraph(module)
    reason = whole_graph.prove(args, kwargs)
    assert all(a.equal(b) for a, b in zip(values, tensors))
    # Dynamo of torch 2.15 leaves the device of a tensor whose `data` forward sets.
    assert [set(vars(t)) - {"fake_device"} for t in tensors] == names
    assert [vars(m) for m in module.modules()] == attributes
    assert torch.get_rng_state().equal(torch_rng)
    assert (np.random.get_state()[1] == numpy_rng).all()
    assert random.getstate() == host_rng
    assert before == (seen, calls, torch.is_grad_enabled(), torch.get_default_dtype(), generator.getstate())
    assert whole_graph.holds(args, kwargs) is (reason is None)
    return reason


@pytest.mark.parametrize("name", PROVEN)
def test_a_forward_of_tensors_alone_is_proven(name):
    assert prove(Calls(PROVEN[name]), torch.ones(3, 4)) is None


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), (3, 4)),
        (nn.Sequential(*(Block() for _ in range(3))), (2, 5, 8)),
        (nn.TransformerEncoderLayer(8, 2, 16), (2, 5, 8)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()), (2, 3, 8, 8)),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), (3, 4)),
    ],
)
def test_common_modules_are_proven(module, shape):
    for training in (True, False):
        assert prove(module.train(training), torch.rand(shape)) is None
    with torch.no_grad():
        assert prove(module, torch.rand(shape)) is None


# Each with one line of code for forward to be, and what the reason has to say.


def writes_global(self, x):
    global calls
    calls += 1
    return self.lin(x)


def make_counter():
    n = 0

    def writes_closure(self, x):
        nonlocal n
        n += 1
        return self.lin(x)

    return writes_closure


def effect(statement):
    """Make a forward that has a statement before its operation."""
    namespace = dict(globals())
    exec(f"def forward(self, x):\n    {statement}\n    return self.lin(x)", namespace)
    return namespace["forward"]


@torch.library.custom_op("everygpu_tests::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x + 1


opaque.register_fake(torch.empty_like)


@torch.compiler.disable
def left_alone(x):
    return x + 1


@torch.compiler.allow_in_graph
def in_graph(x):
    return x + 1


def hooks_result(self, x):
    y = self.lin(x)
    y.register_hook(lambda grad: grad * 2)
    return y


logger = logging.getLogger(__name__)
REFUSED = {
    "attribute": (effect("self.calls += 1"), "writes to module.calls in"),
    "training mode": (effect("self.train(False)"), "writes to module.training"),
    "class": (effect("type(self).calls = 1"), "writes to type(module).calls"),
    "global": (writes_global, "calls in test_whole_graph.py:"),
    "closure": (make_counter(), "__closure__"),
    "list": (effect("self.items.append(x)"), "writes to module.items"),
    "buffer bound anew": (effect("self.buf = self.buf + 1"), "_buffers"),
    "gradient": (effect("self.lin.weight.grad = None"), "writes to module.lin.weight.grad"),
    "parameter's data": (
        effect("self.lin.weight.data = self.lin.weight * 2"),
        re.compile("calls (set_|shallow_copy_data_)"),  # up to torch 2.13 or 2.14, and later
    ),
    "argument": (effect("x.mul_(2)"), "writes to its argument args[0]"),
    "host's random number": (
        lambda self, x: self.lin(x) * random.random(),
        re.compile("Dynamo can't trace|draws a random number on the host"),  # up to torch 2.13, and later
    ),
    "generator's number": (lambda self, x: self.lin(x) * generator.random(), "draws a random number on the host"),
    "NumPy": (lambda self, x: self.lin(x) * np.sqrt(2.0), "numpy"),
    "clock": (lambda self, x: self.lin(x) * time.time(), "Dynamo can't trace"),
    "context variable": (effect("active.set(1)"), "leaves the context variable active set"),
    "address": (lambda self, x: self.lin(x) * (id(x) % 7), "calls id()"),
    "print": (effect("print(1)"), "Dynamo can't trace"),
    "log": (effect("logger.debug('x')"), "logging.Logger"),
    "warning": (effect("warnings.warn('x')"), "Dynamo can't trace"),
    "item": (lambda self, x: self.lin(x) * x.sum().item(), "reads a number back from a tensor by item"),
    "branch": (lambda self, x: self.lin(x) if x.sum() > 0 else x, "Data-dependent branching"),
    "mask": (lambda self, x: x[x > 0], "makes a shape that depends on values"),
    "grad mode": (effect("torch.set_grad_enabled(False)"), "leaves grad mode"),
    "default dtype": (effect("torch.set_default_dtype(torch.float64)"), "calls set_default_dtype"),
    "seed": (effect("torch.manual_seed(0)"), "Dynamo can't trace"),
    "custom operator": (lambda self, x: opaque(x), "the custom operator everygpu_tests.opaque"),
    "function put into the graph": (lambda self, x: in_graph(x), "in_graph, whose code can't be seen"),
    "hook on a result": (hooks_result, "register_hook"),
    "disabled": (lambda self, x: left_alone(x), "disable"),
    "only eagerly": (effect("self.calls += not torch.compiler.is_compiling()"), "writes to module.calls"),
    "effect in a checkpoint": (lambda self, x: checkpoint(lambda y: self.items.append(1) or y, x), "side effect"),
    "no operation": (lambda self, x: x, "runs no operation"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_capture_would_not_repeat_is_the_reason(name):
    function, said = REFUSED[name]
    reason = prove(Calls(function), torch.ones(3, 4))
    assert reason is not None
    assert re.search(said if isinstance(said, re.Pattern) else re.escape(said), reason)
    assert "\n" not in reason
    assert len(reason) <= 240


def test_arguments_that_share_memory():
    class Both(nn.Module):
        def forward(self, x, y):
            return x * y[:2]

    x = torch.ones(4, 4)
    x.add_(1)
    whole_graph = WholeGraph(Both())
    assert whole_graph.prove((x[:2], x.detach()), {}) is None
    assert whole_graph.holds((x[:2], x.detach()), {})


def wrong_shape(self, x):
    return self.lin(x[:, :2])  # found in torch's own file


@pytest.mark.parametrize(("function", "line"), [(writes_global, 2), (wrong_shape, 1), (hooks_result, 2)])
def test_a_reason_says_where_it_is(function, line):
    line += function.__code__.co_firstlineno
    assert f" in test_whole_graph.py:{line}" in prove(Calls(function), torch.ones(3, 4))
    reason = prove(Calls(effect(f"self.{'long' * 100} = 1")), torch.ones(3, 4))
    assert len(reason) == 240
    assert reason.endswith("...")


@functools.lru_cache
def cached():
    return 2.0


def test_a_proof_warns_of_nothing():
    functions = [lambda self, x: self.lin(x) * cached(), lambda self, x: self.lin(x) * random.gauss(0, 1)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reasons = [WholeGraph(Calls(function)).prove((torch.ones(3, 4),), {}) for function in functions]
    assert [reason is None for reason in reasons] == [True, False]
    assert [w.message for w in caught if w.category is not DeprecationWarning] == []


LOOSE = {
    "log": {"ignore_logging_functions": {logging.Logger.debug}},
    "print": {"reorderable_logging_functions": {print}, "suppress_errors": True},
    "NumPy": {"trace_numpy": True},
    "attribute": {"replay_side_effects": False},
}  # fmt: skip


@pytest.mark.parametrize("name", LOOSE)
def test_the_callers_settings_of_the_compiler_loosen_nothing(name):
    from torch._dynamo import config

    function, said = REFUSED[name]
    with config.patch(**LOOSE[name]):
        assert said in prove(Calls(function), torch.ones(3, 4))


def test_settings_of_the_compiler_that_leave_out_guards_are_not_heeded():
    from torch._dynamo import config

    module, x = Calls(PROVEN["branch on training"]), torch.ones(3, 4)
    whole_graph = WholeGraph(module)
    with config.patch(guard_nn_modules=False, skip_guards_on_constant_func_defaults=True):
        assert whole_graph.prove((x,), {}) is None
    assert whole_graph.holds((x,), {})
    module.eval()
    assert not whole_graph.holds((x,), {})


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_proven(kind):
    module, x = kind(4, 4, 2), torch.ones(5, 3, 4)
    whole_graph = WholeGraph(module)
    assert whole_graph.prove((x,), {}) is None
    assert whole_graph.holds((x,), {})
    module.dropout = 0.5
    assert not whole_graph.holds((x,), {})


def compiled_itself():
    layer = nn.Linear(4, 4)
    layer.compile()
    return nn.Sequential(layer)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.LazyLinear(4), "parameters without a shape"),
        (lambda: torch.jit.script(nn.Linear(4, 4)), "torch.jit"),
        (lambda: torch.compile(nn.Linear(4, 4)), "compiled by torch.compile already"),
        (lambda: nn.Sequential(torch.compile(nn.Linear(4, 4))), "compiled by torch.compile already"),
        (compiled_itself, "compiled by torch.compile already"),
    ],
)
def test_modules_that_dynamo_does_not_trace_are_refused(make, said):
    assert said in WholeGraph(make()).prove((torch.ones(3, 4),), {})


def test_hooks_are_part_of_forward():
    module, kept = nn.Linear(4, 4), []
    handle = module.register_forward_hook(lambda module, args, output: output * 2)
    assert prove(module, torch.ones(3, 4)) is None
    handle.remove()
    module.register_forward_hook(lambda module, args, output: kept.append(1))
    assert "writes to" in prove(module, torch.ones(3, 4))
    assert kept == []


HOST = {
    "random": (lambda self, x: self.lin(x) + torch.randn(4, device="cpu").to(x.device), "works on the CPU by randn"),
    "attribute": (lambda self, x: self.lin(x) * self.weight, "reads module.weight on the CPU"),
    "read back": (lambda self, x: self.lin(x).cpu(), "works on the CPU by cpu"),
    "constant": (lambda self, x: self.lin(x) * torch.tensor(2.0), None),
}  # fmt: skip


@pytest.mark.parametrize("name", HOST)
def test_work_on_the_host_is_found_beside_another_device(name):
    function, said = HOST[name]
    module = Calls(function).to("meta")
    module.weight = torch.ones(())
    reason = WholeGraph(module).prove((torch.ones(3, 4, device="meta"),), {})
    assert (reason is None) if said is None else said in reason


@pytest.mark.parametrize("switch", ["stance", "configuration"])
def test_nothing_runs_where_torch_compile_is_switched_off(switch):
    module = Calls(effect("self.items.append(1)"))
    from torch._dynamo import config

    with torch.compiler.set_stance("force_eager") if switch == "stance" else config.patch(disable=True):
        assert "torch" in WholeGraph(module).prove((torch.ones(3, 4),), {})
    assert module.items == []


def test_a_torch_without_what_is_needed_is_a_reason(monkeypatch):
    def fail(*args):
        raise ImportError("cannot import name 'compile_lock'")

    monkeypatch.setattr("everygpu.parallel.compiler.whole_graph.captured_answers", fail)
    reason = WholeGraph(nn.Linear(4, 4)).prove((torch.ones(3, 4),), {})
    assert reason == "this torch can't trace the call: ImportError: cannot import name 'compile_lock'"


def test_a_torch_that_is_newer_than_those_tried_is_a_reason(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    assert "with torch 2.16.0" in WholeGraph(nn.Linear(4, 4)).prove((torch.ones(3, 4),), {})
