"""The code of docs/recipes.md, section by section, with the libraries themselves.

Sections without a library run in ``make test``, too.
"""

import importlib

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everygpu
from tests.clients.replacing import load_again
from tests.site.running import code_by_heading

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="some of these libraries would take the GPUs")

CODES = code_by_heading("recipes")


@pytest.fixture
def names(monkeypatch, tmp_path):
    """Give what readers of any section have, and have a model without a list of devices get two replicas."""
    module = importlib.import_module("everygpu.parallel.data_parallel")  # the package has a function of this name
    monkeypatch.setattr(module, "own_devices", lambda group: ["cpu"] * 2)
    for home in (nn, nn.parallel):
        monkeypatch.setattr(home, "DataParallel", home.DataParallel)  # put back after pages that replace it
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(8, 4), torch.arange(8) % 2
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    found = {"torch": torch, "everygpu": everygpu, "model": model, "optimizer": optimizer, "loader": loader}
    found |= {"x": x, "y": y, "criterion": nn.CrossEntropyLoss()}
    yield found
    found.clear()  # functions and classes of a section refer to it, and it to replicas


def gpt(transformers):
    sizes = {"vocab_size": 32, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32, "eos_token_id": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1))


def trainer(names, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    arguments = transformers.TrainingArguments(
        "run", max_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no"
    )
    assert arguments.device.type == "cpu"
    arguments._n_gpu = 2  # as on a machine with two
    tokens = torch.randint(32, (8, 6))
    return {
        "transformers": transformers,
        "model": gpt(transformers),
        "arguments": arguments,
        "data": [{"input_ids": t, "labels": t} for t in tokens],
    }


def with_lightning(names, monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it
    return {"lightning": pytest.importorskip("lightning")}


def with_accelerate(names, monkeypatch):
    state = pytest.importorskip("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    scheduler = torch.optim.lr_scheduler.StepLR(names["optimizer"], 2)
    return {"accelerate": pytest.importorskip("accelerate"), "scheduler": scheduler}


def metrics(names, monkeypatch):
    accuracy = pytest.importorskip("torchmetrics").Accuracy("multiclass", num_classes=2)
    score = pytest.importorskip("sklearn.metrics").roc_auc_score
    return {"model": everygpu.DataParallel(names["model"]), "accuracy": accuracy, "roc_auc_score": score}


def kernels(names, monkeypatch):
    gpytorch = pytest.importorskip("gpytorch")
    kernel = load_again("gpytorch.kernels.multi_device_kernel", monkeypatch).MultiDeviceKernel
    monkeypatch.setattr(gpytorch.kernels, "MultiDeviceKernel", kernel)  # as in a process that hasn't imported it yet
    return {"base_kernel": gpytorch.kernels.RBFKernel(), "devices": [torch.device("cpu")] * 2}


def graphs(names, monkeypatch):
    geometric = pytest.importorskip("torch_geometric")

    class Model(nn.Module):
        def forward(self, batch):
            return geometric.nn.global_mean_pool(batch.x, batch.batch)

    data = [geometric.data.Data(x=torch.randn(n, 3), edge_index=torch.zeros(2, 1, dtype=torch.int64)) for n in (2, 3)]
    return {"torch_geometric": geometric, "model": Model(), "graphs": data}


def with_timm(names, monkeypatch):
    timm = pytest.importorskip("timm")
    return {"timm": timm, "model": timm.models.VisionTransformer(img_size=32, embed_dim=8, depth=1, num_heads=2)}


GIVEN = {
    "transformers: Trainer": trainer,
    "Lightning": with_lightning,
    "Accelerate": with_accelerate,
    "torchmetrics, NumPy, scikit-learn": metrics,
    "GPyTorch": kernels,
    "PyTorch Geometric": graphs,
    "timm": with_timm,
}


@pytest.mark.parametrize("heading", CODES)
def test_code_of_recipes_runs(heading, names, monkeypatch):
    if heading in GIVEN:
        names |= GIVEN[heading](names, monkeypatch)
    exec(compile(CODES[heading], f"<recipes.md, {heading}>", "exec"), names)


def test_libraries_belong_to_sections():
    assert set(GIVEN) <= set(CODES)
