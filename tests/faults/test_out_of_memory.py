"""A replica that runs out of memory stops the call; memory is free again, the next step right."""

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import lookup_backend

import everygpu
from everygpu.parallel.engines import compiled
from tests import tape
from tests.faults.failing import CapturableNet, CompiledNet, Net, make_batch, raise_as

NUM = 2
IN_BACKWARD = ["hook", "function"]
IN_REPLICAS = ["forward", *IN_BACKWARD]
PLACES = [*IN_REPLICAS, "loss", "update"]
OUTSIDE: dict[str, tuple[Any, str]] = {
    "loss": (F, "mse_loss"),
    "update": (torch.optim.AdamW, "step"),
    "replay": (tape.Tape, "replay"),
}
X, Y = make_batch(NUM), torch.arange(2.0 * len(make_batch(NUM))).reshape(-1, 2)

Train = Callable[[], Tensor]


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(output, y)


class Run:
    """A model that trains in one of the ways there are, beside one device that does the same."""

    def __init__(self, way: str, engine: str = "threads", *, net: type[Net] = Net, **options: Any) -> None:
        self.net, self.plain = (CompiledNet() if engine == "compile" else net()), net()
        self.model = everygpu.DataParallel(self.net, ["cpu"] * NUM, engine=engine)
        self.num_batches = options.get("accumulate", 1)
        optimizer: Any = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.reference = torch.optim.AdamW(self.plain.parameters(), lr=0.01)
        if way == "TrainStep":
            step = everygpu.TrainStep(self.model, loss_of, optimizer, **options)
            self.train: Train = lambda: step(X, Y)
            self.was_replayed = lambda: step.stats().engine == "capture"
            return
        optimizer = everygpu.ShardedOptimizer(optimizer, ["cpu"] * NUM) if way == "ShardedOptimizer" else optimizer

        def train() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(self.model(X), Y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        self.train = train

    def train_batches(self) -> None:
        """Train on the batches of one update."""
        for _ in range(self.num_batches):
            self.train()

    def train_well(self) -> None:
        """Update once, here and on one device; parameters must be equal, and no activation be left."""
        self.train_batches()
        self.reference.zero_grad()
        F.mse_loss(self.plain(X), Y).backward()
        self.reference.step()
        torch.testing.assert_close(list(self.net.parameters()), list(self.plain.parameters()), rtol=1e-4, atol=1e-5)

    def fail(self, place: str, replica: int) -> None:
        """Run out of memory in a place."""
        self.net.place, self.net.replica = place if place in IN_REPLICAS else "", replica
        start = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            if place in OUTSIDE:
                patch.setattr(*OUTSIDE[place], lambda *_, **__: raise_as("memory"))
            with pytest.raises(torch.OutOfMemoryError, match="2 TiB"):
                self.train_batches()
        assert time.monotonic() - start < 60
        self.net.place = ""

    def num_left(self) -> list[float]:
        """Return how many activations are alive in each replica's process."""
        self.net.place = "nowhere, count"
        with torch.no_grad():
            counts = self.model(X)[:: len(X) // NUM, 0].tolist()
        self.net.place = ""
        return counts


WAYS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "threads": [("loop", {}), ("ShardedOptimizer", {}), ("TrainStep", {}), ("TrainStep", {"accumulate": 2})],
    "compile": [("loop", {}), ("TrainStep", {})],
}


@pytest.mark.parametrize("engine", [pytest.param(e, marks=pytest.mark.slow if e == "compile" else ()) for e in WAYS])
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_wherever_a_replica_runs_out_of_memory(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
    monkeypatch.setattr(compiled, "InductorBackend", lambda _: lookup_backend("eager"))
    for way, options in WAYS[engine]:
        run = Run(way, engine, **options)
        run.train_well()
        assert run.model.engine_in_use == engine
        for place in PLACES:
            for replica in range(NUM) if place in IN_REPLICAS else (0,):
                run.fail(place, replica)
                # What a failed backward leaves in its queue, torch's engine lets go at the next backward.
                assert place in IN_BACKWARD or not any(run.num_left()), f"{way}: {place} of replica {replica}"
                run.train_well()
                assert not any(run.num_left()), f"{way}: {place} of replica {replica}"
        run.model.release()


def test_a_captured_step_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is a capture, and in its replays: acted out on the CPU."""
    tape.prepare([torch.device("cpu")], monkeypatch, fused=True)
    run = Run("TrainStep", net=CapturableNet)
    for i in range(14):
        if i in (0, 1):
            run.fail("loss", 0)
        if run.was_replayed():
            run.fail("replay", 0)
        run.train_well()
    assert run.was_replayed()
