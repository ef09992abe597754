"""Recipes that need no other library."""

import csv
from contextlib import ExitStack

import pytest

from tests.site.trackers import run_recipe


def test_figures_go_into_a_csv_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        names = run_recipe("csv.writer", {"csv": csv, "open": lambda *a, **k: stack.enter_context(open(*a, **k))})
        # Each line is there when it is logged, before the file is closed.
        first, last = csv.reader((tmp_path / "steps.csv").read_text().splitlines())
    assert [first[0], last[0]] == ["50", "100"]
    stats = names["step"].stats()
    assert [float(cell) for cell in last[1:]] == pytest.approx([stats.loss, names["meter"].value, stats.grad_norm])
