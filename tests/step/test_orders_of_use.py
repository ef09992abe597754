"""Loops, steps and evaluations of one model, in whatever order: each is captured, and trains as one device does."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import everygpu
from everygpu.parallel.cuda_graphs.batch_kinds import NUM_WARM_UPS
from tests.step.test_capture import Devices, num_graphs

NUM_STEPS = NUM_WARM_UPS + 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Side:
    """A net that is trained by everygpu in several ways, or plainly."""

    def __init__(self, used: list[torch.device], *, is_ours: bool) -> None:
        self.used, self.is_ours = used, is_ours
        self.net = Net().to(used[0])
        self.kept: list[Tensor] = []
        self.optimizers = [torch.optim.SGD(self.net.parameters(), lr=lr, momentum=0.9) for lr in (0.05, 0.02)]
        if is_ours:
            self.wrappers = [everygpu.DataParallel(self.net, used, engine=e) for e in ("threads", "capture", "capture")]
            self.steps = [
                everygpu.TrainStep(self.wrappers[0], F.mse_loss, self.optimizers[0]),
                everygpu.TrainStep(self.wrappers[1], F.mse_loss, self.optimizers[1]),
            ]

    def loop(self, data: Any, which: int, *, keeps: bool) -> list[Tensor]:
        losses = []
        model, optimizer = self.wrappers[which] if self.is_ours else self.net, self.optimizers[which % 2]
        for x, y in data:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        self.kept = [F.mse_loss(model(x), y)] if keeps else self.kept  # with its graph, as a notebook does
        return losses

    def step(self, data: Any, which: int) -> list[Tensor]:
        if not self.is_ours:
            return self.loop(data, which, keeps=False)
        self.optimizers[which].zero_grad()
        losses = [self.steps[which](x, y) for x, y in data]
        assert num_graphs(self.steps[which]) == 1
        return losses

    def evaluate(self, data: Any, which: int) -> list[Tensor]:
        if self.is_ours:
            return [self.steps[which].evaluate(x, y).loss for x, y in data[:2]]
        with torch.no_grad():
            return [F.mse_loss(self.net(x), y) for x, y in data[:2]]


def run_order(used: list[torch.device], seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ours, plain = (Side(used, is_ours=is_ours) for is_ours in (True, False))
    done = []
    for act in [draw.choice(["loop", "keep", "step", "step", "evaluate"]) for _ in range(4)] + ["step"]:
        data = [
            tuple(torch.randn(6, n, generator=generator, dtype=torch.double).to(used[0]) for n in (5, 3))
            for _ in range(NUM_STEPS)
        ]
        which = draw.randrange(3 if act in ("loop", "keep") else 2)
        done.append(f"{act} {which}")
        if act in ("loop", "keep"):
            found = [side.loop(data, which, keeps=act == "keep") for side in (ours, plain)]
        else:
            found = [getattr(side, act)(data, which) for side in (ours, plain)]
        torch.testing.assert_close(*found, rtol=1e-8, atol=1e-8, msg=lambda text: f"seed {seed}, {done}: {text}")
    for (name, a), b in zip(ours.net.named_parameters(), plain.net.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8, msg=f"seed {seed}, {done}: {name}")


@pytest.mark.parametrize("seed", range(4))
def test_any_order_is_captured(capturing: Devices, seed: int) -> None:
    run_order(capturing(1 + seed % 2), seed)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_many_orders_are_captured(capturing: Devices, count: int) -> None:
    for seed in range(100, 140):
        run_order(capturing(count), seed)


@pytest.mark.parametrize("count", [1, 2])
def test_accumulators_of_before_are_no_part_of_a_capture(capturing: Devices, count: int) -> None:
    """They accumulate on the stream that was current when they were made, for as long as a graph has them."""
    used = capturing(count)
    net = Net().to(used[0])
    kept = F.mse_loss(net(torch.zeros(2, 5, dtype=torch.double, device=used[0])), torch.zeros(2, 3).to(used[0]))
    calls: list[Any] = []
    nodes = [get_gradient_edge(p).node for p in net.parameters()]
    for node in nodes:
        node.register_prehook(calls.append)  # no Python code, which would be seen to write
    step = everygpu.TrainStep(
        everygpu.DataParallel(net, used), F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1), capture=True
    )
    x, y = (torch.ones(6, n, dtype=torch.double, device=used[0]) for n in (5, 3))
    before = 0
    for _ in range(NUM_STEPS):
        step(x, y)
        if num_graphs(step):
            break
        before = len(calls)
    assert num_graphs(step) == 1
    assert before > 0  # eager steps use them
    assert len(calls) == before
    assert kept.grad_fn is not None


@pytest.mark.parametrize("count", [1, 2])
def test_a_penalty_on_parameters_that_the_loss_has_itself(capturing: Devices, count: int) -> None:
    used = capturing(count)
    found = []
    for captures in (False, True):
        net = Net().to(used[0])
        params = list(net.parameters())

        def loss(output: Tensor, target: Tensor, params: list[nn.Parameter] = params) -> Tensor:
            return F.mse_loss(output, target) + sum(p.square().sum() for p in params)

        optimizer = torch.optim.SGD(params, lr=0.01)
        step = everygpu.TrainStep(everygpu.DataParallel(net, used), loss, optimizer, capture=captures and "auto")
        x, y = (torch.ones(6, n, dtype=torch.double, device=used[0]) for n in (5, 3))
        found.append([step(x, y) for _ in range(NUM_STEPS)])
        assert not captures or num_graphs(step) == 1
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("count", "accumulate"), [(1, 3), (2, 1)])
def test_where_a_loss_reads_on_the_host_the_forward_is_captured(
    capturing: Devices, count: int, accumulate: int
) -> None:
    used = capturing(count)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        found = F.mse_loss(output, target)
        return found * 2 if found.item() > 0.5 else found

    found = []
    for captures in (False, True):
        net = Net().to(used[0])
        model = everygpu.DataParallel(net, used, engine="capture" if captures else "threads")
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        step = everygpu.TrainStep(model, loss, optimizer, accumulate=accumulate, capture="auto" if captures else False)
        generator = torch.Generator().manual_seed(1)
        batches = [
            tuple(torch.randn(6, n, generator=generator, dtype=torch.double).to(used[0]) for n in (5, 3))
            for _ in range(6 * NUM_STEPS)
        ]
        losses = [step(x, y) for x, y in batches]
        found.append([torch.stack(losses), *net.state_dict().values()])
        if captures:
            assert step._capture is not None
            assert step._capture.reason is not None
            assert step._strategy.captured_forward is not None
            assert len(step._strategy.captured_forward.capture._graphs) == 1
            assert step.stats().engine == "capture"
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


class Bound(Net):
    """Computes by a function that has a parameter in its closure."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.last.weight
        self.head = lambda h: h @ weight.T

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).tanh()) + self.last.bias


@pytest.mark.parametrize("count", [1, 2])
def test_a_function_with_a_parameter_in_its_closure_is_captured(
    capturing: Devices, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas have functions of their own, with leaves that a capture has made: these are no code of the user's."""
    monkeypatch.setattr("everygpu.parallel.cuda_graphs.reached_state._bits_of_tensor", lambda t: b"")  # as on GPUs
    used, found = capturing(count), []
    x, y = (torch.ones(6, n, dtype=torch.double, device=used[0]) for n in (5, 3))
    for captures in (False, True):
        net = Bound().to(used[0])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = everygpu.DataParallel(net, used)
        step = everygpu.TrainStep(model, F.mse_loss, optimizer, capture=captures and "auto")
        found.append([torch.stack([step(x, y) for _ in range(NUM_STEPS)]), *net.state_dict().values()])
        assert not captures or num_graphs(step) == 1
    torch.testing.assert_close(*found)
