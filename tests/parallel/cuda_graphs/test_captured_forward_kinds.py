"""``engine="capture"``: models, outputs and changes that captures decline, and those of unusual kinds."""

import contextlib
import copy
import gc
import logging
import re
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

import everygpu
from everygpu.parallel.cuda_graphs import captured_forward
from tests.parallel.cuda_graphs.forwards import (
    NUM_STEPS,
    Devices,
    Net,
    captured,
    check,
    check_grads,
    fail,
    loss_of,
    make_batches,
    num_graphs,
    train,
)
from tests.step.test_capture import Moving


class Holder:
    """An object that is no container."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors, self.name = [*tensors], "holder"


@pytest.mark.parametrize("count", [1, 2])
def test_objects_with_tensors_in_them_are_made_anew(capturing: Devices, count: int) -> None:
    class Caching(Net):
        def forward(self, x: Tensor) -> Any:
            h = self.first(x)
            return {"y": super().forward(x), "cache": Holder(h, h.detach() * 2, h)}

    used = capturing(count)
    net = Caching().to(used[0])
    model = everygpu.DataParallel(net, used, engine="capture")
    kept = []
    for x, y in make_batches(NUM_STEPS):
        output = model(x.to(used[0]))
        kept.append((output["cache"], net.first(x.to(used[0])).detach()))
        loss_of(output["y"], y).backward()
    assert num_graphs(model) == 1
    for caches, expected in kept:
        found = [caches] if count == 1 else caches
        assert all(cache.name == "holder" and cache.tensors[0] is cache.tensors[2] for cache in found)
        for i, factor in ((0, 1), (1, 2)):
            joined = torch.cat([cache.tensors[i].detach().to(used[0]) for cache in found])
            torch.testing.assert_close(joined, expected * factor)


@pytest.mark.parametrize("kind", ["hook", "object", "sync"])
def test_what_cannot_be_captured_runs_as_it_is(capturing: Devices, kind: str, caplog: Any) -> None:
    class Strange(Net):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            if kind == "sync":
                y = y * float(y.detach().sum() > -1e9)
            return {"y": y, "object": Holder(self.last.weight)} if kind == "object" else y

    used = capturing(2)
    net = Strange().to(used[0])
    seen: list[int] = []
    if kind == "hook":
        net.last.register_forward_hook(lambda *_: seen.append(1))
    model = everygpu.DataParallel(net, used, engine="capture")
    with caplog.at_level(logging.INFO, "everygpu"):
        for x, y in make_batches(NUM_STEPS):
            output = model(x)
            loss_of(output["y"] if kind == "object" else output, y).backward()
    assert num_graphs(model) == 0
    assert len([m for m in caplog.messages if "without CUDA graphs" in m]) == 1
    assert len(seen) == (2 * NUM_STEPS if kind == "hook" else 0)


def test_inputs_that_take_gradients(capturing: Devices) -> None:
    model = captured(capturing)
    ((x, y),) = make_batches(1)
    x = x.to(model.src_device_obj).requires_grad_()
    loss_of(model(x), y).backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert num_graphs(model) == 1  # of the batches that take none


def test_a_parameter_in_a_plain_attribute(capturing: Devices) -> None:
    class Holding(Net):
        def forward(self, x: Tensor) -> Any:
            self.__dict__.setdefault("weights", [self.last.weight])
            return super().forward(x) + self.weights[0].square().sum()

    check_grads(capturing, Holding, num=None)


def test_without_gpus_replicas_run_in_threads(caplog: Any) -> None:
    model = everygpu.DataParallel(Net(), ["cpu"] * 2, engine="capture")
    with caplog.at_level(logging.INFO, "everygpu"):
        for x, y in make_batches(NUM_STEPS):
            loss_of(model(x), y).backward()
    assert [m for m in caplog.messages if "replicas run in threads" in m] == caplog.messages[:1]
    assert num_graphs(model) == 0


def test_copies_and_pickles_have_none(capturing: Devices) -> None:
    model = captured(capturing)
    twin, ((x, _),) = copy.deepcopy(model), make_batches(1)
    assert num_graphs(twin) == 0
    torch.testing.assert_close(twin(x).detach() + 0, model(x).detach() + 0)
    model.release()
    assert num_graphs(model) == 0


def test_no_hooks_are_left_on_what_is_the_users(capturing: Devices) -> None:
    class Open(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x, self.last.weight

    used = capturing(2)
    model = everygpu.DataParallel(Open().to(used[0]), used, engine="capture")
    x = make_batches(1)[0][0].to(used[0]).requires_grad_()
    for _ in range(NUM_STEPS):
        sum(t.sum() for t in model(x)).backward()
    assert not x._backward_hooks
    assert not model.module.last.weight._backward_hooks


def test_gradients_wanted_within_inference_mode(capturing: Devices) -> None:
    used = capturing(2)
    model = everygpu.DataParallel(Net().to(used[0]), used, engine="capture")
    for x, _ in make_batches(NUM_STEPS):
        with torch.inference_mode(), torch.enable_grad():
            assert model(x).is_inference()
    assert num_graphs(model) == 0


def test_memory_that_is_too_small_for_captures(
    capturing: Devices, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    used = capturing(2)
    monkeypatch.setattr(captured_forward, "ParameterSync", fail)
    net = Net().to(used[0])
    model = everygpu.DataParallel(net, used, engine="capture")
    with caplog.at_level(logging.INFO, "everygpu"):
        for x, y in make_batches(NUM_STEPS):
            loss_of(model(x), y).backward()
    assert net.first.weight.grad is not None
    assert num_graphs(model) == 0
    (said,) = [m for m in caplog.messages if "without CUDA graphs" in m]
    assert re.search(r"forwards\.py:\d+: raise torch\.OutOfMemoryError.*OutOfMemoryError: CUDA out of memory\.$", said)


def test_with_a_default_device(capturing: Devices) -> None:
    used = capturing(2)
    default = torch.device("meta") if used[0].type == "cpu" else used[0]
    batches = make_batches(NUM_STEPS)
    found = []
    for context in (contextlib.nullcontext(), default):
        net = Net().to(used[0]).eval()
        model = everygpu.DataParallel(net, used, engine="capture")
        with context:
            for x, y in batches:
                net.zero_grad()
                loss_of(model(x), y).backward()
        assert num_graphs(model) == 1
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


class Conjugated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.scale = nn.Linear(6, 5), nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Any:
        return self.last(x) * self.scale.conj().abs()


@pytest.mark.parametrize("make", [SparseScores, Checkpointed, Recurrent, Conjugated])
def test_a_first_backward_after_forwards_that_had_none(capturing: Devices, make: Any) -> None:
    check_grads(capturing, make, num=None, warm_ups=NUM_STEPS)


def test_what_replicas_have_copies_of_is_named(capturing: Devices, caplog: pytest.LogCaptureFixture) -> None:
    used = capturing(2)
    net = Recurrent().to(used[0])
    net.cells.scales = [torch.ones(1)]
    model = everygpu.DataParallel(net, used, engine="capture")
    for x, y in make_batches(20):
        loss_of(model(x), y).backward()
    assert num_graphs(model) == 0
    (record,) = [r for r in caplog.records if "without CUDA graphs" in r.message]
    assert record.levelno == logging.WARNING
    assert "LSTM 'cells' has a tensor that isn't registered, which each replica has a copy of: scales" in record.message


@pytest.mark.parametrize("kind", ["sparse", "inference"])
def test_buffers_of_other_kinds(capturing: Devices, kind: str) -> None:
    class Mixing(Net):
        def __init__(self) -> None:
            super().__init__()
            with torch.inference_mode(kind == "inference"):
                self.register_buffer("mixer", torch.eye(6).flip(0))
            if kind == "sparse":
                self.mixer = self.mixer.to_sparse()

        def forward(self, x: Tensor) -> Any:
            return super().forward((self.mixer @ x.t()).t())

    check_grads(capturing, Mixing, num=int(kind == "inference"))


@pytest.mark.parametrize("kind", ["empty", "attribute", "dataclass", "registered"])
def test_what_containers_are_besides_their_leaves(capturing: Devices, kind: str) -> None:
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

    used = capturing(2)
    model = everygpu.DataParallel(Scaled().to(used[0]).eval(), used, engine="capture")
    (x, _), *_ = make_batches(1)
    for _ in range(NUM_STEPS):
        output = model(x, options(False))
        output.sum().backward()
    as_it_is = output.detach() + 0
    assert num_graphs(model) == 1
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


def test_memory_is_free_when_the_model_is_dropped(capturing: Devices) -> None:
    model = captured(capturing)
    ((x, y),) = make_batches(1)
    gc.collect()
    gc.disable()
    try:
        recorder = weakref.ref(model._engine.captured_forward)
        module = weakref.ref(model.module)
        value = loss_of(model(x), y)
        del model
        value.backward()
        del value
        assert recorder() is None
        assert module() is None
    finally:
        gc.enable()


def test_forwards_that_move_their_weights(capturing: Devices) -> None:
    """As a recurrent layer's ``flatten_parameters`` does on GPUs."""

    def scenario(model: everygpu.DataParallel, optimizer: Any, found: list[Tensor]) -> None:
        for _ in range(6):
            for rows in (4, 5, 12):
                train(model, optimizer, found, num=1, rows=rows)
        assert num_graphs(model) == (3 if model.engine == "capture" else 0)

    check(capturing, scenario, make=Moving)
