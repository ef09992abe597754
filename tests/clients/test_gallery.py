"""The real models of docs/gallery.md train, on two replicas, and save what they say."""

import importlib
from pathlib import Path

import pytest
import torch

from tests.site.running import run_page

pytest.importorskip("transformers")
transforms = pytest.importorskip("torchvision.transforms")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="transformers would take the GPUs")


@pytest.fixture
def photos(monkeypatch, tmp_path):
    """A folder of random images of two classes, and two replicas for models without a list of devices."""
    module = importlib.import_module("everygpu.parallel.data_parallel")  # the package has a function of this name
    monkeypatch.setattr(module, "own_devices", lambda group: ["cpu"] * 2)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    for kind in ("cat", "dog"):
        Path("photos", kind).mkdir(parents=True)
        for number in range(5):
            transforms.ToPILImage()(torch.rand(3, 80, 90)).save(f"photos/{kind}/{number}.png")


@pytest.mark.usefixtures("photos")
def test_each_model_trains():
    names = run_page("gallery")
    assert len(names["step"].model.replica_devices) == 2
    assert names["loss"].isfinite()
    assert {path.name for path in Path("classifier").iterdir()} >= {"config.json", "model.safetensors"}
    names.clear()
