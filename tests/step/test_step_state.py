"""Steps that are saved and taken over, and their precisions."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import everygpu
from tests.step.test_train_step import (
    OPTIMIZERS,
    Devices,
    Net,
    assert_close,
    assert_replicas_bit_equal,
    batches,
    train_plainly,
)


def test_saved_and_resumed_elsewhere(devices: Devices, tmp_path: Any) -> None:
    used = devices(3)
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(10)]
    whole, first = Net().to(used[0]), Net().to(used[0])
    make = OPTIMIZERS["AdamW"]
    unbroken = everygpu.TrainStep(everygpu.DataParallel(whole, used), F.cross_entropy, make(whole.parameters()))
    expected = [unbroken(*batch).item() for batch in data]

    optimizer = make(first.parameters())
    step = everygpu.TrainStep(everygpu.DataParallel(first, used), F.cross_entropy, optimizer)
    losses = [step(*batch).item() for batch in data[:5]]
    everygpu.save(tmp_path / "c", model=step.model, optimizer=optimizer, step=step)

    again = Net().to(used[0])
    optimizer = make(again.parameters())
    step = everygpu.TrainStep(everygpu.DataParallel(again, used[:2]), F.cross_entropy, optimizer)
    everygpu.load(tmp_path / "c", model=step.model, optimizer=optimizer, step=step)
    losses += [step(*batch).item() for batch in data[5:]]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert step.stats().num_steps == 10


def test_a_new_step_takes_the_optimizer_over(devices: Devices) -> None:
    used = devices(2)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(6)]
    optimizer, reference = OPTIMIZERS["AdamW"](ours.parameters()), OPTIMIZERS["AdamW"](plain.parameters())
    for part in (data[:3], data[3:]):
        step = everygpu.TrainStep(everygpu.DataParallel(ours, used), F.cross_entropy, optimizer)
        for batch in part:
            step(*batch)
    train_plainly(plain, reference, data)
    assert_close(ours, plain)


def test_two_steps_with_one_optimizer(devices: Devices) -> None:
    used = devices(2)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(8)]
    optimizer, reference = OPTIMIZERS["AdamW"](ours.parameters()), OPTIMIZERS["AdamW"](plain.parameters())
    losses = [F.cross_entropy, lambda out, y: out.square().mean()]
    model = everygpu.DataParallel(ours, used)
    steps = [everygpu.TrainStep(model, loss, optimizer) for loss in losses]
    for i, batch in enumerate(data):
        steps[i % 2](*batch)
        train_plainly(plain, reference, [batch], losses[i % 2])
    assert_close(ours, plain)


def test_after_an_ordinary_loop_with_the_stock_optimizer(devices: Devices) -> None:
    used = devices(2)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(9)]
    optimizer = OPTIMIZERS["AdamW"](ours.parameters())
    step = everygpu.TrainStep(everygpu.DataParallel(ours, used), F.cross_entropy, optimizer)
    for i, batch in enumerate(data):
        if i % 3 == 1:
            train_plainly(ours, optimizer, [batch])
        else:
            step(*batch)
    train_plainly(plain, OPTIMIZERS["AdamW"](plain.parameters()), data)
    assert_close(ours, plain)


def test_mixed_with_an_ordinary_loop(devices: Devices) -> None:
    used = devices(2)
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(9)]
    sharded = everygpu.ShardedOptimizer(OPTIMIZERS["AdamW"](ours.parameters()), used)
    model = everygpu.DataParallel(ours, used)
    step = everygpu.TrainStep(model, F.cross_entropy, sharded)
    for i, batch in enumerate(data):
        if i % 3 == 1:
            train_plainly(model, sharded, [batch])
        else:
            step(*batch)
    train_plainly(plain, OPTIMIZERS["AdamW"](plain.parameters()), data)
    assert_close(ours, plain)


# Precision.


def test_bf16_is_as_good_as_plain_bf16(devices: Devices) -> None:
    used = devices(3)
    plain, exact, ours = (Net().to(used[0]) for _ in range(3))
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(20)]
    seen: set[torch.dtype] = set()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        seen.add(out.dtype)
        return F.cross_entropy(out, y)

    step = everygpu.TrainStep(
        everygpu.DataParallel(ours, used), loss, OPTIMIZERS["SGD"](ours.parameters()), precision="bf16"
    )
    losses = [step(*batch).item() for batch in data]
    assert seen == {torch.bfloat16}
    assert all(p.dtype is torch.float32 for p in ours.parameters())
    with torch.autocast(used[0].type, torch.bfloat16):
        rough, _ = train_plainly(plain, OPTIMIZERS["SGD"](plain.parameters()), data)
    fine, _ = train_plainly(exact, OPTIMIZERS["SGD"](exact.parameters()), data)
    spread = max(abs(a - b) for a, b in zip(rough, fine))
    assert 0 < max(abs(a - b) for a, b in zip(losses, fine)) <= 3 * spread


class InBfloat16(nn.Module):
    """All of it in bfloat16, but for a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net().bfloat16()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.to(self.net.frozen.dtype)).float() * self.scale


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_parameters_in_bf16_are_as_good_as_plain_bf16(
    devices: Devices, name: str, count: int, clip_norm: float | None
) -> None:
    used = devices(count)
    plain, exact, ours = (InBfloat16().to(used[0]) for _ in range(3))
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(40, (12,))]
    optimizer = OPTIMIZERS[name](ours.parameters())
    step = everygpu.TrainStep(
        everygpu.DataParallel(ours, used), nn.CrossEntropyLoss(), optimizer, clip_norm=clip_norm
    )  # fmt: skip
    losses = [step(*batch).item() for batch in data]
    reference = OPTIMIZERS[name](plain.parameters())
    rough, _ = train_plainly(plain, reference, data, clip_norm=clip_norm)
    fine, _ = train_plainly(exact.float(), OPTIMIZERS[name](exact.parameters()), data, clip_norm=clip_norm)
    spread = max(abs(a - b) for a, b in zip(rough, fine))
    assert 0 < max(abs(a - b) for a, b in zip(losses, fine)) <= 2 * spread
    if count > 1:
        assert_replicas_bit_equal(step)
    kept, expected = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert {i: {k: v.dtype for k, v in s.items()} for i, s in kept.items()} == {
        i: {k: v.dtype for k, v in s.items()} for i, s in expected.items()
    }
    reference.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", ["AdamW-fused", "AdamW", "RMSprop"])
@pytest.mark.parametrize("count", [1, 2])
def test_fp16_skips_updates_that_are_not_finite(devices: Devices, name: str, count: int) -> None:
    used = devices(count)
    makers: dict[str, Any] = {
        "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
        "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    }
    plain, ours = Net().to(used[0]), Net().to(used[0])
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(12)]
    data[3] = (torch.full_like(data[3][0], float("inf")), data[3][1])
    optimizer = makers[name](ours.parameters())
    step = everygpu.TrainStep(everygpu.DataParallel(ours, used), F.cross_entropy, optimizer, precision="fp16")
    losses = [step(*batch).item() for batch in data]

    reference = makers[name](plain.parameters())
    scaler = torch.amp.GradScaler(used[0].type)
    expected = []
    for x, y in data:
        reference.zero_grad()
        with torch.autocast(used[0].type, torch.float16):
            loss = F.cross_entropy(plain(x), y)
        scaler.scale(loss).backward()
        scaler.step(reference)
        scaler.update()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=2e-2, abs=2e-3, nan_ok=True)
    assert_close(ours, plain, rtol=2e-2)
    assert step.stats().num_skipped >= 1
    assert step.state_dict()["scale"]["scale"] == scaler.get_scale()


@pytest.mark.parametrize("count", [1, 2])
def test_fp16_whatever_the_default_dtype(count: int) -> None:
    net = Net()
    x, y = next(batches(1))
    torch.set_default_dtype(torch.float64)
    try:
        model = everygpu.DataParallel(net, ["cpu"] * count)
        step = everygpu.TrainStep(
            model, F.cross_entropy, torch.optim.SGD(net.parameters()), precision="fp16", clip_norm=1.0
        )
        assert step(x, y).isfinite()
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_scale_is_saved_and_loaded() -> None:
    net = Net()
    make = lambda: everygpu.TrainStep(  # noqa: E731
        everygpu.DataParallel(net, ["cpu"] * 2),
        F.cross_entropy,
        torch.optim.SGD(net.parameters(), lr=0.01),
        precision="fp16",
    )
    first, second = make(), make()
    x, y = next(batches(1))
    first(torch.full_like(x, float("nan")), y)
    state = copy.deepcopy(first.state_dict())
    assert state["scale"]["scale"] == 2.0**15
    assert state["num_skipped"] == 1
    second.load_state_dict(state)
    assert second.state_dict() == state
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(state["scale"])
    assert scaler.get_scale() == 2.0**15


def test_a_save_within_an_update_says_so(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    step = everygpu.TrainStep(everygpu.DataParallel(net, ["cpu"] * 2), F.cross_entropy, optimizer, accumulate=2)
    told = []
    for i in range(3):
        step(torch.ones(4, 4), torch.zeros(4).long())
        everygpu.save(tmp_path / str(i), model=net, train_step=step)
        told.append([r.getMessage() for r in caplog.records if "batches of an update" in r.getMessage()])
        caplog.clear()
    assert [len(t) for t in told] == [1, 0, 1]
    assert "after 1 of 2" in told[0][0]
    step.flush()
    step.state_dict()
    assert not [r for r in caplog.records if "batches of an update" in r.getMessage()]
