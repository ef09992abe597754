"""Lightning: the wrapped model inside a LightningModule, driven by a Trainer of one device."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everygpu
from tests.parallel.oracle import TOLERANCE, Mlp, rows

lightning = pytest.importorskip("lightning")
callbacks = pytest.importorskip("lightning.pytorch.callbacks")


class Classifier(lightning.LightningModule):
    """An ordinary LightningModule: it doesn't know whether its model is wrapped."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.losses = []

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_index):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_index):
        x, y = batch
        output = self(x)
        self.log("val_loss", nn.functional.cross_entropy(output, y))
        self.log("val_accuracy", (output.argmax(1) == y).double().mean())

    def predict_step(self, batch, batch_index):
        return self(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def loader(dtype=torch.float64):
    """Make 20 rows, of which the last batch has four."""
    x = rows(20, 3, device=torch.device("cpu")).to(dtype)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)


def classifier(devices=None, dtype=torch.float64):
    torch.manual_seed(0)
    model = Mlp().to(dtype)
    return Classifier(model if devices is None else everygpu.DataParallel(model, devices))


def trainer(folder, devices, **options):
    return lightning.Trainer(
        accelerator="cpu" if devices[0].type == "cpu" else "gpu",
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, **options},
    )


def fit(folder, devices, module, **options):
    driver = trainer(folder, devices, **options)
    dtype = next(module.parameters()).dtype
    driver.fit(module, loader(dtype), loader(dtype))
    return driver


OPTIONS = [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fit_equals_one_device(devices, tmp_path, options):
    one, two = classifier(), classifier(devices(2))
    logged = [fit(tmp_path / n, devices(2), m, **options).callback_metrics for n, m in (("1", one), ("2", two))]
    torch.testing.assert_close(two.losses, one.losses, **TOLERANCE)
    torch.testing.assert_close(logged[1], logged[0], **TOLERANCE)
    torch.testing.assert_close(two.state_dict(), one.state_dict(), **TOLERANCE)


def test_validate_and_predict_equal_one_device(devices, tmp_path):
    one, two = classifier(), classifier(devices(2))
    found = []
    for module in (one, two):
        driver = trainer(tmp_path, devices(2))
        found.append((driver.validate(module, loader(), verbose=False), driver.predict(module, loader())))
    torch.testing.assert_close(found[1][0], found[0][0], **TOLERANCE)
    torch.testing.assert_close(torch.cat(found[1][1]), torch.cat(found[0][1]), **TOLERANCE)


def test_checkpoint_loads_into_the_bare_model_and_resumes(devices, tmp_path):
    whole, first, resumed = (classifier(devices(2)) for _ in range(3))
    fit(tmp_path / "whole", devices(2), whole, max_epochs=3)
    driver = fit(tmp_path / "cut", devices(2), first, max_epochs=2)
    path = driver.checkpoint_callback.best_model_path
    bare = Classifier.load_from_checkpoint(path, model=Mlp().double(), weights_only=True)
    torch.testing.assert_close(bare.state_dict(), first.state_dict(), check_device=False, rtol=0, atol=0)
    trainer(tmp_path / "cut", devices(2), max_epochs=3).fit(resumed, loader(), loader(), ckpt_path=path)
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), **TOLERANCE)


def averages():
    return [callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1), callbacks.EMAWeightAveraging(decay=0.5)]


@pytest.mark.parametrize("index", range(2), ids=["swa", "ema"])
def test_averages_of_weights_equal_one_device(devices, tmp_path, index):
    """These callbacks deepcopy the module, with the wrapper in it."""
    one, two = classifier(), classifier(devices(2))
    for name, module in (("1", one), ("2", two)):
        fit(tmp_path / name, devices(2), module, max_epochs=3, callbacks=[averages()[index]])
    torch.testing.assert_close(two.state_dict(), one.state_dict(), **TOLERANCE)
    assert isinstance(copy.deepcopy(two).model, everygpu.DataParallel)


def test_a_feeder_is_a_loader(devices, tmp_path):
    one, two = classifier(), classifier(devices(2))
    fit(tmp_path, devices(2), one)
    with contextlib.closing(everygpu.Feeder(loader(), two.model)) as feeder:
        trainer(tmp_path, devices(2)).fit(two, feeder)
    torch.testing.assert_close(two.losses, one.losses, **TOLERANCE)


class WithAdam(Classifier):
    """Its optimizer's state is on all devices, if there are several."""

    devices = None

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return optimizer if self.devices is None else everygpu.ShardedOptimizer(optimizer, self.devices)


def test_sharded_optimizer_and_resuming(devices, tmp_path):
    modules = []
    for chosen in (None, devices(2), devices(2)):
        module = WithAdam(classifier(chosen).model)
        module.devices = chosen
        modules.append(module)
    one, two, resumed = modules
    fit(tmp_path / "1", devices(2), one, max_epochs=3)
    path = fit(tmp_path / "2", devices(2), two).checkpoint_callback.best_model_path
    torch.testing.assert_close(two.losses, one.losses[: len(two.losses)], **TOLERANCE)
    trainer(tmp_path / "3", devices(2), max_epochs=3).fit(resumed, loader(), ckpt_path=path)
    torch.testing.assert_close(resumed.losses, one.losses[len(two.losses) :], **TOLERANCE)


def test_fabric(devices, tmp_path):
    losses = []
    for chosen in (None, devices(2)):
        torch.manual_seed(0)
        inner = Mlp().double()
        inner = inner if chosen is None else everygpu.DataParallel(inner, chosen)
        kind = "cpu" if devices(2)[0].type == "cpu" else "gpu"
        fabric = lightning.Fabric(accelerator=kind, devices=1)
        model, optimizer = fabric.setup(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
        found = []
        for x, y in fabric.setup_dataloaders(loader()):
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        fabric.save(tmp_path / "saved.ckpt", {"model": model, "optimizer": optimizer})
        fabric.load(tmp_path / "saved.ckpt", {"model": model, "optimizer": optimizer})
        losses.append(found)
    torch.testing.assert_close(losses[1], losses[0], **TOLERANCE)
