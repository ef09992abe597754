"""timm: models, their optimizers and averages, with the helpers that unwrap a model."""

import argparse
import copy

import pytest
import torch
from torch import nn

import everygpu

timm = pytest.importorskip("timm")
utils = pytest.importorskip("timm.utils")
optim = pytest.importorskip("timm.optim")
loss_functions = pytest.importorskip("timm.loss")
scheduling = pytest.importorskip("timm.scheduler")

SIZE = 32
CLOSE = {"rtol": 1e-8, "atol": 1e-8}


@pytest.fixture(params=["vit", "convnext"])
def make(request):
    """``make()`` builds a small model without BatchNorm, whose statistics would be each replica's own."""

    def vit():
        return timm.models.VisionTransformer(
            img_size=SIZE, patch_size=16, embed_dim=16, depth=2, num_heads=2, num_classes=3
        )

    def convnext():
        return timm.models.ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), patch_size=2, num_classes=3)

    def make_model():
        torch.manual_seed(0)
        return (vit if request.param == "vit" else convnext)().double()

    return make_model


def batches(device):
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(10, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
        yield x.to(device), torch.randint(3, (10,), generator=generator).to(device)


def make_optimizer(model):
    """Group parameters by the names that the model gives them: before it is wrapped, as timm's script does."""
    return optim.create_optimizer_v2(model, opt="adamw", lr=1e-2, weight_decay=0.05)


def train(model, optimizer, device):
    """Train as timm's own script does: its scheduler, loss, clipping, average of weights and meters."""
    scheduler = scheduling.CosineLRScheduler(optimizer, t_initial=3, warmup_t=1, warmup_lr_init=1e-3)
    criterion, meter = loss_functions.LabelSmoothingCrossEntropy(), utils.AverageMeter()
    ema = utils.ModelEmaV3(model, decay=0.5)
    top1 = utils.AverageMeter()
    for epoch, (x, y) in enumerate(batches(device)):
        output = model(x)
        loss = criterion(output, y)
        optimizer.zero_grad()
        loss.backward()
        utils.dispatch_clip_grad(model.parameters(), 1.0, mode="norm")
        optimizer.step()
        ema.update(model)
        meter.update(loss.item(), x.size(0))
        top1.update(utils.accuracy(output, y, topk=(1,))[0].item(), x.size(0))
        scheduler.step(epoch + 1)
    with torch.no_grad():
        averaged = ema.module(x)
    return meter.avg, top1.avg, averaged + 0, ema


def test_training_equals_one_device(make, devices):
    chosen = devices(2)
    bare, inner = make().to(chosen[0]), make().to(chosen[0])
    optimizers = make_optimizer(bare), make_optimizer(inner)
    assert len(optimizers[0].param_groups) == 2
    model = everygpu.DataParallel(inner, chosen)
    assert list(dict(model.named_parameters())) == list(dict(bare.named_parameters()))
    expected, found = train(bare, optimizers[0], chosen[0]), train(model, optimizers[1], chosen[0])
    torch.testing.assert_close(found[:3], expected[:3], **CLOSE)
    torch.testing.assert_close(model.state_dict(), bare.state_dict(), **CLOSE)
    assert utils.unwrap_model(model) is model.module
    torch.testing.assert_close(utils.get_state_dict(found[3]), utils.get_state_dict(expected[3]), **CLOSE)


def test_checkpoint_saver_and_helpers_of_models(make, devices, tmp_path):
    chosen = devices(2)
    model = everygpu.DataParallel(make(), chosen)
    optimizer = optim.create_optimizer_v2(model, opt="sgd", lr=0.1)
    args = argparse.Namespace(model="small")
    saver = utils.CheckpointSaver(model, optimizer, args, checkpoint_dir=tmp_path, recovery_dir=tmp_path)
    saver.save_checkpoint(0, metric=1.0)
    bare = make()
    for p in bare.parameters():
        nn.init.zeros_(p)
    timm.models.load_checkpoint(bare, str(tmp_path / "last.pth.tar"), use_ema=False, weights_only=False)
    torch.testing.assert_close(bare.state_dict(), model.state_dict(), check_device=False, rtol=0, atol=0)
    model.reset_classifier(5)
    assert model(torch.zeros(4, 3, SIZE, SIZE, dtype=torch.float64, device=chosen[0])).shape == (4, 5)
    assert copy.deepcopy(model).num_classes == 5


def test_parts_of_a_model_run_and_are_frozen(devices):
    chosen = devices(2)
    bare = timm.models.VisionTransformer(img_size=SIZE, patch_size=16, embed_dim=16, depth=2, num_heads=2).double()
    model = everygpu.DataParallel(bare, chosen)
    utils.freeze(model, ["blocks.0"])
    x = next(batches(chosen[0]))[0]
    model(x).sum().backward()
    assert {name.split(".")[1] for name, p in bare.named_parameters() if p.grad is None} == {"0"}
    found = model.call_method("forward_features", x)
    torch.testing.assert_close(found + 0, bare.forward_features(x), **CLOSE)
