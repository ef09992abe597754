"""The models that come along: each trains, at a size for the CPU."""

import pytest
import torch

import everygpu
from everygpu.bench.training import Training, compute_loss, list_batches
from everygpu.bench.workloads import MODELS, bert, gpt
from tests.bench import own

SMALL = {"bert": own.small_bert, "tiny": gpt.tiny}


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
    assert [key for key, p in model.named_parameters() if not p.grad.isfinite().all()] == []
    assert any(not torch.equal(before[key], p) for key, p in model.named_parameters())


def test_what_the_classifier_returns_keeps_its_class():
    model, _, _, batches = make("bert")
    output = everygpu.DataParallel(model, ["cpu"] * 2)(**batches.items[0])
    assert type(output) is bert.ModelOutput
    assert output.logits.shape == (4, 2)


def test_bert_has_its_size():
    with torch.device("meta"):
        assert sum(p.numel() for p in bert.BertClassifier().parameters()) == 109_482_242
