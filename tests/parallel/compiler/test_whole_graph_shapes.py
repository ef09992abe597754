"""Proofs that leave shapes open."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everygpu.parallel.compiler.whole_graph import WholeGraph
from everygpu.parallel.cuda_graphs import capture
from everygpu.parallel.cuda_graphs.capture import ForwardProofs
from everygpu.parallel.scatter.split import ScatterSpec

# Importing torch's compiler warns of torch.jit.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.usefixtures("quick_guards")]

SPEC = ScatterSpec(devices=(torch.device("cpu"),) * 2, dim=0, split="chunk")


class Encoder(nn.Module):
    """Of batches of any length; long ones take another way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(9, 4), nn.Linear(4, 4)
        self.register_buffer("positions", torch.randn(1, 64, 4))
        self.scale, self.log = 1.0, list[int]()

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids) + self.positions[:, : ids.shape[1]]
        if ids.shape[1] > 20:
            h = h[:, ::2]
        found: Tensor = self.layer(h).mean(1) * self.scale / ids.shape[1]
        return found


def ids(rows: int, length: int) -> Tensor:
    return torch.zeros(rows, length, dtype=torch.long)


def test_other_shapes_hold_on_the_same_way_through_forward() -> None:
    net = Encoder()
    graph = WholeGraph(net)
    assert graph.prove((ids(4, 7),), {}, any_shapes=True) is None
    assert graph.holds((ids(4, 7),), {})
    assert graph.holds((ids(4, 12),), {})
    assert graph.holds((ids(5, 20),), {})
    assert not graph.holds((ids(4, 21),), {})
    assert not graph.holds((ids(4, 7).int(),), {})
    net.scale = 2.0
    assert not graph.holds((ids(4, 7),), {})


class Reading(Encoder):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * ids.sum().item()


class Logging(Encoder):
    def forward(self, ids: Tensor) -> Tensor:
        self.log.append(ids.shape[1])
        return super().forward(ids)


@pytest.mark.parametrize("kind", [Reading, Logging])
def test_what_a_capture_would_not_repeat_is_refused(kind: Callable[[], nn.Module]) -> None:
    assert WholeGraph(kind()).prove((ids(4, 7),), {}, any_shapes=True) is not None


class Looping(Encoder):
    def forward(self, ids: Tensor) -> Tensor:
        return sum(super(Looping, self).forward(ids) + i for i in range(ids.shape[1]))  # type: ignore[return-value]


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note each proof: whether it has left shapes open."""
    made: list[bool] = []

    class Counted(WholeGraph):
        def prove(self, args: Any, kwargs: Any, *, any_shapes: bool = False) -> str | None:
            made.append(any_shapes)
            return super().prove(args, kwargs, any_shapes=any_shapes)

    monkeypatch.setattr(capture, "WholeGraph", Counted)
    return made


def test_one_proof_serves_for_many_lengths(proofs: list[bool]) -> None:
    net, known = Encoder(), ForwardProofs()
    found = [known.find(net, ((ids(4, n),), {}, ()), SPEC, is_first=n == 7) for n in (7, 8, 9, 12, 20)]
    assert proofs == [False, True]
    known.find(net, ((ids(4, 30),), {}, ()), SPEC, is_first=False)
    assert proofs == [False, True, True]
    assert all(not isinstance(proof, str) and proof() for proof in found)
    net.scale = 2.0
    assert not any(not isinstance(proof, str) and proof() for proof in found)
    known.find(net, ((ids(4, 7),), {}, ()), SPEC, is_first=True)
    assert proofs == [False, True, True, False]
    assert len(known._graphs) == 1


def test_modules_that_are_traced_for_each_shape_are_not_traced_twice_for_each(
    proofs: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "MAX_OPEN", 1)
    net, known = Looping(), ForwardProofs()
    for length in (2, 3, 4, 5):
        assert not isinstance(known.find(net, ((ids(4, length),), {}, ()), SPEC, is_first=length == 2), str)
    assert proofs == [False, True, False, False]


class Mixed(Encoder):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) @ torch.ones(3, 3)


def test_the_reason_has_the_error_of_the_operation() -> None:
    reason = WholeGraph(Mixed()).prove((ids(4, 7),), {})
    assert reason is not None
    assert "must have same reduction dim" in reason
