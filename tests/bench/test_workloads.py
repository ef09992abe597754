"""The models that come along: each trains, at a size for the CPU."""

import pytest
import torch

import everygpu
from everygpu.bench.training import Training, compute_loss, list_batches
from everygpu.bench.workloads import DEFAULT, DYNAMIC, MODELS, bert, gpt, moe, unet
from tests.bench import own

SMALL = {
    "bert": own.small_bert,
    "tiny": gpt.tiny,
    "moe": lambda: moe.moe(rows=32, width=8, num_layers=2),
    "unet": lambda: unet.unet(rows=2, size=16, widths=(4, 8, 16)),
}


def make(name):
    torch.manual_seed(0)
    return Training(*SMALL[name]())


@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_it_trains(name, is_bf16):
    model, loss, optimizer, batch = make(name)
    assert name in MODELS
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    for one in list_batches(batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            found = compute_loss(model, loss, one)
        assert found.shape == ()
        assert found.isfinite()
        found.backward()
    optimizer.step()
    unused = {key for key, p in model.named_parameters() if p.grad is None}
    assert not unused or name in DYNAMIC
    assert all(p.grad.isfinite().all() for key, p in model.named_parameters() if key not in unused)
    assert any(not torch.equal(before[key], p) for key, p in model.named_parameters())


def test_what_the_classifier_returns_keeps_its_class():
    model, _, _, batches = make("bert")
    output = everygpu.DataParallel(model, ["cpu"] * 2)(**batches.items[0])
    assert type(output) is bert.ModelOutput
    assert output.logits.shape == (4, 2)


def test_models_have_their_sizes():
    def count(model):
        return sum(p.numel() for p in model.parameters())

    with torch.device("meta"):
        assert count(bert.BertClassifier()) == 109_482_242
        assert count(unet.UNet()) == 31_038_933
    assert {*DEFAULT, *DYNAMIC} <= MODELS.keys()
