"""``engine="graphs"``: what is launched gives what replicas give that run as they are."""

import contextlib
import copy
import functools
import gc
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

import everygpu
from everygpu.errors import EveryGPUError
from everygpu.parallel.cuda_graphs import deferred_linear, recorded_forward, recorder
from everygpu.parallel.cuda_graphs.multi_gpu_graph import is_capturing
from everygpu.parallel.cuda_graphs.recorder import NUM_WARM_UPS
from tests import tape
from tests.step import test_capture

Devices = Callable[[int], list[torch.device]]

NUM_STEPS = NUM_WARM_UPS + 4


class Net(test_capture.Net):
    """With a layer of two names, too."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.tied = self.last


class Outputs(NamedTuple):
    scores: Tensor
    extra: Tensor
    best: Tensor
    name: str
    nothing: None


class TwoOutputs(Net):
    """Returns a structure of which not everything takes part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Any:
        h = self.norm(self.first(x)).tanh()
        scores = self.last(h)
        return Outputs(scores, self.other(h), scores.argmax(1), "two", None)


@pytest.fixture
def recording(
    either_way: Devices, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Devices]:
    """``devices`` on which forwards are recorded; on GPUs most tests go one way, the CPU's are enough for the other.

    Kernels go with last products that are left out of recordings, copies with those that aren't.
    """
    by_copies = request.node.callspec.params["either_way"] == "copies"
    monkeypatch.setattr(deferred_linear, "is_large", lambda *_: not by_copies)
    if either_way(2)[0].type == "cuda":
        if by_copies and request.node.originalname not in BOTH_WAYS_ON_GPUS:
            pytest.skip("the CPU's are enough")
        torch.cuda.manual_seed_all(0)
    yield either_way
    gc.collect()  # exceptions that were expected hold models, which hold threads


BOTH_WAYS_ON_GPUS = {"test_training_is_the_same", "test_with_options"}


def make_batches(num: int, rows: int = 12) -> list[tuple[Tensor, Tensor]]:
    return test_capture.batches(num, torch.device("cpu"), rows, ignore=False)


def num_recordings(model: everygpu.DataParallel) -> int:
    recorder = model._recorder
    return 0 if recorder is None else len(recorder._capture._recordings)


def loss_of(output: Any, y: Tensor) -> Tensor:
    scores = output.scores if isinstance(output, Outputs) else output
    return F.cross_entropy(scores, y.to(scores.device))


Scenario = Callable[[everygpu.DataParallel, torch.optim.Optimizer, list[Tensor]], None]


def train(
    model: everygpu.DataParallel,
    optimizer: torch.optim.Optimizer,
    found: list[Tensor],
    num: int = NUM_STEPS,
    loss: Callable[[Any, Tensor], Tensor] = loss_of,
    rows: int = 12,
) -> None:
    for x, y in make_batches(num, rows):
        value = loss(model(x), y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found.append(value.detach().cpu().clone())


def check(recording: Devices, scenario: Scenario, *, make: Any = Net, count: int = 2, **options: Any) -> None:
    """Go through a scenario with threads and with recordings; everything must be equal."""
    used = recording(count)
    results = []
    for engine in ("threads", "graphs"):
        torch.manual_seed(0)
        net = make().to(used[0])
        model = everygpu.DataParallel(net, used, engine=engine, **options)
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
        found: list[Tensor] = []
        train(model, optimizer, found)
        assert num_recordings(model) == (engine == "graphs")
        scenario(model, optimizer, found)
        results.append((found, copy.deepcopy(net.state_dict()), [p.grad is None for p in net.parameters()]))
    (plain, values, missing), (recorded, ours, ours_missing) = results
    assert len(plain) == len(recorded)
    for a, b in zip(recorded, plain):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for name, value in values.items():
        # Threads add up in bfloat16, kernels in float32.
        rtol, atol = (0.02, 0.02) if value.dtype is torch.bfloat16 else (1e-3, 1e-4)
        torch.testing.assert_close(ours[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    assert ours_missing == missing


def nothing_more(model: Any, optimizer: Any, found: Any) -> None:
    """End here."""


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_training_is_the_same(recording: Devices, count: int) -> None:
    check(recording, train, count=count)


class Odd(nn.Module):
    """Of parameters and gradients whose memory is in another order, or spread, or missing, and of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 4, 2).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.part = nn.Parameter(torch.randn(7, 3)[1:5, 1:])  # with gaps
        self.shift = nn.Parameter(torch.randn(9)[1:6])  # not aligned
        self.brief = nn.Parameter(torch.randn(1, 5).bfloat16())
        self.exact = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.imaginary = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.sometimes = nn.Parameter(torch.randn(5))
        self.number = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x.view(-1, 1, 2, 3)).sum((2, 3))
        out = h @ self.turned + (h @ self.part).sum(1, keepdim=True) + self.shift
        out = out * self.brief.float() * self.number + self.exact.float() * self.imaginary.abs()
        return out + self.sometimes if x.device.index in (None, 0) else out


def test_parameters_of_all_kinds(recording: Devices) -> None:
    check(recording, train, make=Odd, count=3)


@pytest.mark.parametrize("options", [{"gather": "joined"}, {"split": "even"}, {"buffers": "mean"}], ids=str)
def test_with_options(recording: Devices, options: dict[str, Any]) -> None:
    check(recording, train, **options)


def test_other_batches(recording: Devices) -> None:
    def scenario(model: everygpu.DataParallel, optimizer: Any, found: list[Tensor]) -> None:
        for rows in (11, 4, 12, 11):
            train(model, optimizer, found, rows=rows)

    check(recording, scenario)


def test_structures(recording: Devices) -> None:
    def scenario(model: everygpu.DataParallel, optimizer: Any, found: list[Tensor]) -> None:
        train(model, optimizer, found)
        (x, _), *_ = make_batches(1)
        output = model(x)
        assert type(output) is Outputs
        assert output.name == "two"
        assert output.nothing is None
        assert not output.best.requires_grad
        assert output.extra.shape == (12, 1)
        found += [output.best.cpu() + 0, output.extra.detach().cpu() + 0]

    check(recording, scenario, make=TwoOutputs)


def test_backward_from_other_outputs(recording: Devices) -> None:
    def both(output: Outputs, y: Tensor) -> Tensor:
        return loss_of(output, y) + output.extra.square().mean()

    def scenario(model: everygpu.DataParallel, optimizer: Any, found: list[Tensor]) -> None:
        train(model, optimizer, found, num=1, loss=both)
        train(model, optimizer, found, num=1)
        train(model, optimizer, found, num=8, loss=both)
        train(model, optimizer, found, num=1)

    check(recording, scenario, make=TwoOutputs)


def test_results_are_the_users(recording: Devices) -> None:
    used = recording(2)
    model = everygpu.DataParallel(Net().to(used[0]), used, engine="graphs")
    params = [p for p in model.parameters() if p.requires_grad and p is not model.module.unused]
    kept = []
    for x, _ in make_batches(NUM_STEPS):
        output = model(x)
        grads = torch.autograd.grad(output.square().mean(), params)
        kept.append((output, output.detach().clone(), grads, [g.clone() for g in grads]))
    assert num_recordings(model) == 1
    for output, values, grads, copies in kept:
        torch.testing.assert_close(output, values, rtol=0, atol=0)
        assert all(map(torch.equal, grads, copies))


def test_gradients_add_up(recording: Devices) -> None:
    def scenario(model: everygpu.DataParallel, optimizer: Any, found: list[Tensor]) -> None:
        for k, (x, y) in enumerate(make_batches(8)):
            loss_of(model(x), y).backward()
            if k % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=k % 4 == 1)
            found.append(model.module.last.weight.detach().cpu().clone())

    check(recording, scenario)


def test_two_forwards_before_their_backwards(recording: Devices) -> None:
    def scenario(model: everygpu.DataParallel, optimizer: Any, found: list[Tensor]) -> None:
        for (x, y), (a, b) in zip(make_batches(4), make_batches(8)[4:]):
            optimizer.zero_grad()
            first, second = model(x), model(a)
            (loss_of(first, y) + 2 * loss_of(second, b)).backward()
            optimizer.step()
            found.append(first.detach().cpu() + 0)

    check(recording, scenario)


def test_a_graph_that_is_dropped(recording: Devices) -> None:
    used = recording(2)
    model = everygpu.DataParallel(Net().to(used[0]), used, engine="graphs")
    launches = []
    for x, _ in make_batches(2 * NUM_STEPS):
        model(x)  # what it returns has been dropped when the next one begins
        launches.append(model._recorder._use)
    assert all(a is not b for a, b in itertools.pairwise(launches[-NUM_STEPS:])), "each has been launched"
    output = model(x)
    output.sum().backward()  # of which nobody has seen one yet
    assert model.module.first.weight.grad is not None


def test_backward_twice(recording: Devices) -> None:
    def scenario(model: everygpu.DataParallel, optimizer: Any, found: list[Tensor]) -> None:
        for x, y in make_batches(3):
            value = loss_of(model(x), y)
            optimizer.zero_grad()
            value.backward(retain_graph=True)
            model(x)  # not where the first one's backward finds what it needs
            value.backward()
            found += [p.grad.detach().cpu().clone() for p in model.parameters() if p.grad is not None]
            with pytest.raises(RuntimeError, match="retain_graph=True"):
                value.backward()

    check(recording, scenario)


def test_parameters_written_before_the_backward(recording: Devices) -> None:
    used = recording(2)
    model = everygpu.DataParallel(Net().to(used[0]), used, engine="graphs")
    for x, y in make_batches(NUM_STEPS):
        loss_of(model(x), y).backward()
    assert num_recordings(model) == 1
    value = loss_of(model(x), y)
    with torch.no_grad():
        model.module.last.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
    value = loss_of(model(x), y)
    with torch.no_grad():
        model.module.last.bias.mul_(2)  # which no backward needs
    value.backward()


def test_late_gradients_of_a_backward_that_is_not_launched(recording: Devices) -> None:
    used = recording(2)
    model = everygpu.DataParallel(Net().to(used[0]).eval(), used, engine="graphs")
    weight = model.module.last.weight
    (x, y), *_ = make_batches(1)
    (wanted,) = torch.autograd.grad(loss_of(model(x), y), [weight])
    for _ in range(NUM_STEPS):
        loss_of(model(x), y).backward()
    assert num_recordings(model) == 1
    for _ in range(4):
        output = model(x)
        model.module.calls.add_(1)  # a backward is launched only where nothing has been written since
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


def test_between_training_and_evaluation(recording: Devices) -> None:
    def scenario(model: everygpu.DataParallel, optimizer: Any, found: list[Tensor]) -> None:
        for _ in range(2):
            model.eval()
            with torch.no_grad():
                found += [model(x).cpu() + 0 for x, _ in make_batches(3)]
            model.train()
            train(model, optimizer, found, num=2)
            if model.engine == "graphs":
                assert num_recordings(model) == 1  # the same as before

    check(recording, scenario)


def test_edits_are_seen(recording: Devices) -> None:
    def scenario(model: everygpu.DataParallel, optimizer: Any, found: list[Tensor]) -> None:
        net = model.module
        with torch.no_grad():
            net.last.weight.mul_(0.5)
        train(model, optimizer, found, num=2)
        with torch.no_grad():
            net.frozen.mul_(0.5)
        train(model, optimizer, found)
        net.norm.momentum = 0.5
        train(model, optimizer, found)
        net.load_state_dict({k: v * 0.9 if v.is_floating_point() else v for k, v in net.state_dict().items()})
        train(model, optimizer, found, num=2)
        net.first.requires_grad_(False)
        train(model, optimizer, found)
        net.first.requires_grad_(True)
        net.last.weight.data = net.last.weight.data.clone()
        train(model, optimizer, found)

    check(recording, scenario)


def test_autocast(recording: Devices) -> None:
    used = recording(2)
    found = []
    for engine in ("threads", "graphs"):
        model = everygpu.DataParallel(Net().to(used[0]), used, engine=engine)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for x, y in make_batches(NUM_STEPS):
            optimizer.zero_grad()
            with torch.autocast(used[0].type, torch.bfloat16):
                output = model(x)
            assert output.dtype is torch.bfloat16
            loss_of(output.float(), y).backward()
            optimizer.step()
            losses.append(output.detach().float().cpu() + 0)
        found.append(losses[-1])
    torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=0.05)


def test_dropout_is_drawn_anew(recording: Devices) -> None:
    used = recording(2)
    model = everygpu.DataParallel(Net(dropout=0.5).to(used[0]), used, engine="graphs")
    (x, _), *_ = make_batches(1)
    outputs = [model(x).detach().cpu() + 0 for _ in range(NUM_STEPS)]
    gc.collect()
    assert not any(torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i])


@pytest.mark.parametrize("kind", ["hook", "print", "object", "sync"])
def test_what_cannot_be_recorded_runs_as_it_is(recording: Devices, kind: str, caplog: Any) -> None:
    class Strange(Net):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            if kind == "sync":
                y = y * float(y.detach().sum() > -1e9)
            return {"y": y, "object": range(3)} if kind == "object" else y

    used = recording(2)
    net = Strange().to(used[0])
    seen: list[int] = []
    if kind == "hook":
        net.last.register_forward_hook(lambda *_: seen.append(1))
    model = everygpu.DataParallel(net, used, engine="graphs")
    with caplog.at_level(logging.INFO, "everygpu"):
        for x, y in make_batches(NUM_STEPS):
            output = model(x)
            loss_of(output["y"] if kind == "object" else output, y).backward()
    if kind == "print":
        assert num_recordings(model) == 1
        return
    assert num_recordings(model) == 0
    assert len([m for m in caplog.messages if "without CUDA graphs" in m]) == 1
    assert len(seen) == (2 * NUM_STEPS if kind == "hook" else 0)


def test_second_derivatives_are_refused(recording: Devices) -> None:
    used = recording(2)
    model = everygpu.DataParallel(Net().to(used[0]), used, engine="graphs")
    for x, y in make_batches(NUM_STEPS):
        value = loss_of(model(x), y)
        torch.autograd.grad(value, model.module.last.weight, retain_graph=False)
    value = loss_of(model(x), y)
    with pytest.raises(EveryGPUError, match="engine='threads'"):
        torch.autograd.grad(value, model.module.last.weight, create_graph=True)


def test_inputs_that_take_gradients(recording: Devices) -> None:
    used = recording(2)
    model = everygpu.DataParallel(Net().to(used[0]), used, engine="graphs")
    for x, y in make_batches(NUM_STEPS):
        loss_of(model(x), y).backward()
    x = x.to(used[0]).requires_grad_()
    loss_of(model(x), y).backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def test_a_parameter_in_a_plain_attribute(recording: Devices) -> None:
    class Holding(Net):
        def __init__(self) -> None:
            super().__init__()
            self.weights = [self.last.weight]

        def forward(self, x: Tensor) -> Any:
            return super().forward(x) + self.weights[0].square().sum()

    used = recording(2)
    found = []
    for engine in ("threads", "graphs"):
        net = Holding().to(used[0])
        net.weights = [net.last.weight]
        model = everygpu.DataParallel(net, used, engine=engine)
        for x, y in make_batches(NUM_STEPS):
            net.zero_grad()
            loss_of(model(x), y).backward()
        found.append(net.last.weight.grad.cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_without_gpus_replicas_run_in_threads(caplog: Any) -> None:
    model = everygpu.DataParallel(Net(), ["cpu"] * 2, engine="graphs")
    with caplog.at_level(logging.INFO, "everygpu"):
        for x, y in make_batches(NUM_STEPS):
            loss_of(model(x), y).backward()
    assert [m for m in caplog.messages if "replicas run in threads" in m] == caplog.messages[:1]
    assert num_recordings(model) == 0


def test_copies_and_pickles_have_none(recording: Devices) -> None:
    used = recording(2)
    model = everygpu.DataParallel(Net().to(used[0]), used, engine="graphs")
    for x, y in make_batches(NUM_STEPS):
        loss_of(model(x), y).backward()
    twin = copy.deepcopy(model)
    assert num_recordings(model) == 1
    assert num_recordings(twin) == 0
    torch.testing.assert_close(twin(x).detach() + 0, model(x).detach() + 0)
    model.release()
    assert num_recordings(model) == 0


def test_parameters_that_are_replaced(recording: Devices) -> None:
    def scenario(model: everygpu.DataParallel, optimizer: Any, found: list[Tensor]) -> None:
        values = {k: v * 0.9 if v.is_floating_point() else v.clone() for k, v in model.state_dict().items()}
        model.load_state_dict(values, assign=True)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        train(model, optimizer, found, num=2 * NUM_STEPS)
        if model.engine == "graphs":
            assert num_recordings(model) == 1

    check(recording, scenario)


def test_no_hooks_are_left_on_what_is_the_users(recording: Devices) -> None:
    class Open(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x, self.last.weight

    used = recording(2)
    model = everygpu.DataParallel(Open().to(used[0]), used, engine="graphs")
    x = make_batches(1)[0][0].to(used[0]).requires_grad_()
    for _ in range(NUM_STEPS):
        sum(t.sum() for t in model(x)).backward()
    assert not x._backward_hooks
    assert not model.module.last.weight._backward_hooks


def test_gradients_wanted_within_inference_mode(recording: Devices) -> None:
    used = recording(2)
    model = everygpu.DataParallel(Net().to(used[0]), used, engine="graphs")
    for x, _ in make_batches(NUM_STEPS):
        with torch.inference_mode(), torch.enable_grad():
            assert model(x).is_inference()
    assert num_recordings(model) == 0


def test_threads_that_train_side_by_side(recording: Devices) -> None:
    used = recording(2)
    model = everygpu.DataParallel(Net().to(used[0]).eval(), used, engine="graphs")
    (x, y), *_ = make_batches(1)
    weight = model.module.last.weight
    found: dict[int, list[Tensor]] = {k: [] for k in range(3)}

    def work(scale: int) -> None:
        for _ in range(8 * NUM_STEPS):
            found[scale] += torch.autograd.grad(loss_of(model(x * scale), y), [weight])

    threads = [threading.Thread(target=work, args=(k,)) for k in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert num_recordings(model) == 1
    for first, *others in found.values():
        assert len(others) == 8 * NUM_STEPS - 1
        assert all(torch.allclose(g, first, rtol=1e-4, atol=1e-5) for g in others)


class Held(Net):
    """Calls a function while its forward is recorded, once."""

    def __init__(self, during: list[Callable[[], object]]) -> None:
        super().__init__()
        self.take = lambda: during.pop()() if during and is_recording() else None

    def forward(self, x: Tensor) -> Tensor:
        if x.device.index in (None, 0):
            self.take()
        return super().forward(x)


def is_recording() -> bool:
    return tape.current_tape() is not None or is_capturing()


def side_by_side(*works: Callable[[], object]) -> None:
    """Run functions in threads; raise what the first of them raises."""
    with ThreadPoolExecutor(len(works)) as threads:
        for future in [threads.submit(work) for work in works]:
            future.result(timeout=120)


class Pair:
    """Two models that record twice each, the second time while the other goes backward without a launch.

    Args:
        used: The devices of both.
        at_once: Train them in threads, that meet there; else one after the other.
    """

    def __init__(self, used: list[torch.device], *, at_once: bool) -> None:
        self._used = used
        self._at_once = at_once
        self._trained = threading.Barrier(2)
        self._recording = [threading.Event(), threading.Event()]
        self._went_backward = [threading.Event(), threading.Event()]
        self.losses: list[list[Tensor]] = [[], []]
        self._during: list[list[Callable[[], object]]] = [[], []]
        self.nets = [Held(during).to(used[0]) for during in self._during]
        works = [functools.partial(self._train, me) for me in (0, 1)]
        if at_once:
            side_by_side(*works)
        else:
            for work in works:
                work()

    def _train(self, me: int) -> None:
        net, found, during = self.nets[me], self.losses[me], self._during[me]
        model = everygpu.DataParallel(net, self._used, engine="graphs")
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01 * (me + 1))
        for _ in range(2):  # who comes too late to record the first time does it the second time
            train(model, optimizer, found)
            if self._at_once:
                self._trained.wait(60)
        assert num_recordings(model) == 1
        for turn in (0, 1):
            if turn == me:
                if self._at_once:
                    during.append(lambda: self._hold(me))
                train(model, optimizer, found, rows=10)
                assert num_recordings(model) == 2
                assert not during
            else:
                optimizer.zero_grad()
                found.append(self._go_backward(model, turn))
                optimizer.step()
                train(model, optimizer, found)

    def _hold(self, me: int) -> None:
        self._recording[me].set()
        assert self._went_backward[me].wait(60)

    def _go_backward(self, model: everygpu.DataParallel, other: int) -> Tensor:
        (x, y), *_ = make_batches(1)
        value = loss_of(model(x), y)
        model.module.calls.add_(1)  # a backward is launched only where nothing has been written since
        if self._at_once:
            assert self._recording[other].wait(60)
        value.backward()
        loss = value.detach().cpu().clone()
        self._went_backward[other].set()
        return loss


def test_models_that_two_threads_record(recording: Devices) -> None:
    used = recording(2)
    alone, together = Pair(used, at_once=False), Pair(used, at_once=True)
    for me in (0, 1):
        torch.testing.assert_close(together.losses[me], alone.losses[me], rtol=1e-4, atol=1e-5)
        values, wanted = together.nets[me].state_dict(), alone.nets[me].state_dict()
        torch.testing.assert_close(values, wanted, rtol=1e-3, atol=1e-4)


def test_who_cannot_record_now_records_later(recording: Devices) -> None:
    used = recording(2)
    during: list[Callable[[], object]] = []
    first = everygpu.DataParallel(Held(during).to(used[0]), used, engine="graphs")
    second = everygpu.DataParallel(Net().to(used[0]), used, engine="graphs")

    def run(model: everygpu.DataParallel, num: int) -> None:
        for x, y in make_batches(num):
            loss_of(model(x), y).backward()

    run(second, NUM_WARM_UPS)
    during.append(lambda: side_by_side(lambda: run(second, 2)))
    run(first, NUM_STEPS)
    assert not during
    assert (num_recordings(first), num_recordings(second)) == (1, 0)
    run(second, 1)
    assert num_recordings(second) == 1


def test_a_backward_runs_where_it_was_recorded(recording: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    used = recording(2)
    recorded, run = [], []
    make, enter = recorder.MultiGpuGraph, recorded_forward.on_recording_streams

    def make_graph(devices: Any, streams: str) -> Any:
        recorded.append(streams)
        return make(devices, streams=streams)

    def on_recording_streams(devices: Any, streams: str) -> Any:
        run.append(streams)
        return enter(devices, streams)

    monkeypatch.setattr(recorder, "MultiGpuGraph", make_graph)
    monkeypatch.setattr(recorded_forward, "on_recording_streams", on_recording_streams)
    models = [everygpu.DataParallel(Net().to(used[0]), used, engine="graphs") for _ in range(2)]
    for model in models:
        for x, y in make_batches(NUM_STEPS):
            value = loss_of(model(x), y)
            model.module.calls.add_(1)
            value.backward()
    num = len(run) // 2
    assert num > 0
    assert run == [recorded[0]] * num + [recorded[1]] * num
    assert recorded[0] != recorded[1]


def test_outputs_that_go_backward_one_by_one(recording: Devices) -> None:
    class TwoNets(TwoOutputs):
        def __init__(self) -> None:
            super().__init__()
            self.critic = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Any:
            return Outputs(Net.forward(self, x), self.critic(x), x.argmax(1), "two", None)

    def scenario(model: everygpu.DataParallel, optimizer: Any, found: list[Tensor]) -> None:
        for x, y in make_batches(8 * NUM_STEPS):
            output = model(x)
            optimizer.zero_grad()
            loss_of(output, y).backward()
            output.extra.square().mean().backward()
            optimizer.step()
            found.append(output.extra.detach().cpu() + 0)

    check(recording, scenario, make=TwoNets)


class Pairwise(nn.Module):
    """Returns two outputs that share nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.actor = nn.Linear(6, 5)
        self.critic = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Any:
        return self.actor(x), self.critic(x)


@pytest.mark.parametrize("change", ["frozen", "moved"])
def test_a_backward_after_another_exchange_was_made(
    recording: Devices, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    used = recording(2)
    net = Pairwise().to(used[0])
    weight = net.critic.weight
    model = everygpu.DataParallel(net, used, engine="graphs")
    for x, _ in make_batches(NUM_STEPS):
        model(x)[1].square().mean().backward()
    assert num_recordings(model) == 1
    (wanted,) = torch.autograd.grad(net.critic(x.to(used[0])).square().mean(), [weight])
    scores, value = model(x)
    scores.sum().backward()  # from here on another recording may be launched
    if change == "frozen":
        net.actor.requires_grad_(False)
    else:
        net.actor.weight.data = net.actor.weight.data.clone()
    with monkeypatch.context() as patch:
        patch.setattr(recorder.MultiGpuGraph, "replay", fail)
        for _ in range(NUM_WARM_UPS + 1):
            model(x)
        with pytest.raises(torch.OutOfMemoryError):
            model(x)
    (found,) = torch.autograd.grad(value.square().mean(), [weight])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def fail(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_memory_that_is_too_small_for_recordings(
    recording: Devices, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    used = recording(2)
    monkeypatch.setattr(recorded_forward, "ParameterSync", fail)
    net = Net().to(used[0])
    model = everygpu.DataParallel(net, used, engine="graphs")
    with caplog.at_level(logging.INFO, "everygpu"):
        for x, y in make_batches(NUM_STEPS):
            loss_of(model(x), y).backward()
    assert net.first.weight.grad is not None
    assert num_recordings(model) == 0
    assert len([m for m in caplog.messages if "without CUDA graphs: OutOfMemoryError" in m]) == 1


def test_with_a_default_device(recording: Devices) -> None:
    used = recording(2)
    default = torch.device("meta") if used[0].type == "cpu" else used[0]
    batches = make_batches(NUM_STEPS)
    found = []
    for context in (contextlib.nullcontext(), default):
        net = Net().to(used[0]).eval()
        model = everygpu.DataParallel(net, used, engine="graphs")
        with context:
            for x, y in batches:
                net.zero_grad()
                loss_of(model(x), y).backward()
        assert num_recordings(model) == 1
        found.append(net.first.weight.grad.cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


class SparseScores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 5, sparse=True)

    def forward(self, x: Tensor) -> Any:
        return self.table(x[:, 0].abs().clamp(max=9).long())


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x * self.first.weight.mean(), use_reentrant=True)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells = nn.LSTM(6, 5, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.cells(x.unsqueeze(1))[0].squeeze(1)


@pytest.mark.parametrize("make", [SparseScores, Checkpointed, Recurrent])
def test_a_first_backward_after_forwards_that_had_none(recording: Devices, make: Any) -> None:
    used = recording(2)
    found = []
    for engine in ("threads", "graphs"):
        net = make().to(used[0])
        model = everygpu.DataParallel(net, used, engine=engine)
        for x, _ in make_batches(NUM_STEPS):
            model(x)
        for x, y in make_batches(NUM_STEPS):
            net.zero_grad()
            loss_of(model(x), y).backward()
        found.append([p.grad.to_dense().cpu() for p in net.parameters() if p.grad is not None])
    assert len(found[1]) == len(found[0])
    for a, b in zip(found[1], found[0]):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_may_change_unseen_is_named(recording: Devices, caplog: pytest.LogCaptureFixture) -> None:
    used = recording(2)
    model = everygpu.DataParallel(Recurrent().to(used[0]), used, engine="graphs")
    for x, y in make_batches(20):
        loss_of(model(x), y).backward()
    assert num_recordings(model) == 0
    (record,) = [r for r in caplog.records if "without CUDA graphs" in r.message]
    assert record.levelno == logging.WARNING
    assert "LSTM 'cells' has attributes that may change unseen" in record.message


def test_other_streams(recording: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    used = recording(2)
    model = everygpu.DataParallel(Net().to(used[0]), used, engine="graphs")
    for x, y in make_batches(NUM_STEPS):
        loss_of(model(x), y).backward()
    assert num_recordings(model) == 1
    others = {d: torch.cuda.Stream(d) if d.type == "cuda" else object() for d in used}
    monkeypatch.setattr("everygpu.parallel.cuda_graphs.recorded_forward.current_stream", others.get)
    model(x)
    assert num_recordings(model) == 0


@pytest.mark.parametrize("kind", ["sparse", "inference"])
def test_buffers_of_other_kinds(recording: Devices, kind: str) -> None:
    class Mixing(Net):
        def __init__(self) -> None:
            super().__init__()
            with torch.inference_mode(kind == "inference"):
                self.register_buffer("mixer", torch.eye(6).flip(0))
            if kind == "sparse":
                self.mixer = self.mixer.to_sparse()

        def forward(self, x: Tensor) -> Any:
            return super().forward((self.mixer @ x.t()).t())

    used = recording(2)
    found = []
    for engine in ("threads", "graphs"):
        net = Mixing().to(used[0])
        model = everygpu.DataParallel(net, used, engine=engine)
        for x, y in make_batches(NUM_STEPS):
            net.zero_grad()
            loss_of(model(x), y).backward()
        found.append(net.first.weight.grad.cpu())
        assert num_recordings(model) == (engine == "graphs" and kind == "inference")
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["empty", "attribute", "dataclass", "registered"])
def test_what_containers_are_besides_their_leaves(recording: Devices, kind: str) -> None:
    class Scaled(Net):
        def forward(self, x: Tensor, options: Any) -> Any:
            flips = "flip" in options if kind == "empty" else options.flip
            return super().forward(x) * (-1 if flips else 1)

    def options(flip: bool) -> Any:
        if kind == "empty":
            return {"flip" if flip else "stay": ()}
        made = {"attribute": Marked, "dataclass": Noted, "registered": Registered}[kind]()
        made.flip = flip
        return made

    used = recording(2)
    model = everygpu.DataParallel(Scaled().to(used[0]).eval(), used, engine="graphs")
    (x, _), *_ = make_batches(1)
    as_it_is = [model(x, options(False)).detach() + 0 for _ in range(NUM_STEPS)][-1]
    assert num_recordings(model) == 1
    torch.testing.assert_close(model(x, options(True)).detach() + 0, -as_it_is)


class Marked(dict[str, Any]):
    flip = False


@dataclass
class Noted:
    name: str = "noted"

    def __post_init__(self) -> None:
        self.flip = False


class Registered:
    flip = False


def _unflatten(_: Any, flip: bool) -> Registered:
    made = Registered()
    made.flip = flip
    return made


register_pytree_node(Registered, lambda x: ([], x.flip), _unflatten)


def test_memory_is_free_when_the_model_is_dropped(recording: Devices) -> None:
    used = recording(2)
    model = everygpu.DataParallel(Net().to(used[0]), used, engine="graphs")
    for x, y in make_batches(NUM_STEPS):
        value = loss_of(model(x), y)
        value.backward()
    gc.collect()
    gc.disable()
    try:
        recorder = weakref.ref(model._recorder)
        module = weakref.ref(model.module)
        value = loss_of(model(x), y)
        del model
        value.backward()
        del value
        assert recorder() is None
        assert module() is None
    finally:
        gc.enable()


class Features(Net):
    """Returns what its scores were computed from, too."""

    def forward(self, x: Tensor) -> Any:
        h = self.norm(self.first(x)).tanh()
        return self.last(h), h


@pytest.mark.parametrize("uses_both", [False, True])
def test_an_output_that_others_were_computed_from(recording: Devices, uses_both: bool) -> None:
    used = recording(2)
    found = []
    for engine in ("threads", "graphs"):
        net = Features().to(used[0])
        model = everygpu.DataParallel(net, used, engine=engine)
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
        losses: list[Tensor] = []

        def loss(outputs: Any, y: Tensor) -> Tensor:
            scores, h = outputs
            return loss_of(scores, y) + (h.square().mean() if uses_both else 0)

        train(model, optimizer, losses, num=4 * NUM_STEPS, loss=loss)
        found.append(torch.stack(losses))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    recorder = model._recorder
    assert recorder is not None
    assert recorder._capture._num_attempts <= 2
    assert recorder._capture._num_launches > 2 * NUM_STEPS
