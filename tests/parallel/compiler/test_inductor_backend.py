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

from everygpu.parallel import switches
from everygpu.parallel.compiler import cuda_graph_trees, inductor_backend, load_graph, multi_device_graph
from everygpu.parallel.compiler.cuda_graph_trees import CAPTURING, CapturedGraph
from everygpu.parallel.compiler.inductor_backend import InductorBackend, compiling_once, inductor
from everygpu.parallel.compiler.load_graph import _choose_alike, unsupported_reason
from everygpu.parallel.compiler.multi_device_graph import GraphPart, MultiDeviceGraph, device_index_of
from everygpu.parallel.compiler.shared_graph import Recorder, backend_of

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


Managers = dict[int, Any]


@pytest.fixture
def managers(monkeypatch: pytest.MonkeyPatch) -> Managers:
    """What torch keeps for each GPU whose graphs it captures."""
    from torch._inductor import cudagraph_trees

    none = cudagraph_trees.ExecutionState.NONE
    made = {i: SimpleNamespace(stream=f"stream of {i}", path_state=none) for i in range(3)}
    monkeypatch.setattr(cudagraph_trees, "get_manager", made.__getitem__)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    return made


class OnGpu(Tensor):
    """A tensor that says that it is on a GPU, and notes on which streams it is used."""

    @staticmethod
    def __new__(cls, used: list[Any]) -> "OnGpu":
        return torch.ones(2).as_subclass(cls)

    def __init__(self, used: list[Any]) -> None:
        self._used = used

    @property
    def is_cuda(self) -> bool:
        return True

    def record_stream(self, stream: Any) -> None:
        self._used.append((self, stream))


class TestPart:
    def test_inputs_decide_where_it_runs(self) -> None:
        loaded = Loaded()
        part = GraphPart(0, loaded.version(0), loaded.load)
        for index in (0, 1, 3, 1, 0, 3):
            assert part([torch.empty(2), on_gpu(index), on_gpu(index)]) == [index]
        assert loaded.indices == [1, 3]

    def test_without_inputs_on_gpus_the_current_one_decides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
        assert device_index_of([torch.empty(2), 3]) == 5
        assert device_index_of([3, on_gpu(2)]) == 2

    @pytest.mark.parametrize("around", [lambda part: part, CapturedGraph], ids=["launches", "graphs"])
    def test_threads_load_a_version_once(self, around: Any, managers: Managers) -> None:
        loaded, results = Loaded(), []
        part = around(GraphPart(0, loaded.version(0), loaded.load))
        start = threading.Barrier(6)

        def run(index: int) -> None:
            start.wait()
            results.extend(part([on_gpu(index)]))

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
        assert not MultiDeviceGraph(lambda *x: x, [GraphPart(0), GraphPart(None)]).serves(torch.device("cuda", 0))


class TestCaptured:
    def test_only_replays_go_side_by_side(self, managers: Managers) -> None:
        held = []

        def run(inputs: list[Any]) -> Any:
            def look() -> None:
                held.append(not CAPTURING.acquire(blocking=False))
                if not held[-1]:
                    CAPTURING.release()

            other = threading.Thread(target=look)
            other.start()
            other.join()
            return inputs

        captured = CapturedGraph(run)
        # What torch was at when a run was over. With several forwards before a backward, it warms up more than once.
        for state in ("WARMUP", "WARMUP", "RECORDING", "RECORDING", "EXECUTION"):
            managers[0].path_state = type(managers[0].path_state)[state]
            captured([on_gpu(0)])
        assert held == [True] * 5
        captured([on_gpu(0)])
        assert held == [True] * 5 + [False]

    def test_passing_inputs_are_kept_from_others_while_torch_warms_up(
        self, managers: Managers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        used: list[Any] = []
        parameter, x, tangent = (OnGpu(used) for _ in range(3))
        CapturedGraph(lambda inputs: inputs, [0])([parameter, x, 3, torch.ones(2), tangent])
        assert [(tensor is x, tensor is tangent, stream) for tensor, stream in used] == [
            (True, False, "stream of 1"),
            (False, True, "stream of 1"),
        ]


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

    def test_a_random_generator(self) -> None:
        assert "generator" in (unsupported_reason(compiled_for(self.SOURCE), [torch.Generator()]) or "")

    @pytest.mark.parametrize("name", ["source_code", "device_idxs", "constants"])
    def test_a_torch_that_keeps_things_elsewhere(self, name: str) -> None:
        compiled = compiled_for(self.SOURCE)
        delattr(compiled, name)
        assert name in (unsupported_reason(compiled, []) or "")


class TestBackend:
    def test_torchs_own_is_replaced_with_its_options(self) -> None:
        found = backend_of(torch.compile(nn.Linear(2, 2), mode="reduce-overhead").dynamo_ctx)
        assert found is not None
        backend = compiling_once(found, cuda_graphs=True)
        assert isinstance(backend, InductorBackend)
        assert backend.uses_cuda_graphs
        assert not inductor(None).uses_cuda_graphs
        without = compiling_once(found, cuda_graphs=False)
        assert isinstance(without, InductorBackend)
        assert not without.uses_cuda_graphs

    def test_any_other_stays(self) -> None:
        def mine(graph: Any, inputs: Any) -> Any:
            return graph

        assert compiling_once(mine, cuda_graphs=False) is mine

    def test_on_the_cpu_it_is_torchs(self, caplog: pytest.LogCaptureFixture) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.randn(5, 3)
        compiled = torch.compile(net, backend=inductor(None))
        with caplog.at_level("INFO", "everygpu"):
            ours, eager = compiled(x), net(x)
        torch.testing.assert_close(ours, eager)
        grads = [torch.autograd.grad(y.square().sum(), net.parameters()) for y in (ours, eager)]
        torch.testing.assert_close(*grads)
        assert not [r for r in caplog.records if r.name == "everygpu"]


def test_backward_may_run_again() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2)), torch.randn(5, 3)
    compiled = torch.compile(net, backend=inductor(None))
    for _ in range(2):
        grads = []
        for y in (compiled(x), net(x)):
            net.zero_grad()
            y.square().sum().backward(retain_graph=True)
            y.square().sum().backward()
            grads.append([p.grad for p in net.parameters()])
        torch.testing.assert_close(*grads)


@pytest.fixture
def second_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have the CPU's code stand in for that of cuda:0, and all inputs be on cuda:1; returns what is compiled."""
    kept: list[Any] = []

    def none(compiled: Any, inputs: Any) -> None:
        compiled.device_idxs.add(0)
        kept.append(compiled)

    monkeypatch.setattr(inductor_backend, "unsupported_reason", none)
    monkeypatch.setattr(load_graph, "retarget", lambda source, old, new: f"{source}\nNEW = {new}\n")
    monkeypatch.setattr(multi_device_graph, "device_index_of", lambda inputs: 1)
    monkeypatch.setattr(multi_device_graph, "_is_same_kind", lambda a, b: True)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    torch.compiler.reset()
    return kept


def test_torchs_graphs_are_loaded_again(second_gpu: list[Any]) -> None:
    """All but the rewriting is torch's own."""
    torch.manual_seed(0)
    linear, x = nn.Linear(3, 4), torch.randn(5, 3)
    ours, expected = torch.compile(lambda t: linear(t).tanh() * 2, backend=inductor(None))(x), linear(x).tanh() * 2
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
    monkeypatch.setattr(multi_device_graph, "device_index_of", lambda inputs: 0)
    recorder = Recorder(inductor(None))
    compiled = torch.compile(lambda t: t.tanh() * 2, backend=recorder)
    with recorder.recording() as runs:
        compiled(torch.ones(2))
    graph = runs[0].function
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
    _choose_alike(tuned, fresh)
    assert [launcher.config for launcher in fresh["a"].launchers] == ["wide"]
    assert all(len(fresh[name].launchers) == 2 for name in "bcd")


class TestPartsOfAGraph:
    """What becomes of what torch's compiler returns for a forward or backward graph."""

    @pytest.fixture
    def compile_part(self, managers: Managers, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, list[Any]]]:
        backend = InductorBackend({})

        def run(inputs: list[Any]) -> list[Any]:
            return list(inputs)

        def compile_part(source: str, function: Any = lambda x: x + 1, **kwargs: Any) -> tuple[Any, list[Any]]:
            compiled, parts = compiled_for(source, current_callable=run), []
            monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", lambda *args, **more: compiled)
            graph = torch.fx.symbolic_trace(function)
            assert backend._compile_part(parts, graph, [on_gpu(1)], **kwargs) is compiled
            return compiled, parts

        return compile_part

    def test_one_that_can_be_shared(self, compile_part: Any) -> None:
        for is_backward in (False, True):
            compiled, parts = compile_part(TestWhyNot.SOURCE, cudagraphs=True, is_backward=is_backward)
            assert parts[0].serves(1)
            x = on_gpu(1)
            assert parts[0]([x])[0] is x
            assert (compiled.current_callable([x])[0] is x) == (not is_backward)

    def test_one_that_can_not_be_shared(self, compile_part: Any, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("INFO", "everygpu"):
            for graphs, is_backward, copies in ((True, True, True), (True, False, False), (False, True, False)):
                compiled, (part,) = compile_part("torch.cuda.device(1)", cudagraphs=graphs, is_backward=is_backward)
                assert not part.serves(1)
                x = on_gpu(1)
                assert (compiled.current_callable([x])[0] is not x) == copies
        assert len([r for r in caplog.records if "unknown way" in r.message]) == 1

    def test_one_that_is_switched_off(self, compile_part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(switches, "COMPILES_ONCE", False)
        compiled, (part,) = compile_part(TestWhyNot.SOURCE)
        assert not part.serves(1)
        x = on_gpu(1)
        assert compiled.current_callable([x])[0] is x

    def test_one_that_does_nothing(self, compile_part: Any) -> None:
        _, parts = compile_part("", lambda x: x, cudagraphs=True)
        assert parts == []


@pytest.mark.parametrize(
    ("backend", "may"),
    [(inductor(None), False), (inductor("reduce-overhead"), True), (lambda graph, inputs: graph, True)],
    ids=["launches", "graphs", "unknown"],
)
def test_results_are_copied_where_they_may_lie_in_a_graphs_memory(backend: Any, may: bool) -> None:
    assert Recorder(backend).may_capture == may


class TestCopies:
    """Of a backward graph's outputs, when CUDA graphs are used."""

    def test_outputs_move_to_memory_of_their_own(self, managers: Managers, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Tensor, "is_cuda", property(lambda t: True))
        monkeypatch.setattr(cuda_graph_trees, "device_index_of", lambda inputs: 0)
        kept = [torch.randn(3), None, torch.randn(4, 2).t(), torch.arange(3), torch.randn(0), 3]
        part = CapturedGraph(lambda inputs: kept, copies_outputs=True)
        for out, was in zip(part([]), kept, strict=True):
            if isinstance(was, Tensor):
                torch.testing.assert_close(out, was, rtol=0, atol=0)
                assert out.stride() == was.stride()
                assert out is not was
                assert was.numel() == 0 or out.data_ptr() != was.data_ptr()
            else:
                assert out is was

    def test_other_graphs_outputs_stay(self, managers: Managers) -> None:
        kept = [on_gpu(0)]
        assert CapturedGraph(GraphPart(0, lambda inputs: kept))([on_gpu(0)]) is kept
