"""Modules of users whose replicas wait for each other in forward, as the SynchronizedBatchNorm files do."""

import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everygpu
from everygpu.errors import OptionError
from everygpu.parallel.engines import scheduler
from tests.parallel.oracle import TOLERANCE, rows


class Hub:
    """What replicas of one layer meet at: the first replica's, to which the others connect."""

    def __init__(self) -> None:
        self.asked: queue.Queue[Any] = queue.Queue()
        self.answers: list[queue.Queue[Any]] = []


class WaitingBatchNorm(nn.BatchNorm1d):
    """Batch normalisation over all replicas: the first one adds up sums that the others send, and answers."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.hub, self.position, self.answer = Hub(), None, None

    def __data_parallel_replicate__(self, context: Any, position: int) -> None:
        self.position = position
        if position == 0:
            context.hub, self.hub.answers = self.hub, []
        else:
            self.hub, self.answer = context.hub, queue.Queue()
            self.hub.answers.append(self.answer)

    def forward(self, x: Tensor) -> Tensor:
        if self.position is None or not self.training:
            return super().forward(x)
        sums = x.sum(0), x.square().sum(0), x.new_tensor(len(x))
        if self.position > 0:
            self.hub.asked.put(sums)
            mean, var = (t.to(x.device) for t in self.answer.get())
        else:
            every = [sums, *(self.hub.asked.get() for _ in self.hub.answers)]
            total, squares, count = (sum(t.to(x.device) for t in column) for column in zip(*every))
            mean = total / count
            var = squares / count - mean.square()
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var * count / (count - 1), self.momentum)
                self.num_batches_tracked += 1
            for answer in self.hub.answers:
                answer.put((mean, var))
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


class Context:
    """What the replicas of a layer have in common."""


def connect(replicas: Sequence[nn.Module]) -> None:
    contexts = [Context() for _ in replicas[0].modules()]
    for position, replica in enumerate(replicas):
        for context, module in zip(contexts, replica.modules()):
            if hasattr(module, "__data_parallel_replicate__"):
                module.__data_parallel_replicate__(context, position)


def patched(module: nn.Module, devices: list[torch.device]) -> everygpu.DataParallel:
    model = everygpu.DataParallel(module, devices)
    replicate = model.replicate

    @functools.wraps(replicate)
    def replicate_and_connect(module: nn.Module, device_ids: Any) -> Any:
        replicas = replicate(module, device_ids)
        connect(replicas)
        return replicas

    model.replicate = replicate_and_connect
    return model


class Connecting(everygpu.DataParallel):
    def replicate(self, module: nn.Module, device_ids: Any) -> Any:
        replicas = super().replicate(module, device_ids)
        connect(replicas)
        return replicas


class ConnectingLoop(Connecting):
    """With a forward of its own, as torch.nn.DataParallel's."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = self.scatter(inputs, kwargs, self.device_ids)
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        return self.gather(self.parallel_apply(replicas, inputs, kwargs), self.output_device)


def net(norm: type[nn.BatchNorm1d]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), norm(5), nn.Tanh(), nn.Linear(5, 5), norm(5), nn.Linear(5, 2)).double()


@pytest.mark.parametrize("wrap", [patched, Connecting, ConnectingLoop])
@pytest.mark.parametrize("with_step", [False, True], ids=["loop", "step"])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_they_run_at_once_where_replicate_connects_them(
    devices: Callable[[int], list[torch.device]], wrap: Any, with_step: bool, num_replicas: int
) -> None:
    used = devices(num_replicas)
    model, bare = wrap(net(WaitingBatchNorm), used), net(nn.BatchNorm1d).to(used[0])
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, bare))
    step = everygpu.TrainStep(model, nn.MSELoss(), ours) if with_step else None
    for seed, num_rows in enumerate([7, 7, 2 * num_replicas - 1, 7]):
        x, y = (rows(num_rows, n, device=used[0], seed=seed) for n in (4, 2))
        if step is not None:
            step(x, y)
        else:
            ours.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            ours.step()
        theirs.zero_grad()
        nn.functional.mse_loss(bare(x), y).backward()
        theirs.step()
    torch.testing.assert_close(model.module.state_dict(), bare.state_dict(), **TOLERANCE)


def test_steps_of_theirs_are_not_captured() -> None:
    model = patched(net(WaitingBatchNorm), [torch.device("cpu")] * 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(OptionError, match="with its own replicate"):
        everygpu.TrainStep(model, nn.MSELoss(), optimizer, capture=True)


class Waiting(nn.Module):
    """Its first replica goes on when it is told to."""

    def __init__(self, go_on: threading.Event) -> None:
        super().__init__()
        self.go_on = go_on

    def forward(self, x: Tensor) -> Tensor:
        assert x[0] > 0 or self.go_on.wait(60)
        return x


def test_a_replica_that_waits_long_for_its_turn_names_what_the_other_one_waits_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "LONG_TURN_S", 0.01)
    told, go_on = [], threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            go_on.set()

    logger, handler = logging.getLogger("everygpu"), Handler()
    logger.addHandler(handler)
    scheduler._warn_of_long_turn.cache_clear()
    try:
        module = Waiting(go_on)
        model = everygpu.DataParallel(module, ["cpu"] * 3)
        assert model(torch.arange(3)).tolist() == [0, 1, 2]
    finally:
        logger.removeHandler(handler)
    line = Waiting.forward.__code__.co_firstlineno + 1
    assert f"and replica 0 stays at {__file__}:{line}, in forward." in told[0]
    assert "everygpu.SyncBatchNorm" in told[0]
