"""By which engines a test runs: the fixture ``engine`` and its markers."""

import pytest
import torch
from torch import nn

import everygpu
from everygpu.parallel.engines.compiled import CompiledReplicas
from everygpu.parallel.engines.graphs import RecordedReplicas
from everygpu.parallel.engines.threads import Workers
from tests.parallel.conftest import ENGINES, TestedEngine, engines_of

NAMED = (TestedEngine(name="one"), TestedEngine(name="other"), TestedEngine(name="slow", is_slow=True))


@pytest.mark.parametrize(
    ("markers", "names"),
    [
        ([], ["one", "other"]),
        ([pytest.mark.every_engine], ["one", "other", "slow"]),
        ([pytest.mark.engines("one")], ["one"]),
        ([pytest.mark.engines("slow", "one")], ["one", "slow"]),
        ([pytest.mark.gpu], ["one", "other"]),
        ([pytest.mark.engines("of another list")], []),
    ],
)
def test_markers_choose_engines(markers: list[pytest.MarkDecorator], names: list[str]) -> None:
    assert [e.name for e in engines_of([m.mark for m in markers], NAMED)] == names


@pytest.mark.parametrize(("engine", "kind"), [("threads", Workers), ("graphs", RecordedReplicas)], indirect=["engine"])
def test_auto_is_the_engine_of_the_test(engine: str, kind: type) -> None:
    assert type(everygpu.DataParallel(nn.Linear(3, 2), ["cpu"] * 2)._engine) is kind


@pytest.mark.parametrize("engine", ["graphs"], indirect=True)
def test_an_engine_that_a_test_passes_is_kept(engine: str) -> None:
    assert type(everygpu.DataParallel(nn.Linear(3, 2), ["cpu"] * 2, engine="threads")._engine) is Workers
    compiled = torch.compile(nn.Linear(3, 2), backend="eager")
    assert type(everygpu.DataParallel(compiled, ["cpu"] * 2)._engine) is CompiledReplicas


def test_a_test_runs_by_each_engine(request: pytest.FixtureRequest, engine: str) -> None:
    assert engine in {e.name for e in ENGINES}
    assert f"[{engine}]" in request.node.name
