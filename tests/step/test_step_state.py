"""Steps that are saved and taken over, and their precisions."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import everygpu
from tests.step.test_train_step import OPTIMIZERS, Devices, Net, Pair, assert_close, batches, train_plainly


def test_saved_and_resumed_elsewhere(devices: Devices, tmp_path: Any) -> None:
    used = devices(3)
    first, again = Pair(used), Pair(used[:2])
    data = first.data(10)
    first.train(data[:5])
    place = tmp_path / "c"
    everygpu.save(place, model=first.model, optimizer=first.optimizer, step=first.step)
    everygpu.load(place, model=again.model, optimizer=again.optimizer, step=again.step)
    again.plain, again.reference = first.plain, first.reference
    again.train(data[5:])
    again.check()
    assert again.step.stats().num_steps == 10


def test_a_new_step_takes_the_optimizer_over(devices: Devices) -> None:
    pair = Pair(devices(2))
    data = pair.data(6)
    pair.train(data[:3])
    pair.step = everygpu.TrainStep(pair.model, F.cross_entropy, pair.optimizer)
    pair.train(data[3:])
    pair.check()


def test_two_steps_with_one_optimizer(devices: Devices) -> None:
    pair = Pair(devices(2))
    losses = [F.cross_entropy, lambda out, y: out.square().mean()]
    steps = [pair.step, everygpu.TrainStep(pair.model, losses[1], pair.optimizer)]
    for i, batch in enumerate(pair.data(8)):
        pair.step, pair.loss = steps[i % 2], losses[i % 2]
        pair.train([batch])
    assert_close(pair.ours, pair.plain)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_mixed_with_an_ordinary_loop(devices: Devices, is_sharded: bool) -> None:
    used, made = devices(2), []

    def wrap(optimizer: Any) -> Any:
        made.append(everygpu.ShardedOptimizer(optimizer, used) if is_sharded else optimizer)
        return made[0]

    pair = Pair(used, wrap=wrap)
    for i, batch in enumerate(pair.data(9)):
        if i % 3 == 1:
            train_plainly(pair.model if is_sharded else pair.ours, made[0], [batch])
            train_plainly(pair.plain, pair.reference, [batch])
        else:
            pair.train([batch])
    pair.check()


# Precision.


def test_bf16_is_as_good_as_plain_bf16(devices: Devices) -> None:
    seen: set[torch.dtype] = set()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        seen.add(out.dtype)
        return F.cross_entropy(out, y)

    used = devices(3)
    pair, exact = Pair(used, "SGD", loss=loss, precision="bf16"), Net().to(used[0])
    data = pair.data(20)
    losses = [pair.step(*batch).item() for batch in data]
    assert seen == {torch.bfloat16}
    assert all(p.dtype is torch.float32 for p in pair.ours.parameters())
    with torch.autocast(used[0].type, torch.bfloat16):
        rough, _ = train_plainly(pair.plain, pair.reference, data)
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


@pytest.mark.parametrize(
    ("name", "count", "clip_norm"), [("AdamW", 1, None), ("AdamW", 3, 0.5), ("SGD", 1, 0.5), ("SGD", 3, None)]
)
def test_parameters_in_bf16_are_as_good_as_plain_bf16(
    devices: Devices, name: str, count: int, clip_norm: float | None
) -> None:
    used = devices(count)
    pair, exact = Pair(used, name, make=InBfloat16, clip_norm=clip_norm), InBfloat16().to(used[0])
    data = pair.data(40, (12,))
    losses = [pair.step(*batch).item() for batch in data]
    rough, _ = train_plainly(pair.plain, pair.reference, data, clip_norm=clip_norm)
    fine, _ = train_plainly(exact.float(), OPTIMIZERS[name](exact.parameters()), data, clip_norm=clip_norm)
    spread = max(abs(a - b) for a, b in zip(rough, fine))
    assert 0 < max(abs(a - b) for a, b in zip(losses, fine)) <= 2 * spread
    kept, expected = pair.optimizer.state_dict()["state"], pair.reference.state_dict()["state"]
    assert {i: {k: v.dtype for k, v in s.items()} for i, s in kept.items()} == {
        i: {k: v.dtype for k, v in s.items()} for i, s in expected.items()
    }
    pair.reference.load_state_dict(pair.optimizer.state_dict())


@pytest.mark.parametrize("name", ["AdamW-fused", "AdamW", "RMSprop"])
@pytest.mark.parametrize("count", [1, 2])
def test_fp16_skips_updates_that_are_not_finite(devices: Devices, name: str, count: int) -> None:
    used = devices(count)
    makers: dict[str, Any] = {
        "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
        "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    }
    pair = Pair(used, makers[name], precision="fp16")
    data = pair.data(12)
    data[3] = (torch.full_like(data[3][0], float("inf")), data[3][1])
    losses = [pair.step(*batch).item() for batch in data]
    scaler, expected = torch.amp.GradScaler(used[0].type), []
    for x, y in data:
        pair.reference.zero_grad()
        with torch.autocast(used[0].type, torch.float16):
            loss = F.cross_entropy(pair.plain(x), y)
        scaler.scale(loss).backward()
        scaler.step(pair.reference)
        scaler.update()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=2e-2, abs=2e-3, nan_ok=True)
    pair.check(2e-2)
    assert pair.step.stats().num_skipped >= 1
    assert pair.step.state_dict()["scale"]["scale"] == scaler.get_scale()


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
