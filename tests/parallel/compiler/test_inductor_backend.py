"""One compilation that serves several GPUs: which version runs, when it is loaded, and when there is none."""

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from everygpu.parallel.compiler import inductor_backend, load_graph
from everygpu.parallel.compiler.inductor_backend import (
    GraphPart,
    InductorBackend,
    MultiDeviceGraph,
    backend_of,
    compiling_once,
)
from everygpu.parallel.compiler.load_graph import _choose_same_configs, unsupported_reason

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def on_gpu(index: int) -> Tensor:
    with FakeTensorMode():
        return torch.empty(2, device=f"cuda:{index}")


def compiled_for(source: str, **changes: Any) -> Any:
    """Make what torch returns for a graph on cuda:1, as far as it is looked at."""
    fields = {
        "device_types": {"cuda"},
        "device_idxs": {1},
        "constants": {},
        "frozen_param_names": {},
        "torchbind_constants": {},
        "source_code": source,
    }
    return SimpleNamespace(**(fields | changes))


class Loaded:
    """Versions that answer with the GPU they are for."""

    def __init__(self) -> None:
        self.indices: list[int] = []

    def load(self, index: int) -> Callable[[list[Any]], Any]:
        self.indices.append(index)
        return self.version(index)

    def version(self, index: int) -> Callable[[list[Any]], Any]:
        def run(inputs: list[Any]) -> Any:
            inputs.clear()
            return [index]

        return run


class TestPart:
    def test_threads_load_a_version_once(self) -> None:
        loaded, results = Loaded(), []
        part = GraphPart(0, loaded.version(0), loaded.load)
        start = threading.Barrier(6)

        def run(index: int) -> None:
            start.wait()
            results.extend(part([torch.empty(2), on_gpu(index)]))

        threads = [threading.Thread(target=run, args=(i % 3,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(loaded.indices) == [1, 2]
        assert sorted(results) == [0, 0, 1, 1, 2, 2]

    def test_a_kind_of_gpu_it_is_not_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kinds = {0: ("H200", 9, 0, 132), 1: ("H200", 9, 0, 132), 2: ("L4", 8, 9, 58)}
        names = ("name", "major", "minor", "multi_processor_count")
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda i: SimpleNamespace(**dict(zip(names, kinds[i])))
        )
        graph = MultiDeviceGraph(lambda *x: x, [GraphPart(0, Loaded().version(0), Loaded().load)])
        assert [graph.serves(torch.device("cuda", i)) for i in range(3)] == [True, True, False]
        assert not graph.serves(torch.device("cpu"))
        assert not MultiDeviceGraph(lambda *x: x, [*graph._parts, None]).serves(torch.device("cuda", 0))


class TestWhyNot:
    SOURCE = "with torch.cuda._DeviceGuard(1):\n    pass\n"

    def test_what_can_be_loaded(self) -> None:
        assert unsupported_reason(compiled_for(self.SOURCE), [on_gpu(1), 3]) is None

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"device_types": {"cpu"}, "device_idxs": set()}, "cpu"),
            ({"device_types": {"cuda", "xpu"}}, "xpu"),
            ({"device_idxs": {0, 1}}, "cuda"),
            ({"constants": None}, "built in"),
            ({"frozen_param_names": {"weight": "w"}}, "built in"),
            ({"torchbind_constants": {"object": 1}}, "built in"),
            ({"source_code": "with torch.cuda.device(1):"}, "unknown way"),
        ],
    )
    def test_what_can_not(self, changes: dict[str, Any], why: str) -> None:
        assert why in (unsupported_reason(compiled_for(self.SOURCE, **changes), []) or "")

    def test_a_torch_that_it_is_not_tried_with(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "__version__", "2.16.0a0")
        assert "not tried" in (unsupported_reason(compiled_for(self.SOURCE), [on_gpu(1)]) or "")

    def test_a_random_generator(self) -> None:
        assert "generator" in (unsupported_reason(compiled_for(self.SOURCE), [torch.Generator()]) or "")

    def test_a_torch_that_keeps_things_elsewhere(self) -> None:
        compiled = compiled_for(self.SOURCE)
        del compiled.device_idxs
        assert "device_idxs" in (unsupported_reason(compiled, []) or "")


class TestBackend:
    def test_torchs_own_is_replaced_with_its_options(self) -> None:
        found = backend_of(torch.compile(nn.Linear(2, 2), mode="reduce-overhead").dynamo_ctx)
        assert found is not None
        backend = compiling_once(found)
        assert isinstance(backend, InductorBackend)
        assert backend._options["triton.cudagraphs"] is False

    def test_on_the_cpu_it_is_torchs(self, caplog: pytest.LogCaptureFixture) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        linear, x = nn.Linear(3, 4), torch.randn(5, 3)  # as below: its C++ is compiled once
        compiled = torch.compile(lambda t: linear(t).tanh() * 2, backend=InductorBackend({}))
        with caplog.at_level("INFO", "everygpu"):
            ours, eager = compiled(x), linear(x).tanh() * 2
        torch.testing.assert_close(ours, eager)
        for _ in range(2):  # backward may run again
            both = (y.square().sum() for y in (ours, eager))
            grads = [torch.autograd.grad(y, linear.parameters(), retain_graph=True) for y in both]
            torch.testing.assert_close(*grads)
        assert not [r for r in caplog.records if r.name == "everygpu"]


@pytest.fixture
def second_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have the CPU's code stand in for that of cuda:0, and all inputs be on cuda:1; returns what is compiled."""
    kept: list[Any] = []

    def none(compiled: Any, inputs: Any) -> None:
        compiled.device_idxs.add(0)
        kept.append(compiled)

    monkeypatch.setattr(inductor_backend, "unsupported_reason", none)
    monkeypatch.setattr(load_graph, "retarget", lambda source, old, new: f"{source}\nNEW = {new}\n")
    monkeypatch.setattr(inductor_backend, "device_index_of", lambda inputs: 1)
    monkeypatch.setattr(inductor_backend, "_is_same_kind", lambda a, b: True)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    torch.compiler.reset()
    return kept


def test_torchs_graphs_are_loaded_again(second_gpu: list[Any]) -> None:
    """All but the rewriting is torch's own."""
    torch.manual_seed(0)
    linear, x = nn.Linear(3, 4), torch.randn(5, 3)
    ours, expected = torch.compile(lambda t: linear(t).tanh() * 2, backend=InductorBackend({}))(x), linear(x).tanh() * 2
    torch.testing.assert_close(ours, expected)
    grads = [torch.autograd.grad(y.square().sum(), linear.parameters()) for y in (ours, expected)]
    torch.testing.assert_close(*grads)
    assert len(second_gpu) == 2
    for compiled in second_gpu:
        version = compiled.current_callable._versions[1]
        assert version._loaded.source_code.endswith("NEW = 1\n")
        assert list(version._loaded.device_idxs) == [1]
        assert list(compiled.device_idxs) == [0]
        assert "NEW" not in compiled.source_code
        assert version._run is not compiled.current_callable._versions[0]


def test_a_version_that_can_not_be_loaded_is_done_without(
    second_gpu: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*args: Any) -> Any:
        raise KeyError("is_backward")

    monkeypatch.setattr(inductor_backend, "load_version", failing)
    monkeypatch.setattr(inductor_backend, "device_index_of", lambda inputs: 0)
    made: list[Any] = []

    def keeping(graph: Any, inputs: Any) -> Any:
        made.append(InductorBackend({})(graph, inputs))
        return made[-1]

    torch.compile(lambda t: t.tanh() * 2, backend=keeping)(torch.ones(2))
    (graph,) = made
    assert isinstance(graph, MultiDeviceGraph)
    with caplog.at_level("WARNING", "everygpu"):
        assert not graph.serves(torch.device("cuda", 1))
        assert not graph.serves(torch.device("cuda", 1))
    assert len([r for r in caplog.records if "can't be loaded" in r.message]) == 1


def test_kernels_are_launched_as_was_fastest_on_the_first_gpu() -> None:
    def kernel(*configs: str) -> Any:
        return SimpleNamespace(launchers=[SimpleNamespace(config=c) for c in configs])

    tuned = {"a": kernel("wide"), "b": kernel("wide", "narrow"), "c": kernel("other"), "x": 3}
    fresh = {name: kernel("narrow", "wide") for name in "abcd"} | {"x": 3}
    _choose_same_configs(tuned, fresh)
    assert [launcher.config for launcher in fresh["a"].launchers] == ["wide"]
    assert all(len(fresh[name].launchers) == 2 for name in "bcd")
