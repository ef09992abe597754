"""``engine="capture"`` among several threads and streams."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

import everygpu
from everygpu.parallel.cuda_graphs.batch_kinds import NUM_WARM_UPS
from everygpu.parallel.cuda_graphs.multi_gpu_graph import is_capturing
from tests import tape
from tests.parallel.cuda_graphs.forwards import (
    NUM_STEPS,
    Devices,
    Net,
    captured,
    loss_of,
    make_batches,
    num_graphs,
    train,
)


def test_late_gradients_of_a_backward_that_is_not_replayed(capturing: Devices) -> None:
    used = capturing(2)
    model = everygpu.DataParallel(Net().to(used[0]).eval(), used, engine="capture")
    weight = model.module.last.weight
    (x, y), *_ = make_batches(1)
    (wanted,) = torch.autograd.grad(loss_of(model(x), y), [weight])
    for _ in range(NUM_STEPS):
        loss_of(model(x), y).backward()
    assert num_graphs(model) == 1
    for _ in range(4):
        output = model(x)
        model.module.calls.add_(1)  # a backward is replayed only where nothing has been written since
        if used[0].type == "cuda":
            _keep_busy(used)
        (found,) = torch.autograd.grad(loss_of(output, y), [weight])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def _keep_busy(used: list[torch.device]) -> None:
    """Have what is queued next begin late, in memory that is full of something else."""
    for d in used:
        [torch.full((128,), 9.0, device=d) for _ in range(32)]
        with torch.cuda.device(d):
            torch.cuda._sleep(50_000_000)


def test_threads_that_train_side_by_side(capturing: Devices) -> None:
    used = capturing(2)
    model = everygpu.DataParallel(Net().to(used[0]).eval(), used, engine="capture")
    (x, y), *_ = make_batches(1)
    weight = model.module.last.weight
    found: dict[int, list[Tensor]] = {k: [] for k in range(3)}

    def work(scale: int) -> None:
        for _ in range(4 * NUM_STEPS):
            found[scale] += torch.autograd.grad(loss_of(model(x * scale), y), [weight])

    threads = [threading.Thread(target=work, args=(k,)) for k in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert num_graphs(model) == 1
    for first, *others in found.values():
        assert len(others) == 4 * NUM_STEPS - 1
        assert all(torch.allclose(g, first, rtol=1e-4, atol=1e-5) for g in others)


class Held(Net):
    """Calls functions while its forward is captured, once: no guard sees them, as they are gone then."""

    def __init__(self, during: "SimpleQueue[Callable[[], object]]") -> None:
        super().__init__()
        self.during = during

    def forward(self, x: Tensor) -> Tensor:
        if x.device.index in (None, 0):
            while is_being_captured() and not self.during.empty():
                self.during.get()()
        return super().forward(x)


def is_being_captured() -> bool:
    return tape.current_tape() is not None or is_capturing()


def side_by_side(*works: Callable[[], object]) -> None:
    """Run functions in threads; raise what the first of them raises."""
    with ThreadPoolExecutor(len(works)) as threads:
        for future in [threads.submit(work) for work in works]:
            future.result(timeout=120)


class Pair:
    """Two models that capture twice each, the second time while the other goes backward without a replay.

    Args:
        used: The devices of both.
        at_once: Train them in threads, that meet there; else one after the other.
    """

    def __init__(self, used: list[torch.device], *, at_once: bool) -> None:
        self._used = used
        self._at_once = at_once
        self._trained = threading.Barrier(2)
        self._capturing = [threading.Event(), threading.Event()]
        self._went_backward = [threading.Event(), threading.Event()]
        self.losses: list[list[Tensor]] = [[], []]
        self._during: list[SimpleQueue[Callable[[], object]]] = [SimpleQueue(), SimpleQueue()]
        self.nets = [Held(during).to(used[0]) for during in self._during]
        works = [functools.partial(self._train, me) for me in (0, 1)]
        if at_once:
            side_by_side(*works)
        else:
            for work in works:
                work()

    def _train(self, me: int) -> None:
        net, found, during = self.nets[me], self.losses[me], self._during[me]
        model = everygpu.DataParallel(net, self._used, engine="capture")
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01 * (me + 1))
        for _ in range(2):  # who comes too late to capture the first time does it the second time
            train(model, optimizer, found)
            if self._at_once:
                self._trained.wait(60)
        assert num_graphs(model) == 1
        for turn in (0, 1):
            if turn == me:
                if self._at_once:
                    during.put(self._capturing[me].set)
                    during.put(functools.partial(self._went_backward[me].wait, 60))
                train(model, optimizer, found, rows=10)
                assert num_graphs(model) == 2
                assert during.empty()
            else:
                optimizer.zero_grad()
                found.append(self._go_backward(model, turn))
                optimizer.step()
                train(model, optimizer, found)

    def _go_backward(self, model: everygpu.DataParallel, other: int) -> Tensor:
        (x, y), *_ = make_batches(1)
        value = loss_of(model(x), y)
        model.module.calls.add_(1)  # a backward is replayed only where nothing has been written since
        if self._at_once:
            assert self._capturing[other].wait(60)
        value.backward()
        loss = value.detach().cpu().clone()
        self._went_backward[other].set()
        return loss


def test_models_that_two_threads_capture(capturing: Devices) -> None:
    used = capturing(2)
    alone, together = Pair(used, at_once=False), Pair(used, at_once=True)
    for me in (0, 1):
        torch.testing.assert_close(together.losses[me], alone.losses[me], rtol=1e-4, atol=1e-5)
        values, wanted = together.nets[me].state_dict(), alone.nets[me].state_dict()
        torch.testing.assert_close(values, wanted, rtol=1e-3, atol=1e-4)


def test_who_cannot_capture_now_captures_later(capturing: Devices) -> None:
    used = capturing(2)
    during: SimpleQueue[Callable[[], object]] = SimpleQueue()
    first = everygpu.DataParallel(Held(during).to(used[0]), used, engine="capture")
    second = everygpu.DataParallel(Net().to(used[0]), used, engine="capture")

    def run(model: everygpu.DataParallel, num: int) -> None:
        for x, y in make_batches(num):
            loss_of(model(x), y).backward()

    run(second, NUM_WARM_UPS)
    during.put(lambda: side_by_side(lambda: run(second, 2)))
    run(first, NUM_STEPS)
    assert during.empty()
    assert (num_graphs(first), num_graphs(second)) == (1, 0)
    run(second, 1)
    assert num_graphs(second) == 1


def test_other_streams(capturing: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    model = captured(capturing)
    others = {d: torch.cuda.Stream(d) if d.type == "cuda" else object() for d in model.replica_devices}
    monkeypatch.setattr("everygpu.parallel.cuda_graphs.captured_forward.current_stream", others.get)
    model(make_batches(1)[0][0])
    assert num_graphs(model) == 0
