"""Scripts that ``everygpu run`` runs in this process aren't watched: it goes on after them."""

import pytest


@pytest.fixture(autouse=True)
def unwatched(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Give the timeouts that were asked for."""
    asked: list[float] = []
    monkeypatch.setattr("everygpu.cli.run.watchdog", asked.append)
    return asked
