"""``engine="auto"``: threads first, then captures that are proven, else threads for good."""

import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import everygpu
from everygpu.parallel.cuda_graphs import capture
from everygpu.parallel.cuda_graphs.batch_kinds import WINDOW
from everygpu.parallel.engines import table
from tests.parallel.cuda_graphs.forwards import Devices
from tests.parallel.test_python_worlds import Attention, ComputedBefore, WithEnums, check, with_dataclasses

# Importing torch's compiler warns of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PATIENCE = 40
"""More forwards than are run before capture is given up."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(4, 8), nn.Linear(8, 2), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x))) * self.scale


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Reading(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x.sum().item()


@pytest.fixture(autouse=True)
def looks_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have "auto" look for an engine on the CPU, too."""
    monkeypatch.setattr(table, "can_gain", lambda context: True)


def train(model: everygpu.DataParallel, num: int, rows: Any = lambda i: 6) -> list[str]:
    """Train, and return the engines that ran the steps."""
    optimizer, engines = torch.optim.SGD(model.parameters(), lr=0.01), []
    for i in range(num):
        torch.manual_seed(i)
        optimizer.zero_grad()
        model(torch.randn(rows(i), 4, device=model.src_device_obj)).square().mean().backward()
        optimizer.step()
        engines.append(model.engine_in_use)
    return engines


def check_beside_one_device(
    used: list[torch.device], num: int, first: str = "threads", wrap: Any = lambda net: net, **options: Any
) -> list[str]:
    """Train by default, and on one device by threads; values must be equal. Return the engines that ran the steps."""
    alone, net = Net().to(used[0]), Net().to(used[0])
    net.load_state_dict(alone.state_dict())
    engines = train(everygpu.DataParallel(wrap(net), used), num, **options)
    train(everygpu.DataParallel(alone, used[:1], engine="threads"), num, **options)
    assert (engines[0], engines[-1]) == (first, "capture")
    for ours, theirs in zip(net.parameters(), alone.parameters()):
        torch.testing.assert_close(ours, theirs)
    return engines


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_proven_is_captured(capturing: Devices, caplog: pytest.LogCaptureFixture, count: int) -> None:
    check_beside_one_device(capturing(count), 10)
    assert warnings_of(caplog) == []


def test_proofs_of_further_kinds_take_a_part_of_the_run(
    capturing: Devices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("ALLOWED_S", "ALLOWED_SHARE", "MAX_OPEN"):  # each kind is proven by itself, and one is too many
        monkeypatch.setattr(capture, name, 0)
    used = capturing(1)
    model = everygpu.DataParallel(Net().to(used[0]), used)
    engines = train(model, 45, rows=lambda i: 2 + i % 3)
    assert engines[-6:-3] == engines[-3:]
    assert sorted(engines[-3:]) == ["capture", "capture", "threads"]
    monkeypatch.setattr(capture, "ALLOWED_SHARE", 1e6)
    assert train(model, 9, rows=lambda i: 2 + i % 3)[-3:] == ["capture"] * 3
    assert warnings_of(caplog) == []


def test_hooks_of_forward_are_captured(capturing: Devices) -> None:
    used = capturing(1)
    net = Net().to(used[0])
    handle = net.a.register_forward_hook(lambda module, args, output: output * 2)
    model = everygpu.DataParallel(net, used)
    assert train(model, 8)[-1] == "capture"
    x = torch.randn(6, 4, device=used[0])
    torch.testing.assert_close(model(x), net(x))
    handle.remove()
    torch.testing.assert_close(model(x), net(x))


def test_one_device_that_is_not_captured_runs_the_module_itself(
    capturing: Devices, caplog: pytest.LogCaptureFixture
) -> None:
    used = capturing(1)
    net = Reading().to(used[0])
    model = everygpu.DataParallel(net, used)
    train(model, 8)
    (message,) = warnings_of(caplog)
    assert f" in test_auto.py:{Reading.forward.__code__.co_firstlineno + 1}" in message
    kept = [torch.zeros(6, 2)]
    net.forward = lambda x: kept  # type: ignore[method-assign]
    assert model(torch.randn(6, 4, device=used[0])) is kept


@pytest.mark.usefixtures("quick_guards")
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_wrapper_of_one_device_is_compiled_whole(capturing: Devices) -> None:
    torch.compiler.reset()
    used, made = capturing(1), []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append([str(node.target) for node in graph.graph.nodes])
        return graph

    net = Net().to(used[0])
    model = everygpu.DataParallel(net, used)
    compiled: Any = torch.compile(model, backend=backend)
    for _ in range(8):
        x = torch.randn(6, 4, device=used[0])
        compiled(x).square().mean().backward()
    assert len(made) == 1
    assert sum("linear" in target for target in made[0]) == 2
    torch.testing.assert_close(compiled(x), net(x))
    torch.compiler.reset()


def test_threads_evaluate_one_device_side_by_side(capturing: Devices) -> None:
    used = capturing(1)
    both = threading.Barrier(2)

    class Meeting(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            both.wait(60)
            return super().forward(x)

    model = everygpu.DataParallel(Meeting().to(used[0]), used)

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.randn(6, 4, device=used[0]))

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(evaluate) for _ in range(2)]:
            done.result()


@pytest.mark.usefixtures("quick_guards")
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_compiled_replicas_are_captured(capturing: Devices) -> None:
    torch.compiler.reset()
    wrap = functools.partial(torch.compile, backend="aot_eager")
    check_beside_one_device(capturing(2), 10, "compile", wrap)
    torch.compiler.reset()


@pytest.mark.parametrize("make", [WithEnums, with_dataclasses, Attention, ComputedBefore])
def test_python_around_a_model_is_followed(capturing: Devices, make: Callable[[], nn.Module]) -> None:
    check(make, capturing(2), num_steps=12)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Counting, "forward writes to module.calls in test_auto.py:"),
        (Reading, f" in test_auto.py:{Reading.forward.__code__.co_firstlineno + 1}"),
    ],
)
def test_one_line_says_why_replicas_stay_in_threads(
    capturing: Devices, caplog: pytest.LogCaptureFixture, kind: type[Net], reason: str
) -> None:
    used = capturing(2)
    net = kind().to(used[0])
    assert set(train(everygpu.DataParallel(net, used), PATIENCE)) == {"threads"}
    assert getattr(net, "calls", PATIENCE) == PATIENCE, "the threads run all of forward"
    (message,) = warnings_of(caplog)
    assert reason in message.partition("Not captured: ")[2]
    assert "everygpu run --processes auto" in message
    assert "\n" not in message


def test_the_line_comes_with_the_first_step_where_that_is_known(caplog: pytest.LogCaptureFixture) -> None:
    model = everygpu.DataParallel(Net(), ["cpu"] * 2)
    assert warnings_of(caplog) == []
    train(model, 1)
    (message,) = warnings_of(caplog)
    assert "Not captured: captures need GPUs" in message
    train(model, 3)
    assert warnings_of(caplog) == [message]


def test_batches_of_a_few_shapes_are_all_captured(capturing: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "ALLOWED_S", 1e6)  # proofs take longer on a busy machine
    num_kinds = 8
    engines = check_beside_one_device(capturing(2), 48, rows=lambda i: 2 + i % num_kinds)
    assert engines[-num_kinds:] == ["capture"] * num_kinds


def test_batches_whose_shapes_never_come_again_stay_in_threads(
    capturing: Devices, caplog: pytest.LogCaptureFixture
) -> None:
    used = capturing(2)
    engines = train(everygpu.DataParallel(Net().to(used[0]), used), WINDOW + PATIENCE, rows=lambda i: 2 + i)
    assert set(engines) == {"threads"}
    (message,) = warnings_of(caplog)
    assert "hardly any had the shapes of one before" in message


def test_weights_that_move_before_a_capture(capturing: Devices) -> None:
    """As those of recurrent layers, which may be laid out anew in each forward that isn't captured."""
    used = capturing(2)
    net = Net().to(used[0])
    model = everygpu.DataParallel(net, used)
    engines = []
    for _ in range(20):
        if model.engine_in_use != "capture":
            net.a.weight.data = net.a.weight.data.clone()
        engines += train(model, 1)
    assert engines[-10:] == ["capture"] * 10


def test_gradients_that_are_differentiated_again_are_not_captured(
    capturing: Devices, caplog: pytest.LogCaptureFixture
) -> None:
    used = capturing(2)
    net = Net().to(used[0])
    model = everygpu.DataParallel(net, used)
    for _ in range(8):
        loss = model(torch.randn(6, 4, device=used[0])).square().mean()
        grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        torch.stack([g.square().sum() for g in grads]).sum().backward()
    assert model.engine_in_use == "threads"
    (message,) = warnings_of(caplog)
    assert "Not captured: gradients are differentiated again" in message


def test_frozen_parameters_are_sent_by_each_replay(capturing: Devices) -> None:
    used = capturing(2)
    net = Net().to(used[0])
    net.a.requires_grad_(False)
    model = everygpu.DataParallel(net, used)
    assert train(model, 8)[-1] == "capture"
    x = torch.randn(6, 4, device=used[0])
    for write in (lambda: net.a.weight.data.mul_(2), lambda: net.a.bias.add_(1)):  # torch doesn't count the first
        for _ in range(3):
            write()
            torch.testing.assert_close(everygpu.parallel.gather(model(x)), net(x))
            assert model.engine_in_use == "capture"


def test_a_train_step_without_captures_says_why(caplog: pytest.LogCaptureFixture) -> None:
    model = everygpu.DataParallel(Net(), ["cpu"] * 2)
    step = everygpu.TrainStep(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), capture=False)
    for _ in range(3):
        step(torch.randn(6, 4), torch.randn(6, 2))
    assert step.stats().engine == "threads"
    (message,) = warnings_of(caplog)
    assert "Not captured: TrainStep was made with capture=False" in message
