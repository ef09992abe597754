"""Accelerate: the wrapped model goes through ``prepare``, the loop is Accelerate's."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everygpu
from tests.parallel.oracle import TOLERANCE, Mlp, rows

accelerate = pytest.importorskip("accelerate")
state = pytest.importorskip("accelerate.state")


@pytest.fixture
def accelerator(devices):
    """``accelerator(**options)`` makes one; its settings are the process's, and forgotten afterwards."""

    def make(**options):
        forget()
        return accelerate.Accelerator(cpu=devices(2)[0].type == "cpu", **options)

    def forget():
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()

    yield make
    forget()


class Model(Mlp):
    """Notes which dtype it computes in."""

    def forward(self, x):
        self.computed = self.first(x).dtype
        return super().forward(x)


def parts(devices=None, dtype=torch.float64):
    """Make model, optimizer, loader and scheduler."""
    torch.manual_seed(0)
    model = Model().to(dtype)
    model = model if devices is None else everygpu.DataParallel(model, devices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = rows(22, 3, device=torch.device("cpu")).to(dtype)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)
    return model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def train(accelerator, prepared, num_epochs=2):
    model, optimizer, loader, scheduler = prepared
    losses = []
    for _ in range(num_epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach()).item())
    return losses


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}], ids=str)
def test_training_equals_one_device(devices, accelerator, options):
    losses, states = [], []
    for chosen in (None, devices(2)):
        accelerator_ = accelerator(**options)
        prepared = accelerator_.prepare(*parts(chosen))
        losses.append(train(accelerator_, prepared))
        states.append(accelerator_.get_state_dict(prepared[0]))
    torch.testing.assert_close(losses[1], losses[0], **TOLERANCE)
    torch.testing.assert_close(states[1], states[0], **TOLERANCE)


def test_unwrap_model_gives_the_module(devices, accelerator):
    model, *others = parts(devices(2))
    bare, accelerator_ = model.module, accelerator(mixed_precision="bf16")
    model, *_ = accelerator_.prepare(model, *others)
    assert accelerator_.unwrap_model(model) is bare
    assert accelerator_.unwrap_model(model, keep_fp32_wrapper=False) is bare


def test_state_is_saved_and_loaded(devices, accelerator, tmp_path):
    accelerator_ = accelerator()
    prepared = accelerator_.prepare(*parts(devices(2)))
    train(accelerator_, prepared, 1)
    accelerator_.save_state(tmp_path / "state")
    accelerator_.save_model(prepared[0], tmp_path / "model")
    expected = train(accelerator_, prepared, 1)

    accelerator_ = accelerator()
    prepared = accelerator_.prepare(*parts(devices(2)))
    accelerator_.load_state(tmp_path / "state")
    bare = Mlp().double()
    everygpu.load(tmp_path / "model" / "model.safetensors", model=bare)
    torch.testing.assert_close(bare.state_dict(), prepared[0].state_dict(), check_device=False, rtol=0, atol=0)
    torch.testing.assert_close(train(accelerator_, prepared, 1), expected, **TOLERANCE)


def test_a_feeder_around_a_prepared_loader(devices, accelerator):
    accelerator_ = accelerator()
    expected = train(accelerator_, accelerator_.prepare(*parts(devices(2))), 1)
    accelerator_ = accelerator()
    model, optimizer, loader, scheduler = accelerator_.prepare(*parts(devices(2)))
    with contextlib.closing(everygpu.Feeder(loader, model)) as feeder:
        found = train(accelerator_, (model, optimizer, feeder, scheduler), 1)
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_sharded_optimizer(devices, accelerator, tmp_path):
    losses = []
    for shards in (False, True):
        accelerator_ = accelerator()
        model, _, loader, _ = parts(devices(2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        optimizer = everygpu.ShardedOptimizer(optimizer, devices(2)) if shards else optimizer
        prepared = accelerator_.prepare(model, optimizer, loader, scheduler)
        losses.append(train(accelerator_, prepared))
        accelerator_.save_state(tmp_path / str(shards))
        accelerator_.load_state(tmp_path / str(shards))
    torch.testing.assert_close(losses[1], losses[0], **TOLERANCE)
