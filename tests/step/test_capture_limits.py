"""What ends a capture or keeps one from being made, and what a step refuses."""

import inspect
import logging
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import everygpu
from everygpu.errors import CaptureError
from everygpu.parallel.cuda_graphs.batch_kinds import NUM_WARM_UPS
from tests.step.test_capture import (
    OPTIMIZERS,
    Devices,
    Net,
    assert_nets_equal,
    batches,
    check_same,
    num_graphs,
    once,
    train,
)


class Counting(Net):
    """Counts its calls in Python."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


class Reading(Net):
    """Waits for the device."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if x.sum().item() < 1e9 else 2.0)


class Tossing(Net):
    """Leaves a layer out at random, as the host's generator says."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if random.random() < 0.5 else 2.0)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_one_device_that_is_refused_trains_as_a_plain_loop(capturing: Devices, accumulate: int, kind: str) -> None:
    """Gradients and the optimizer's state are where they are in such a loop; also those of an update that had begun."""
    used = capturing(1)
    data = batches(12, used[0], ignore=False)
    found = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        net = Reading(dropout=0.0).to(used[0])
        optimizer = OPTIMIZERS[kind]([p for p in net.parameters() if p.requires_grad])
        if is_plain:
            for i, (x, y) in enumerate(data):
                (F.cross_entropy(net(x), y) / accumulate).backward()
                if (i + 1) % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        else:
            step = everygpu.TrainStep(
                everygpu.DataParallel(net, used), F.cross_entropy, optimizer, accumulate=accumulate
            )
            for x, y in data:
                step(x, y)
            assert step._capture.reason is not None
            assert net.first.weight.grad is not None
        found.append((net, optimizer))
    (plain, theirs), (net, ours) = found
    assert_nets_equal(net, plain)
    for p, q in zip(net.parameters(), plain.parameters()):
        assert ours.state[p].keys() == theirs.state[q].keys()
        for name, value in theirs.state[q].items():
            torch.testing.assert_close(ours.state[p][name], value, check_device=False, rtol=1e-3, atol=1e-5)


@once
@pytest.mark.parametrize(
    ("kind", "reason"), [(Counting, "Counting.count"), (Reading, "Error"), (Tossing, "on the host")]
)
def test_what_cannot_be_captured_runs_as_it_is(
    capturing: Devices, caplog: pytest.LogCaptureFixture, kind: type[Net], reason: str
) -> None:
    used = capturing(2)[: 1 if kind is Tossing else 2]  # replicas in threads would toss in any order
    data = batches(30, used[0])
    found = []
    for capture in (False, "auto"):
        everygpu.seed_all(3)
        random.seed(0)
        net = kind(dropout=0.5).to(used[0])
        with caplog.at_level(logging.INFO, "everygpu"):
            losses, step = train(net, used, data, OPTIMIZERS["AdamW"], capture=capture)
        found.append(losses)
    assert num_graphs(step) == 0
    told = [r.getMessage() for r in caplog.records if "without CUDA graphs" in r.getMessage()]
    (said,) = [line for line in told if line.startswith("TrainStep")]  # on a GPU, forward by itself can't be, either
    assert reason in said
    if kind is Reading:  # the user's own line
        line = inspect.getsourcelines(Reading.forward)[1] + 1
        assert f"test_capture_limits.py:{line}: return super().forward(x) * (1.0 if x.sum().item() < 1e9" in said
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@once
def test_must_capture_says_why_it_cannot(capturing: Devices) -> None:
    used = capturing(2)
    with pytest.raises(CaptureError, match="capture='auto'"):
        train(Reading().to(used[0]), used, batches(10, used[0]), OPTIMIZERS["SGD"], capture=True)


@once
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing torch's compiler warns of torch.jit
def test_hooks_whose_code_is_proven_are_captured(capturing: Devices) -> None:
    used = capturing(2)
    found = []
    for capture in (False, "auto"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).to(used[0])
        handle = net[2].register_forward_hook(lambda module, args, output: output * 2)
        losses, step = train(net, used, batches(10, used[0]), OPTIMIZERS["SGD"], capture=capture)
        assert not capture or num_graphs(step) == 1
        handle.remove()
        losses = [*losses, *(step(x, y) for x, y in batches(3, used[0]))]
        found.append(torch.stack([loss.detach().cpu() for loss in losses]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@once
@pytest.mark.parametrize("num_before", [0, 10])
def test_hooks_are_called(capturing: Devices, num_before: int) -> None:
    """One that comes later ends the capture."""
    used = capturing(2)
    net, calls = Net().to(used[0]), []
    optimizer = OPTIMIZERS["SGD"]([p for p in net.parameters() if p.requires_grad])
    step = everygpu.TrainStep(everygpu.DataParallel(net, used), F.cross_entropy, optimizer)
    for i, (x, y) in enumerate(batches(num_before + 10, used[0])):
        if i == num_before:
            assert num_graphs(step) == bool(num_before)
            net.last.register_forward_hook(lambda *_: calls.append(1))
        step(x, y)
    assert len(calls) == 20
    assert step.stats().engine == "threads"


def test_synchronised_statistics(capturing: Devices) -> None:
    check_same(capturing, make=lambda: everygpu.SyncBatchNorm.convert(Net()))


class Reusing(Net):
    """Needs a weight in backward after the weight's own gradient is there."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        h = (x.requires_grad_() if not x.requires_grad else x) @ self.first.weight.detach().T
        return self.last(self.norm(h + self.first(x)))


@pytest.mark.parametrize("kind", [Net, Reusing])
def test_updates_wait_for_what_needs_the_old_values(capturing: Devices, kind: type[Net]) -> None:
    step = check_same(capturing, make=kind)
    assert step._capture._step._overlaps_backward is (kind is Net or not step._strategy._has_kernels)


def test_memory_is_returned(gpus: Devices) -> None:
    used = gpus(2)
    net = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 5)).to(used[0])
    x, y = torch.randn(4096, 1024, device=used[0]), torch.zeros(4096, dtype=torch.long, device=used[0])
    step = everygpu.TrainStep(
        everygpu.DataParallel(net, used), F.cross_entropy, torch.optim.SGD(net.parameters(), lr=0.1)
    )
    for _ in range(NUM_WARM_UPS):
        step(x, y)
    before = _reserved(used)
    for _ in range(4):
        step(x, y)
    assert num_graphs(step) == 1
    step._capture.forget()
    assert max(now - then for now, then in zip(_reserved(used), before)) <= 2**25  # libraries' workspaces


def _reserved(used: list[torch.device]) -> list[int]:
    for d in used:
        torch.cuda.synchronize(d)
    torch.cuda.empty_cache()
    return [torch.cuda.memory_reserved(d) for d in used]


@pytest.mark.parametrize(
    ("make", "capture"), [(OPTIMIZERS["AdamW"], "auto"), (lambda p: torch.optim.NAdam(p, lr=0.01), False)]
)
def test_with_a_default_device(capturing: Devices, capture: Any, make: Any) -> None:
    """Tables and states are where they are read, not where the caller would have tensors."""
    used = capturing(2)
    data = batches(8, used[0])
    nets = [Net().to(used[0]) for _ in range(2)]
    plain, _ = train(nets[0], used, data, make, capture=capture)
    with torch.device("meta" if used[0].type == "cpu" else used[0]):
        made, step = train(nets[1], used, data, make, capture=capture)
    assert capture is False or num_graphs(step) == 1
    torch.testing.assert_close(made, plain, rtol=1e-5, atol=1e-6)
    assert_nets_equal(nets[1], nets[0], rtol=1e-4, atol=1e-5)


class Full(nn.Linear):
    """Runs out of memory as often as it is told."""

    failures = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


def test_an_evaluation_takes_the_memory_of_captures() -> None:
    class Captures:
        num = 1

        def forget(self) -> bool:
            self.num -= 1
            return self.num >= 0

    net = Full(2, 2)
    step = everygpu.TrainStep(net, F.mse_loss, torch.optim.SGD(net.parameters()))
    step._capture = Captures()  # type: ignore[assignment]
    x, y = torch.ones(3, 2), torch.zeros(3, 2)
    net.failures = 1
    assert step.evaluate(x, y).output.equal(net(x))
    net.failures = 1
    with pytest.raises(torch.OutOfMemoryError):
        step.evaluate(x, y)


class LayerDrop(Net):
    """As transformers' encoders have it."""

    probability = 0.0

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand([])
        return super().forward(x) * (2.0 if drawn < self.probability else 1.0)


class Scaling(Net):
    """Draws on the host what it computes with."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand([]).item()


class Dropping(LayerDrop):
    probability = 0.5


@once
@pytest.mark.parametrize(("kind", "is_captured"), [(LayerDrop, True), (Dropping, False), (Scaling, False)])
def test_draws_that_decide_nothing_are_captured(capturing: Devices, kind: type[Net], is_captured: bool) -> None:
    used = capturing(1)
    found = []
    for capture in (False, "auto"):
        torch.manual_seed(0)
        losses, step = train(kind().to(used[0]), used, batches(10, used[0]), OPTIMIZERS["AdamW"], capture=capture)
        found.append((losses, torch.rand(())))
    assert num_graphs(step) == is_captured
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
