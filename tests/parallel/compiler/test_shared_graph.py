"""One replica's graph run with another's tensors; and when it must not be."""

import copy
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend

from everygpu import tree
from everygpu.parallel.compiler.shared_graph import InputBinding, Recorder, Run, backend_of, find_binding

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("quick_guards"),
]

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["a", "b"])


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[list[Run], Any]:
    recorder = Recorder(lookup_backend("aot_eager"))
    compiled = torch.compile(module, backend=recorder, dynamic=False)
    compiled(*args, **kwargs)
    with recorder.recording() as runs:
        result = compiled(*args, **kwargs)
    return runs, result


def recipe_of(module: nn.Module, *args: Any, **kwargs: Any) -> InputBinding | None:
    runs, result = run(module, *args, **kwargs)
    return find_binding(runs, (module, args, kwargs), CPU, result)


def body(function: Callable[..., Any]) -> nn.Module:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(3, 3)
            self.norm = nn.BatchNorm1d(3)
            self.tied = self.linear
            self.plain = torch.arange(3.0)
            self.register_buffer("table", torch.randn(3))
            self.listed = [torch.ones(3)]

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(self, *args, **kwargs)

    return Module()


def twin_of(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for p in [*twin.parameters(), twin.table, twin.plain]:
            p.add_(torch.randn(p.shape))
    return twin


SHARED: dict[str, tuple[Callable[..., Any], Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "one tensor": (lambda m, x: m.linear(x), lambda: ((torch.randn(4, 3),), {})),
    "buffers": (lambda m, x: m.norm(x) * m.table, lambda: ((torch.randn(4, 3),), {})),
    "plain attributes": (lambda m, x: x * m.plain, lambda: ((torch.randn(4, 3),), {})),
    "tied": (lambda m, x: m.tied(m.linear(x)), lambda: ((torch.randn(4, 3),), {})),
    "nested": (
        lambda m, x, more: Pair({"y": m.linear(x), "n": 3}, [more["z"][0] + 1, None, "text"]),
        lambda: ((torch.randn(4, 3),), {"more": {"z": (torch.randn(4),)}}),
    ),
    "the same tensor twice": (lambda m, x, y: (x + y, x * y), lambda: ((x := torch.randn(4, 3), x), {})),
    "several outputs": (lambda m, x: (m.linear(x), x.sum(), x.argmax(1)), lambda: ((torch.randn(4, 3),), {})),
    "made in forward": (lambda m, x: x + torch.arange(3), lambda: ((torch.randn(4, 3),), {})),
}


@pytest.mark.parametrize("name", SHARED)
def test_another_replica_gets_what_its_own_call_would_give(name: str) -> None:
    function, make = SHARED[name]
    module = body(function)
    recipe = recipe_of(module, *make()[0], **make()[1])
    if name == "the same tensor twice":
        args, kwargs = make()
        recipe = recipe_of(module, *args, **kwargs)
    assert recipe is not None
    twin, plain = twin_of(module), None
    plain = copy.deepcopy(twin)
    args, kwargs = make()
    inputs = recipe.inputs_for((twin, args, kwargs), CPU)
    assert inputs is not None
    ours, expected = recipe.run(inputs), plain(*args, **kwargs)
    assert type(ours) is type(expected)
    pairs = list(zip(tree.leaves(ours, ""), tree.leaves(expected, "")))
    for (path, a), (other, b) in pairs:
        assert path == other
        torch.testing.assert_close(a, b) if isinstance(b, Tensor) else None
        assert isinstance(b, Tensor) or a == b
    differentiable = [(a, b) for (_, a), (_, b) in pairs if isinstance(b, Tensor) and b.requires_grad]
    for a, b in differentiable:
        a.sum().backward(retain_graph=True)
        b.sum().backward(retain_graph=True)
    for p, q in zip(twin.parameters(), plain.parameters()):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)
    for p, q in zip(twin.buffers(), plain.buffers()):
        torch.testing.assert_close(p, q)


def broken(m: Any, x: Tensor) -> Tensor:
    x = m.linear(x)
    torch._dynamo.graph_break()
    return m.linear(x)


NOT_SHARED: dict[str, Callable[..., Any]] = {
    "a graph break": broken,
    "a tensor in a list": lambda m, x: x * m.listed[0],
    "a constant": lambda m, x: x * torch.tensor([1.0, 2.0, 3.0]),
    "a global": lambda m, x: x + GLOBAL,
    "an attribute returned": lambda m, x: (m.linear(x), m.plain),
    "no graph": lambda m, x: 3,
}
GLOBAL = torch.ones(3)


@pytest.mark.parametrize("name", NOT_SHARED)
def test_what_is_not_the_replicas_own_is_not_shared(name: str) -> None:
    module, x = body(NOT_SHARED[name]), torch.randn(4, 3)
    runs, result = run(module, x)
    found = find_binding(runs, (module, (x,), {}), CPU, result)
    if found is None:
        return
    # Where the compiler made it the replica's own, it must be right.
    twin = twin_of(module)
    inputs = found.inputs_for((twin, (x + 1,), {}), CPU)
    assert inputs is not None
    torch.testing.assert_close(found.run(inputs), twin(x + 1))


@pytest.mark.parametrize(
    "name", ["a graph break", "a tensor in a list", "a global", "an attribute returned", "no graph"]
)
def test_these_are_left_to_each_replica(name: str) -> None:
    assert recipe_of(body(NOT_SHARED[name]), torch.randn(4, 3)) is None


@pytest.mark.parametrize(
    "other",
    [
        torch.randn(5, 3),
        torch.randn(4, 3, dtype=torch.float64),
        torch.randn(3, 4).t(),
        torch.randn(4, 3, requires_grad=True),
        torch.randn(13)[1:].view(4, 3),
        torch.randn(4, 3, device="meta"),
    ],
    ids=["shape", "dtype", "strides", "gradient", "alignment", "device"],
)
def test_inputs_laid_out_in_another_way_are_not_run(other: Tensor) -> None:
    module = body(lambda m, x: m.linear(x))
    recipe = recipe_of(module, torch.randn(4, 3))
    assert recipe is not None
    assert recipe.inputs_for((module, (torch.randn(4, 3),), {}), CPU) is not None
    assert recipe.inputs_for((module, (other,), {}), CPU) is None


def test_graph_is_not_run_on_a_device_it_is_not_made_for() -> None:
    module = body(lambda m, x: m.linear(x))
    recipe = recipe_of(module, torch.randn(4, 3))
    assert recipe is not None
    call = copy.deepcopy(module).to("meta"), (torch.randn(4, 3, device="meta"),), {}
    assert recipe.inputs_for(call, torch.device("meta")) is None


def test_the_users_backend_is_found() -> None:
    def mine(graph: Any, inputs: Any) -> Any:
        return graph

    found = backend_of(torch.compile(nn.Linear(2, 2), backend=mine).dynamo_ctx)
    assert found is not None
    assert found("graph", []) == "graph"  # type: ignore[comparison-overlap]
    assert backend_of(object()) is None
