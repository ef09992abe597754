"""The recipe of docs/recipes.md that needs no other library."""

import csv

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import everygpu
from tests.site.running import code_by_heading


def test_figures_go_into_a_csv_file(monkeypatch, tmp_path):
    """Train for 100 steps of a tiny model, and log twice."""
    monkeypatch.chdir(tmp_path)
    model = everygpu.DataParallel(torch.nn.Linear(4, 3), ["cpu"] * 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = everygpu.TrainStep(model, torch.nn.CrossEntropyLoss(), optimizer, clip_norm=1.0)
    loader = DataLoader(TensorDataset(torch.randn(200, 4), torch.randint(0, 3, (200,))), batch_size=2)
    with open("steps.csv", "w", newline="", buffering=1) as file:
        names = {"csv": csv, "open": lambda *_, **__: file, "everygpu": everygpu, "step": step, "loader": loader}
        exec(code_by_heading("recipes")["TensorBoard, W&B, CSV: logging metrics"], names)
        # Each line is there when it is logged, before the file is closed.
        first, last = csv.reader((tmp_path / "steps.csv").read_text().splitlines())
    assert [first[0], last[0]] == ["50", "100"]
    stats = step.stats()
    assert [float(cell) for cell in last[1:]] == pytest.approx([stats.loss, names["meter"].avg, stats.grad_norm])
