"""The engines that equality and conformance tests run by: a file takes part by ``pytestmark``, as in
``pytestmark = pytest.mark.usefixtures("engine")``.
"""

import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from everygpu.parallel.engines import table
from everygpu.parallel.engines.engine import Engine, EngineContext
from tests.parallel.engines.processes.pool import HelperPool


@dataclass(frozen=True, kw_only=True)
class TestedEngine:
    """An engine to run tests by."""

    __test__ = False

    name: str
    is_slow: bool = False
    """Whether it runs only the tests that are marked ``every_engine``."""
    marks: tuple[pytest.MarkDecorator, ...] = ()


ENGINES = (TestedEngine(name="threads"), TestedEngine(name="processes", is_slow=True))
"""A new engine is a line here."""


def engines_of(markers: Iterable[pytest.Mark], engines: Iterable[TestedEngine]) -> list[TestedEngine]:
    """Return the engines that a test with these markers runs by: fast ones, all of them, or those that it names."""
    found = list(markers)
    named = {name for mark in found if mark.name == "engines" for name in mark.args}
    takes_slow = any(mark.name == "every_engine" for mark in found)
    return [e for e in engines if (e.name in named if named else takes_slow or not e.is_slow)]


def _names(parameters: str | Sequence[str]) -> Sequence[str]:
    return parameters.replace(" ", "").split(",") if isinstance(parameters, str) else parameters


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    markers = list(metafunc.definition.iter_markers())
    chooses = any(mark.name == "parametrize" and "engine" in _names(mark.args[0]) for mark in markers)
    if "engine" in metafunc.fixturenames and not chooses:
        params = [pytest.param(e.name, marks=e.marks) for e in engines_of(markers, ENGINES)]
        metafunc.parametrize("engine", params, indirect=True)


@pytest.fixture
def quick_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Don't have the compiler measure for its log how long guards take: it empties the processor's caches first."""
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)


@pytest.fixture
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, helpers: HelperPool) -> Iterator[str]:
    """Have ``engine="auto"`` choose one engine for all modules that aren't compiled; return its name.

    Tests so say nothing of engines, and one that passes ``engine=...`` gets that.
    """
    tested: str = request.param

    def make_engine(name: str, context: EngineContext) -> Engine:
        is_free = name == "auto" and table.choose_engine(name, context) in ("threads", "auto")
        return table.make_engine(tested if is_free else name, context)

    # By its name: the package has a function that is called so, too.
    module = importlib.import_module("everygpu.parallel.data_parallel")
    monkeypatch.setattr(module, "make_engine", make_engine)
    with helpers.serving():
        yield tested
