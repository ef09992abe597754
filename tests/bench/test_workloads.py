"""The models that come along: each trains, at a size for the CPU."""

import copy

import pytest
import torch

import everygpu
from everygpu.bench.batches import list_batches
from everygpu.bench.training import Training, compute_loss
from everygpu.bench.workloads import MODELS, bert, images, llama, lstm, moe, unet
from tests.bench import own

SMALL = {
    "bert": own.small_bert,
    "llama": lambda: llama.llama(
        rows=2, length=8, vocabulary=30, width=16, num_blocks=2, num_heads=4, num_kv_heads=2, hidden=24
    ),
    "lstm": lambda: lstm.lstm(rows=2, length=8, vocabulary=30, width=8),
    "unet": lambda: unet.unet(rows=2, size=16, widths=(8, 16, 24)),
    "moe": own.small_moe,
    "efficientnet": lambda: images.efficientnet(rows=2, size=32, num_classes=3),
    "vit": lambda: images.vit(rows=2, size=32, num_classes=3),
}


def make(name):
    if name in ("efficientnet", "vit"):
        pytest.importorskip("torchvision")
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


@pytest.mark.parametrize("name", ["bert", "moe", "llama"])
def test_two_devices_do_as_one(name):
    model, loss, _, batch = make(name)
    net = everygpu.DataParallel(copy.deepcopy(model), ["cpu"] * 2)
    for one in list_batches(batch):
        model.zero_grad()
        net.zero_grad()
        alone, spread = compute_loss(model, loss, one), compute_loss(net, loss, one)
        alone.backward()
        spread.backward()
        torch.testing.assert_close(spread, alone)
        grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        torch.testing.assert_close({key: p.grad for key, p in net.module.named_parameters()}, grads)


def test_what_the_classifier_returns_keeps_its_class():
    model, _, _, batches = make("bert")
    output = everygpu.DataParallel(model, ["cpu"] * 2)(**batches.items[0])
    assert type(output) is bert.ModelOutput
    assert output.logits.shape == (4, 2)


def test_padding_changes_nothing():
    model, _, _, batches = make("bert")
    for p in model.parameters():
        torch.nn.init.normal_(p)  # so that every token counts
    batch = batches.items[0]
    shorter = {key: x[1:2] for key, x in batch.items()}
    length = int(shorter["attention_mask"].sum())
    cut = {key: x[:, :length] if x.ndim > 1 else x for key, x in shorter.items()}
    assert length < shorter["input_ids"].shape[1]
    torch.testing.assert_close(model(**cut).logits, model(**shorter).logits)


def test_sentences_have_many_lengths_and_always_the_same():
    few = {"vocabulary": 50, "width": 8, "num_layers": 1, "num_heads": 1}
    found = [list_batches(bert.bert(**few)[3]) for _ in range(2)]
    lengths = [batch["input_ids"].shape for batch in found[0]]
    assert len(lengths) == 40
    assert len(set(lengths)) > 20
    assert all(rows == 32 and 32 <= length <= 256 for rows, length in lengths)
    assert all(torch.equal(a[key], b[key]) for a, b in zip(*found) for key in a)


def test_tokens_choose_their_experts():
    model = make("moe").model
    layer = model.blocks[0].experts
    x = torch.randn(3, 5, 16)
    weights, chosen = layer.router(x).softmax(-1).topk(2, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    every = torch.stack([expert(x) for expert in layer.experts], dim=2)
    expected = (weights[..., None] * every.gather(2, chosen[..., None].expand(-1, -1, -1, 16))).sum(2)
    torch.testing.assert_close(layer(x), expected)


def test_what_follows_changes_nothing_before():
    model = make("llama").model
    ids = torch.arange(8).unsqueeze(0)
    torch.testing.assert_close(model(ids[:, :5])["logits"], model(ids)["logits"][:, :5])


def test_rotation_makes_attention_relative():
    cos, sin = llama.rotation_tables(8, 16)
    query, key = torch.randn(2, 8)
    products = [llama.rotate(query, cos[i], sin[i]) @ llama.rotate(key, cos[i - 3], sin[i - 3]) for i in range(3, 16)]
    torch.testing.assert_close(torch.stack(products), products[0].expand(13))
    assert not torch.isclose(products[0], query @ key)


@pytest.mark.parametrize(
    ("kind", "num_params"),
    [
        (bert.BertClassifier, 109_482_242),
        (llama.Llama, 229_139_456),
        (lstm.LSTMLanguageModel, 19_780_400),
        (moe.MoETransformer, 270_419_456),
    ],
)
def test_sizes(kind, num_params):
    with torch.device("meta"):
        assert sum(p.numel() for p in kind().parameters()) == num_params
