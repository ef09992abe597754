"""Where figures of a run can go: the recipes of docs/recipes.md, as they stand."""

import pytest

from tests.site.trackers import run_recipe


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_tensorboard(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    names = run_recipe("SummaryWriter", {"SummaryWriter": tensorboard.SummaryWriter})
    names["writer"].close()
    found = EventAccumulator(str(tmp_path / "runs" / "digits")).Reload()
    assert found.Tags()["scalars"] == ["loss", "mean_loss", "grad_norm"]
    scalars = found.Scalars("mean_loss")
    assert [scalar.step for scalar in scalars] == [50, 100]
    assert scalars[-1].value == pytest.approx(names["meter"].value)


def test_weights_and_biases(monkeypatch, tmp_path):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    names = run_recipe("wandb.init", {"wandb": wandb})
    names["log"]({}, 101)  # a step is whole when the next one comes
    summary = dict(names["run"].summary)
    names["run"].finish()
    wandb.teardown()  # ends its service
    assert summary["mean_loss"] == pytest.approx(names["meter"].value)
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
