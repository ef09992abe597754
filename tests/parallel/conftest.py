"""Fixtures of the tests of DataParallel."""

import pytest

from everygpu.parallel.engines import table


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``engine="auto"`` choose threads on GPUs, too; a file takes part by ``pytestmark``."""
    monkeypatch.setattr(table, "can_gain", lambda context: False)


@pytest.fixture
def quick_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Don't have the compiler measure for its log how long guards take: it empties the processor's caches first."""
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
