"""One replica's compiled code run with another's tensors; and when it must not be."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend

from everygpu.parallel.compiler.compile_once import CompileOnce
from everygpu.parallel.compiler.inductor_backend import backend_of

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("quick_guards"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Module(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.dropout = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.0)
        self.tied = self.linear
        self.plain = torch.arange(3.0)
        self.register_buffer("table", torch.randn(3))
        self.listed = [torch.ones(3)]
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def twin_of(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for t in [*twin.parameters(), twin.table, twin.plain, *twin.listed]:  # type: ignore[misc]
            t.add_(torch.randn(t.shape))
    return twin


def compile_each(modules: list[nn.Module], **options: Any) -> tuple[list[Any], list[Any]]:
    """Compile modules to share one another's code; return them, and the graphs that are compiled by their calls."""
    made: list[Any] = []

    def counting(graph: Any, inputs: list[Any]) -> Any:
        made.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    once = CompileOnce(counting)
    compiled = [torch.compile(m, backend=once, **options) for m in modules]

    def run(*args: Any) -> list[Any]:
        with once.sharing():
            return [module(*each) for module, each in zip(compiled, args)]

    return [run], made


GLOBAL = torch.ones(3)


def broken(m: Any, x: Tensor) -> Tensor:
    x = m.linear(x)
    torch._dynamo.graph_break()
    return m.linear(x)


FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "buffers": (lambda m, x: m.norm(x) * m.table, 1),
    "tied": (lambda m, x: m.tied(m.linear(x)), 1),
    "made in forward": (lambda m, x: x + torch.arange(3), 1),
    "a graph break": (broken, 2),
    "a tensor in a list": (lambda m, x: x * m.listed[0], 1),
    "a global": (lambda m, x: x + GLOBAL, 1),
    "an attribute returned": (lambda m, x: (m.linear(x), m.plain), 1),
    "a checkpoint": (lambda m, x: torch.utils.checkpoint.checkpoint(m.linear, x, use_reentrant=False), 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_another_replica_gets_what_its_own_call_would_give(name: str) -> None:
    function, num_graphs = FUNCTIONS[name]
    module = Module(function)
    modules = [module, twin_of(module), twin_of(module)]
    plain = copy.deepcopy(modules)
    (run,), made = compile_each(modules)
    inputs = [(torch.randn(4, 3),) for _ in modules]
    ours, expected = run(*inputs), [m(*each) for m, each in zip(plain, inputs)]
    assert len(made) == num_graphs
    torch.testing.assert_close(ours, expected)
    for outputs in (ours, expected):
        flat = [t for out in outputs for t in (out if isinstance(out, tuple) else [out])]
        for t in flat:
            if t.requires_grad:
                t.sum().backward()
    for m, other in zip(modules, plain):
        torch.testing.assert_close([p.grad for p in m.parameters()], [p.grad for p in other.parameters()])
        torch.testing.assert_close(list(m.buffers()), list(other.buffers()))


@pytest.mark.parametrize(
    "other",
    [
        torch.randn(5, 3),
        torch.randn(4, 3, dtype=torch.float64),
        torch.randn(3, 4).t(),
        torch.randn(4, 3, requires_grad=True),
    ],
    ids=["shape", "dtype", "strides", "gradient"],
)
def test_inputs_laid_out_in_another_way_are_compiled_for(other: Tensor) -> None:
    module = Module(lambda m, x: x * 2)
    (run,), made = compile_each([module, copy.deepcopy(module)], dynamic=False)
    _, found = run((torch.randn(4, 3),), (other,))
    torch.testing.assert_close(found, other * 2)
    assert len(made) == 2


def test_numbers_in_python_are_part_of_the_code() -> None:
    one, two = (Module(lambda m, x: x * m.factor) for _ in range(2))
    one.factor, two.factor = 2, 3
    (run,), made = compile_each([one, two], dynamic=False)
    x = torch.ones(4, 3)
    torch.testing.assert_close(run((x,), (x,)), [x * 2, x * 3])
    assert len(made) == 2


def test_a_constant_in_the_code_is_each_replicas_own() -> None:
    one, two = (Module(lambda m, x: x * torch.tensor(m.values)) for _ in range(2))
    one.values, two.values = [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]
    (run,), _ = compile_each([one, two])
    x = torch.ones(4, 3)
    torch.testing.assert_close(run((x,), (x,)), [x * torch.tensor(m.values) for m in (one, two)])


def test_sizes_that_are_left_open_are_compiled_for_each() -> None:
    module = Module(lambda m, x: x * x.shape[0])
    (run,), _ = compile_each([module, copy.deepcopy(module)], dynamic=True)
    for a, b in ((4, 4), (4, 6), (8, 3)):
        x, y = torch.ones(a, 3), torch.ones(b, 3)
        torch.testing.assert_close(run((x,), (y,)), [x * a, y * b])


def test_the_users_backend_is_found() -> None:
    def mine(graph: Any, inputs: Any) -> Any:
        return graph

    found = backend_of(torch.compile(nn.Linear(2, 2), backend=mine).dynamo_ctx)
    assert found is not None
    assert found("graph", []) == "graph"  # type: ignore[comparison-overlap]
    assert backend_of(object()) is None
