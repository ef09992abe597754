"""Parameters that arrive while the forward goes on: replicas never see those of the step before."""

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everygpu.parallel.last_product import Postponed
from everygpu.parallel.recording import arrivals, exchange
from everygpu.parallel.recording.bundle import Bundle
from everygpu.parallel.stand_in import StandIn
from tests.parallel.recording import training
from tests.parallel.recording.training import Negate

Devices = Callable[[int], list[torch.device]]


@pytest.fixture
def recording(either_way: Devices, monkeypatch: pytest.MonkeyPatch) -> Devices:
    """``devices`` on which forwards are recorded, with a bundle for each parameter."""
    monkeypatch.setattr(exchange.Exchange.__init__, "__defaults__", (1,))
    return either_way


class Net(nn.Module):
    """Of parameters that are used in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))
        self.scale.note = "scale"  # type: ignore[attr-defined]
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Any:
        assert isinstance(self.scale, nn.Parameter)
        assert self.scale.note == "scale"  # type: ignore[attr-defined]
        h = self.embedding(ids)
        for layer in self.layers:
            h = h + layer(h).tanh() * self.scale
        mixed, _ = self.attention(h, h, h)
        with torch.no_grad():
            size = self.layers[0].weight.abs().mean()  # no other weight is asked for
        h = self.norm(h + mixed) / size
        h = h + copy.deepcopy(self.layers[1])(h).detach()
        penalty = sum(p.square().mean() for p in self.parameters())
        return F.linear(h, self.embedding.weight) + penalty


class Custom(Net):
    """Gives a parameter to an autograd function."""

    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids) * Negate.apply(self.scale).mean()  # type: ignore[no-untyped-call]


class Hidden(Net):
    """Gives a parameter to what goes past torch's functions."""

    def forward(self, ids: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            doubled = self.scale * 2
        return super().forward(ids) * doubled.mean()


class Writing(Net):
    """Writes to a parameter."""

    def forward(self, ids: Tensor) -> Any:
        with torch.no_grad():
            self.scale.mul_(0.9)
        return super().forward(ids)


class WritingUncounted(Net):
    """Writes to a parameter in a way that torch doesn't count."""

    def forward(self, ids: Tensor) -> Any:
        self.scale.data.mul_(0.9)
        return super().forward(ids)


KEPT: list[Tensor] = []


class Keeping(Net):
    """Keeps its parameters."""

    def forward(self, ids: Tensor) -> Any:
        KEPT[:] = self.parameters()
        return super().forward(ids)


def loss_of(logits: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def train(make: Callable[[], nn.Module], used: list[torch.device], engine: str) -> tuple[Any, list[Tensor]]:
    make_optimizer = functools.partial(torch.optim.SGD, lr=0.02)
    return training.train(make, used, loss_of, make_optimizer, shape=(6, 5), vocabulary=12, engine=engine)


@pytest.mark.parametrize(
    ("make", "stands_in"),
    [(Net, True), (Custom, False), (Hidden, False), (Keeping, False), (Writing, False), (WritingUncounted, False)],
)
def test_parameters_are_those_of_the_step(recording: Devices, make: Any, stands_in: bool) -> None:
    used = recording(3)
    plain, ours = train(make, used, "threads"), train(make, used, "graphs")
    training.compare(ours, plain)
    recorder = ours[0]._recorder
    assert len(recorder._capture._recordings) == 1
    assert (arrivals.Arriving in recorder._allowed) is stands_in or not recorder.exchange.bundles[0].uses_kernels
    assert Postponed in recorder._allowed
    assert all(type(t) in (Tensor, nn.Parameter) for t in KEPT)
    KEPT.clear()


ROWS, CALLED = -1, -2


class Notes:
    """Threads, and what they wait for: a place among bundles, or ``ROWS``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._notes: list[tuple[int, int]] = []
        wait, send_rows = arrivals.Arrivals._wait, Bundle.send_rows
        monkeypatch.setattr(arrivals.Arrivals, "_wait", lambda me, place, d: self.add(place) or wait(me, place, d))
        monkeypatch.setattr(Bundle, "send_rows", lambda *args: self.add(ROWS) or send_rows(*args))

    def add(self, what: int) -> None:
        self._notes.append((threading.get_ident(), what))

    def of_second(self) -> list[int]:
        """Return what the second replica's thread noted while recording; the first waits for nothing."""
        (thread,) = {thread for thread, what in self._notes if what >= 0}
        found = [what for by, what in self._notes if by == thread]
        return found[next(i for i, what in enumerate(found) if what != CALLED) :]


def test_nobody_waits_beforehand(recording: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a replica uses has it wait, when it does; a table's rows have it wait for no others."""
    notes = Notes(monkeypatch)

    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            notes.add(CALLED)
            return super().forward(x)

    model, _ = train(lambda: nn.Sequential(nn.Embedding(40, 8), Noting(8, 12)), recording(2), "graphs")
    if model._recorder.exchange.bundles[0].uses_kernels:
        assert notes.of_second() == [ROWS, CALLED, 1, 2]


class Looking(nn.Module):
    """Looks rows up in ways that torch knows.

    Args:
        look: Given what is looked up, the table, and the module; returns rows.
        times: How many times as many are looked up as there is need of.
    """

    def __init__(self, look: Callable[..., Tensor], times: int = 1, **options: Any) -> None:
        super().__init__()
        self.table, self.linear, self.look, self.times = nn.Embedding(40, 8, **options), nn.Linear(8, 12), look, times

    def forward(self, ids: Tensor) -> Tensor:
        many = ids.repeat(1, self.times)
        found = self.look(many, self.table.weight, self.table)[:, : ids.shape[1]]
        return self.linear(5 * found)  # so that rows of the step before would tell


def spread_out(ids: Tensor) -> Tensor:
    """Return the same with gaps in memory."""
    return torch.stack([ids, ids], dim=-1)[..., 0]


LOOKS: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {
    "padding": (lambda: Looking(lambda ids, w, m: m(ids), padding_idx=3), [ROWS, 1, 2]),
    "gaps": (lambda: Looking(lambda ids, w, m: m(spread_out(ids))), [ROWS, 1, 2]),
    "int32": (lambda: Looking(lambda ids, w, m: m(ids.int())), [ROWS, 1, 2]),
    "twice": (lambda: Looking(lambda ids, w, m: m(ids) + m(11 - ids)), [ROWS, ROWS, 1, 2]),
    "function": (lambda: Looking(lambda ids, w, m: F.embedding(ids, w, 3)), [ROWS, 1, 2]),
    "no rows": (lambda: Looking(lambda ids, w, m: m(ids) + m(ids[:, :0]).sum()), [ROWS, 0, 1, 2]),
    "all of it, too": (lambda: Looking(lambda ids, w, m: m(ids) + w.mean()), [ROWS, 0, 1, 2]),
    "all of it before": (lambda: Looking(lambda ids, w, m: w.mean() + m(ids)), [0, 0, 1, 2]),
    "more than there is": (lambda: Looking(lambda ids, w, m: m(ids), times=9), [0, 1, 2]),
    "mapped": (lambda: Looking(lambda ids, w, m: torch.vmap(m)(ids)), [0, 1, 2]),
    "otherwise": (lambda: Looking(lambda ids, w, m: torch.embedding(w, ids)), [0, 1, 2]),
}


@pytest.mark.parametrize("name", LOOKS)
def test_rows_that_are_looked_up(recording: Devices, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Rows are those of the step, and waiting is for no more than is used."""
    make, waits = LOOKS[name]
    used = recording(2)
    plain = train(make, used, "threads")
    notes = Notes(monkeypatch)
    ours = train(make, used, "graphs")
    training.compare(ours, plain)
    assert len(ours[0]._recorder._capture._recordings) == 1
    if ours[0]._recorder.exchange.bundles[0].uses_kernels:
        assert notes.of_second() == waits


def test_rows_that_are_written_as_they_are_looked_up(recording: Devices) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(40, 8, max_norm=0.5), nn.Linear(8, 12))

    used = recording(2)
    training.compare(train(make, used, "graphs"), train(make, used, "threads"))


def test_order_of_asking_is_that_of_sending(recording: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order in which parameters were made."""
    sent: list[tuple[int, ...]] = []
    send = Bundle.send
    monkeypatch.setattr(Bundle, "send", lambda me: sent.append(tuple(me.originals[0].shape)) or send(me))

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.last, self.first = nn.Linear(1, 3), nn.Linear(6, 12), nn.Linear(8, 6)
            self.table = nn.Embedding(40, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(F.linear(self.table(ids), self.first.weight), self.last.weight)

    model, _ = train(Backwards, recording(2), "graphs")
    if model._recorder.exchange.bundles[0].uses_kernels:
        assert sent[-7:] == [(6, 8), (12, 6), (3, 1), (3,), (12,), (6,), (40, 8)]


def test_compiled_blocks_are_given_parameters(recording: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, list[type]] = {8: [], 12: []}

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen[self.out_features].append(type(self.weight))
            return super().forward(x)

    def make() -> nn.Module:
        net = nn.Sequential(nn.Embedding(12, 8), Block(8, 8), Block(8, 12))
        net[1]._compiled_call_impl = net[1]._call_impl  # as compile() sets it
        return net

    model, _ = train(make, recording(2), "graphs")
    assert len(model._recorder._capture._recordings) == 1
    assert arrivals.Arriving in model._recorder._allowed
    assert StandIn not in [kind.__base__ for kind in seen[8]]
    assert (StandIn in [kind.__base__ for kind in seen[12]]) is model._recorder.exchange.bundles[0].uses_kernels


def test_replicas_are_as_before(recording: Devices) -> None:
    model, _ = train(Net, recording(2), "graphs")
    for replica in model._recorder._modules:
        assert all(type(p) in (Tensor, nn.Parameter) for p in replica.parameters())
