"""What a replica raises arrives as it was raised, replica and device are named, and the next call is right.

In backward the message comes from torch's own engine, as on one device.
"""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo import lookup_backend

import everygpu
from everygpu.errors import ReplicaError
from everygpu.parallel.engines import compiled
from tests.faults.failing import BusyError, CompiledNet, Net, TwoArgumentsError, make_batch

KINDS = {"key": KeyError("missing"), "two arguments": TwoArgumentsError("net", line=3), "busy": BusyError()}


def causes(error: BaseException) -> Iterator[BaseException]:
    while error.__cause__ is not None:
        error = error.__cause__
        yield error


def check(model: everygpu.DataParallel, net: Net, place: str, replica: int, kind: str) -> None:
    """Have a replica raise; compare what arrives, and the gradients of the next call."""
    wanted, x = KINDS[kind], make_batch(2)
    net.place, net.replica, net.kind = place, replica, kind
    with pytest.raises(type(wanted)) as raised:
        model(x).square().sum().backward()
    net.place = ""
    error = raised.value
    assert (type(error), str(error), error.args) == (type(wanted), str(wanted), wanted.args)
    assert getattr(error, "line", None) == getattr(wanted, "line", None)
    named = [str(cause) for cause in causes(error) if isinstance(cause, ReplicaError)]
    if place == "forward":
        assert named == [f"forward: replica {replica} on cpu failed, called with args[0] (2, 4)."]
    else:
        assert named == []
    plain = Net()
    plain(x).square().sum().backward()
    net.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])


def check_all(model: everygpu.DataParallel, net: Net, engine: str) -> None:
    """Have each replica raise everywhere."""
    model(make_batch(2)).sum().backward()
    assert model.engine_in_use == engine
    for place in ("forward", "hook", "function"):
        for replica in (0, 1):
            for kind in KINDS if engine == "threads" else ("key",):
                check(model, net, place, replica, kind)


def test_in_threads() -> None:
    net = Net()
    check_all(everygpu.DataParallel(net, ["cpu"] * 2, engine="threads"), net, "threads")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
    monkeypatch.setattr(compiled, "InductorBackend", lambda _: lookup_backend("eager"))
    net = CompiledNet()
    check_all(everygpu.DataParallel(net, ["cpu"] * 2, engine="compile"), net, "compile")
