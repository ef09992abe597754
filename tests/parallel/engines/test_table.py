"""One promise, one table: an engine is chosen by its name."""

from typing import Any

import pytest
import torch
from torch import nn

import everygpu
from everygpu.errors import OptionError
from everygpu.parallel.call import Call, PerReplica
from everygpu.parallel.engines import table
from everygpu.parallel.engines.captured import CapturedReplicas
from everygpu.parallel.engines.compiled import CompiledReplicas
from everygpu.parallel.engines.engine import Engine, Wrapper
from everygpu.parallel.engines.threads import Workers


def make_net(*, compiled: bool) -> nn.Module:
    net = nn.Linear(3, 2)
    return torch.compile(net, backend="eager") if compiled else net  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "compiled", "kind", "compiles", "replays"),
    [
        ("auto", False, Workers, False, False),
        ("auto", True, CompiledReplicas, True, False),
        ("threads", True, Workers, False, False),
        ("compile", False, CompiledReplicas, True, False),
        ("capture", False, CapturedReplicas, False, True),
        ("capture", True, CapturedReplicas, True, True),
    ],
)
def test_engine_of_a_name(name: str, compiled: bool, kind: type, compiles: bool, replays: bool) -> None:
    engine = everygpu.DataParallel(make_net(compiled=compiled), ["cpu"] * 2, engine=name)._engine
    assert type(engine) is kind
    assert (engine.compiles, engine.replays) == (compiles, replays)


class InOrder(Engine):
    """Runs replicas one after another, and whole calls of one row in its own way."""

    in_use = "in order"
    replays = True

    def __init__(self, wrapper: Wrapper) -> None:
        self.wrapper = wrapper
        self.watched: list[int] = []
        self.is_closed = False

    def replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PerReplica | None:
        call = Call(positions=(0,), args=(args,), kwargs=(kwargs,), rows=None, weights=None)
        return PerReplica([self.wrapper.module(*args) + 1], call) if len(args[0]) == 1 else None

    def run(self, calls: Any, devices: Any, positions: Any = None) -> list[Any]:
        return [module(*args, **kwargs) for module, args, kwargs in calls]

    def watch(self, outputs: list[Any]) -> list[Any]:
        self.watched.append(len(outputs))
        return outputs

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("count", [1, 3])
def test_another_engine_keeps_the_same_promise(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(table, "make_engine", lambda name, wrapper: InOrder(wrapper))
    monkeypatch.setattr(table, "ENGINES", ("in order",))
    net = nn.Linear(3, 2)
    model = everygpu.DataParallel(net, ["cpu"] * count, engine="in order")
    x = torch.randn(6, 3)
    torch.testing.assert_close(everygpu.parallel.gather(model(x)), net(x))
    torch.testing.assert_close(model(x[:1]), net(x[:1]) + 1)
    engine: Any = model._engine
    assert engine.watched == [count]
    model.release()
    assert engine.is_closed
    assert model._engine is not engine


def test_a_name_that_is_not_in_the_table() -> None:
    with pytest.raises(OptionError, match=r"'compile', 'capture'\), got 'fast'"):
        everygpu.DataParallel(nn.Linear(3, 2), ["cpu"], engine="fast")


@pytest.mark.parametrize("count", [1, 2])
def test_threads_on_the_cpu_are_no_news(caplog: pytest.LogCaptureFixture, count: int) -> None:
    model = everygpu.DataParallel(nn.Linear(3, 2), ["cpu"] * count)
    model(torch.randn(4, 3))
    assert model.engine_in_use == "threads"
    assert caplog.messages == []


def test_one_device_without_captures_is_run_alone(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Linear(3, 2)
    model = everygpu.DataParallel(net, ["cpu"], engine="capture")
    x = torch.randn(4, 3)
    for _ in range(2):
        torch.testing.assert_close(model(x), net(x))
    assert model._replicas is None
    assert [r.message for r in caplog.records if "captures need GPUs" in r.message] == caplog.messages
    assert len(caplog.messages) == 1
