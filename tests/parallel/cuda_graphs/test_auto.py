"""``engine="auto"``: threads first, then recordings that are proven, else helper processes, else threads again."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import everygpu
from everygpu.parallel import switches
from everygpu.parallel.cuda_graphs.batch_kinds import WINDOW
from everygpu.parallel.engines import auto, table
from everygpu.parallel.engines.threads import Workers
from tests.parallel.cuda_graphs.forwards import Devices

# Importing torch's compiler warns of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PATIENCE = 40
"""More forwards than are run before recording is given up."""


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


class FakeProcesses(Workers):
    """In place of helpers, which take seconds to start."""

    made: "list[FakeProcesses]"

    def __init__(self, context: Any) -> None:
        super().__init__(len(context.devices) - 1)
        self.reason: str | None = None
        self.has_told = self.has_started = self.is_closed = False
        self.made.append(self)

    def start(self) -> None:
        self.has_started = True

    @property
    def in_use(self) -> str:
        return "processes"

    def is_ready(self) -> bool:
        return self.has_started

    def refuse_direct(self) -> None:
        """Nothing is prepared for these."""

    def close(self) -> None:
        super().close()
        self.is_closed = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeProcesses]]:
    """Have "auto" look for an engine on the CPU, too, and return the helpers it makes."""
    monkeypatch.setattr(table, "choose_engine", lambda name, context: name)
    monkeypatch.setattr(FakeProcesses, "made", [], raising=False)
    monkeypatch.setattr(auto, "ProcessReplicas", FakeProcesses)
    monkeypatch.setattr(auto, "NUM_PERIODS", 4)
    monkeypatch.setattr(switches, "TRIES_PROCESSES", True)
    yield FakeProcesses.made
    for helpers in FakeProcesses.made:
        helpers.close()


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


def test_what_is_proven_is_recorded(recording: Devices, made: list[FakeProcesses]) -> None:
    used = recording(2)
    alone, net = Net().to(used[0]), Net().to(used[0])
    net.load_state_dict(alone.state_dict())
    engines = train(everygpu.DataParallel(net, used), 10)
    train(everygpu.DataParallel(alone, [used[0]]), 10)
    assert engines[0] == "threads"
    assert engines[-1] == "graphs"
    for ours, theirs in zip(net.parameters(), alone.parameters()):
        torch.testing.assert_close(ours, theirs)
    assert not made


def test_an_attribute_that_changes_between_steps_is_followed(recording: Devices, made: list[FakeProcesses]) -> None:
    used = recording(2)
    net = Net().to(used[0])
    model = everygpu.DataParallel(net, used)
    assert train(model, 8)[-1] == "graphs"
    net.scale = 2.0
    x = torch.randn(6, 4, device=used[0])
    torch.testing.assert_close(everygpu.gather(model(x)), net(x))


def test_what_changes_python_state_goes_to_processes(
    recording: Devices, made: list[FakeProcesses], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="everygpu")
    used = recording(2)
    net = Counting().to(used[0])
    engines = train(everygpu.DataParallel(net, used), PATIENCE)
    assert "graphs" not in engines
    assert "processes" in engines
    assert net.calls == PATIENCE
    assert caplog.text.count("replicas run in processes from now on") == 1


def test_batches_of_a_few_shapes_are_all_recorded(recording: Devices, made: list[FakeProcesses]) -> None:
    used = recording(2)
    alone, net = Net().to(used[0]), Net().to(used[0])
    net.load_state_dict(alone.state_dict())
    num_kinds, num_steps = 8, 48
    model = everygpu.DataParallel(net, used)
    engines = train(model, num_steps, rows=lambda i: 2 + i % num_kinds)
    train(everygpu.DataParallel(alone, [used[0]]), num_steps, rows=lambda i: 2 + i % num_kinds)
    assert engines[-num_kinds:] == ["graphs"] * num_kinds
    for ours, theirs in zip(net.parameters(), alone.parameters()):
        torch.testing.assert_close(ours, theirs)
    assert not made


def test_batches_whose_shapes_never_come_again_go_to_processes(
    recording: Devices, made: list[FakeProcesses], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="everygpu")
    used = recording(2)
    engines = train(everygpu.DataParallel(Net().to(used[0]), used), WINDOW + PATIENCE, rows=lambda i: 2 + i)
    assert "processes" in engines
    assert "hardly any had the shapes of one before" in caplog.text


def test_weights_that_move_before_a_recording(recording: Devices, made: list[FakeProcesses]) -> None:
    """As those of recurrent layers, which may be laid out anew in each forward that isn't recorded."""
    used = recording(2)
    net = Net().to(used[0])
    model = everygpu.DataParallel(net, used)
    engines = []
    for _ in range(20):
        if model.engine_in_use != "graphs":
            net.a.weight.data = net.a.weight.data.clone()
        engines += train(model, 1)
    assert engines[-10:] == ["graphs"] * 10


def test_a_smaller_last_batch_leaves_recordings(recording: Devices, made: list[FakeProcesses]) -> None:
    used = recording(2)
    model = everygpu.DataParallel(Net().to(used[0]), used)
    engines = train(model, 3 * PATIENCE, rows=lambda i: 6 if i % 6 < 5 else 3)
    assert engines[-1] == "graphs"
    assert not made


def test_gradients_that_are_differentiated_again_are_not_recorded(
    recording: Devices, made: list[FakeProcesses], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="everygpu")
    used = recording(2)
    net = Net().to(used[0])
    model = everygpu.DataParallel(net, used)
    for _ in range(8):
        loss = model(torch.randn(6, 4, device=used[0])).square().mean()
        grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        torch.stack([g.square().sum() for g in grads]).sum().backward()
    assert model.engine_in_use != "graphs"
    assert model._engine._why_not_recorded.startswith("gradients are differentiated again")


def test_frozen_parameters_are_sent_by_each_launch(recording: Devices, made: list[FakeProcesses]) -> None:
    used = recording(2)
    net = Net().to(used[0])
    net.a.requires_grad_(False)
    model = everygpu.DataParallel(net, used)
    assert train(model, 8)[-1] == "graphs"
    x = torch.randn(6, 4, device=used[0])
    for write in (lambda: net.a.weight.data.mul_(2), lambda: net.a.bias.add_(1)):  # torch doesn't count the first
        for _ in range(3):
            write()
            torch.testing.assert_close(everygpu.gather(model(x)), net(x))
            assert model.engine_in_use == "graphs"
    assert not made


def test_one_line_says_why_replicas_stay_in_threads(
    made: list[FakeProcesses], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeProcesses, "start", lambda self: setattr(self, "reason", "attribute lock can't be sent"))
    assert set(train(everygpu.DataParallel(Net(), ["cpu"] * 2), 12)) == {"threads"}
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "attribute lock can't be sent" in record.message
    assert "Not recorded: recordings need GPUs" in record.message


def test_processes_are_not_tried_unless_switched_on(
    made: list[FakeProcesses], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(switches, "TRIES_PROCESSES", False)
    assert set(train(everygpu.DataParallel(Net(), ["cpu"] * 2), 20)) == {"threads"}
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "pass engine='processes'" in record.message
    assert not made[0].has_started


@pytest.mark.parametrize("is_faster", [True, False])
def test_processes_that_are_slower_are_left(
    made: list[FakeProcesses], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_faster: bool
) -> None:
    clock = {"now": 0.0}
    monkeypatch.setattr(auto.time, "perf_counter", lambda: clock["now"])
    model = everygpu.DataParallel(Net(), ["cpu"] * 2)
    engines = []
    for _ in range(40):
        engines += train(model, 1)
        clock["now"] += 0.8 if engines[-1] == "processes" and is_faster else 1.2 if engines[-1] == "processes" else 1
    assert engines[:8] == ["threads"] * 8
    assert "processes" in engines
    assert engines[-1] == ("processes" if is_faster else "threads")
    assert made[0].is_closed is not is_faster
    assert ("steps took 1200.0 ms there, and 1000.0 ms in threads" in caplog.text) is not is_faster


def test_helpers_without_memory_are_left(
    made: list[FakeProcesses], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(*_: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(FakeProcesses, "run", run)
    assert set(train(everygpu.DataParallel(Net(), ["cpu"] * 2), 20)) == {"threads"}
    assert made[0].is_closed
    assert caplog.text.count("there is too little GPU memory for them") == 1


def test_forwards_without_gradients_are_no_steps(made: list[FakeProcesses]) -> None:
    model = everygpu.DataParallel(Net(), ["cpu"] * 2)
    with torch.no_grad():
        for _ in range(30):
            model(torch.randn(6, 4))
    assert model.engine_in_use == "threads"
    assert model._engine._periods.median_ms("threads") is None


def test_train_step_without_recordings_may_use_processes(
    made: list[FakeProcesses], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto.Periods, "median_ms", lambda self, engine: 2.0 if engine == "threads" else 1.0)
    model = everygpu.DataParallel(Net(), ["cpu"] * 2)
    step = everygpu.TrainStep(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), capture=False)
    for _ in range(20):
        step(torch.randn(6, 4), torch.randn(6, 2))
    assert step.stats().engine == "processes"


def test_the_choice_by_devices_and_module() -> None:
    assert everygpu.DataParallel(Net(), ["cpu"] * 2).engine_in_use == "threads"
    assert everygpu.DataParallel(Net(), ["cpu"]).engine_in_use == "threads"
    assert everygpu.DataParallel(torch.compile(Net()), ["cpu"] * 2).engine_in_use == "compile"
