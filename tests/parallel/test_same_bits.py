"""``num_replicas``: the same bits on any number of devices.

On the CPU each entry of ``device_ids`` acts as a device: its replicas share its one copy of the parameters.
"""

import itertools
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import everygpu
from everygpu.errors import OptionError, ReplicaError
from everygpu.parallel import gather

NUM_REPLICAS = 8
Batch = tuple[Tensor, Tensor]
Make = Callable[[], tuple[nn.Module, Callable[[int], Batch], Callable[..., Tensor]]]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def num_rows(index: int) -> int:
    """A smaller batch every fifth time, which leaves some replicas idle."""
    return 24 if index % 5 else 13


def mlp() -> Any:
    module = nn.Sequential(nn.Linear(7, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))
    return module, lambda i: (torch.randn(num_rows(i), 7), torch.randint(3, (num_rows(i),))), nn.CrossEntropyLoss()


def cnn(*, synced: bool = False) -> Any:
    module: nn.Module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip
    module = everygpu.SyncBatchNorm.convert(module) if synced else module
    return module, lambda i: (torch.randn(24, 3, 8, 8), torch.randint(3, (24,))), nn.CrossEntropyLoss()


class Transformer(nn.Module):
    """Tied weights, dropout and activation checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, 0.2, batch_first=True)
        self.again = nn.TransformerEncoderLayer(16, 2, 32, 0.2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.block(self.embed(tokens))
        x = checkpoint(self.again, x, use_reentrant=False)
        return F.linear(x, self.embed.weight).transpose(1, 2)


def transformer() -> Any:
    def batch(i: int) -> Batch:
        labels = torch.randint(11, (num_rows(i), 6))
        return torch.randint(11, (num_rows(i), 6)), labels.masked_fill(torch.rand(labels.shape) < 0.3, -100)

    return Transformer(), batch, nn.CrossEntropyLoss()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, sparse=True)
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lstm(self.embed(tokens))[0][:, -1]


def recurrent() -> Any:
    return Recurrent(), lambda i: (torch.randint(11, (num_rows(i), 5)), torch.randn(num_rows(i), 8)), nn.MSELoss()


def lstm() -> Any:
    module, batch, loss = recurrent()
    module.embed = nn.Embedding(11, 8)
    return module, batch, loss


class Noisy(nn.Module):
    """Draws from Python's generator and the CPU's, too, and has a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(7, 16).requires_grad_(False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.randn(x.shape, device="cpu") * random.random()
        return self.head(F.dropout(self.frozen(x).relu(), 0.1 + 0.2 * float(torch.rand(()) < 0.5)))


def noisy() -> Any:
    return Noisy(), mlp()[1], nn.CrossEntropyLoss()


class Margin(nn.Module):
    """A loss with weights of its own, and a penalty of the model's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.penalised = list(model.parameters())

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        penalty = torch.stack([p.square().mean() for p in self.penalised]).sum()
        return F.cross_entropy(output @ self.weight, target) + 0.1 * penalty


def penalised() -> Any:
    module, batch, _ = mlp()
    return module, batch, Margin(module)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in params if p.requires_grad], 1e-2)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1, momentum=0.9)


class Result(NamedTuple):
    losses: list[Tensor]
    tensors: dict[str, Tensor]
    engines: set[str]


def states_of(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    states = optimizer.state_dict()["state"]
    return {f"{i} {name}": v for i, s in states.items() for name, v in s.items() if isinstance(v, Tensor)}


def train(
    make: Make,
    num_devices: int,
    *,
    optimizer: MakeOptimizer = adamw,
    num_steps: int = 12,
    step: bool = False,
    **options: Any,
) -> Result:
    """Train on so many devices, by ``TrainStep`` with these options or in a loop."""
    everygpu.seed_all(1)
    module, batch, loss = make()
    mine: dict[str, Any] = {"num_replicas": NUM_REPLICAS, "engine": "auto", "buffers": "first"}
    mine = {name: options.pop(name, value) for name, value in mine.items()}
    model = everygpu.DataParallel(module, ["cpu"] * num_devices, **mine)
    own = optimizer([*module.parameters(), *(loss.parameters() if isinstance(loss, nn.Module) else ())])
    train_step = everygpu.TrainStep(model, loss, own, **options) if step else None
    losses, engines = [], set()
    for index in range(num_steps):
        inputs, targets = batch(index)
        if train_step is not None:
            losses.append(train_step(inputs, targets))
            engines.add(train_step.stats().engine)
            continue
        own.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        own.step()
        losses.append(gather(value.detach()))
        engines.add(model.engine_in_use)
    if train_step is not None:
        train_step.flush()
    model.release()
    found = {**module.state_dict(), **states_of(own)}
    return Result(losses, {name: t.clone() for name, t in found.items()}, engines)


def assert_same(a: Result, b: Result) -> None:
    assert len(a.losses) == len(b.losses)
    assert a.tensors.keys() == b.tensors.keys()
    assert all(map(torch.equal, a.losses, b.losses))
    assert [name for name in a.tensors if not torch.equal(a.tensors[name], b.tensors[name])] == []


MODELS: dict[str, Make] = {
    "mlp": mlp,
    "cnn": cnn,
    "synced": lambda: cnn(synced=True),
    "transformer": transformer,
    "lstm": lstm,
    "noisy": noisy,
    "penalised": penalised,
}
WAYS: dict[str, dict[str, Any]] = {
    "loop": {},
    "loop, mean": {"buffers": "mean", "optimizer": lambda params: torch.optim.SGD(params, 0.1)},
    "adamw": {"step": True},
    "clipped": {"step": True, "clip_norm": 0.1, "optimizer": sgd},
    "fp16": {"step": True, "precision": "fp16", "accumulate": 2},
    "accumulated": {"step": True, "accumulate": 3, "clip_norm": 0.1},
    "bf16": {"step": True, "precision": "bf16"},
}


CASES = [(n, w) for n, w in itertools.product(MODELS, WAYS) if n != "lstm" or w not in ("fp16", "bf16")]
"""torch's LSTM has no 16 bits on every CPU."""


@pytest.mark.parametrize(("name", "way"), CASES)
def test_losses_parameters_and_states_are_the_same(name: str, way: str) -> None:
    results = [train(MODELS[name], n, **WAYS[way]) for n in (1, 2, 8)]
    for other in results[1:]:
        assert_same(results[0], other)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), CASES)
def test_the_same_after_200_steps(name: str, way: str) -> None:
    results = [train(MODELS[name], n, num_steps=200, **WAYS[way]) for n in (1, 2, 4, 8)]
    for other in results[1:]:
        assert_same(results[0], other)


def test_sparse_gradients_are_the_same() -> None:
    def both(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, 0.1)

    results = [train(recurrent, n, optimizer=both) for n in (1, 2, 4, 8)]
    for other in results[1:]:
        assert_same(results[0], other)


def random_program(seed: int) -> tuple[Make, dict[str, Any]]:
    """A model of random layers, and a random way to train it."""
    draw = random.Random(seed)
    width, depth = draw.choice([4, 9, 16]), draw.randint(1, 4)
    layers = [draw.choice(["linear", "norm", "dropout", "batch", "synced", "tied"]) for _ in range(depth)]

    def make() -> Any:
        tied = nn.Linear(width, width)
        kinds: dict[str, Callable[[], nn.Module]] = {
            "linear": lambda: nn.Linear(width, width), "norm": lambda: nn.LayerNorm(width),
            "dropout": lambda: nn.Dropout(0.4), "batch": lambda: nn.BatchNorm1d(width),
            "synced": lambda: everygpu.SyncBatchNorm(width), "tied": lambda: tied,
        }  # fmt: skip
        module = nn.Sequential(nn.Linear(5, width), *(kinds[kind]() for kind in layers), nn.GELU(), nn.Linear(width, 3))
        return module, lambda i: (torch.randn(24, 5), torch.randint(3, (24,))), nn.CrossEntropyLoss(label_smoothing=0.1)

    way = dict(draw.choice(list(WAYS.values())))
    return make, {**way, "optimizer": draw.choice([adamw, sgd])}


def check_programs(seeds: Sequence[int]) -> None:
    for seed in seeds:
        make, way = random_program(seed)
        assert_same(train(make, 1, num_steps=5, **way), train(make, (2, 4, 8)[seed % 3], num_steps=5, **way))


def test_random_programs() -> None:
    check_programs(range(6))


@pytest.mark.slow
def test_a_hundred_random_programs() -> None:
    check_programs(range(100))


def test_replicas_draw_numbers_of_their_own() -> None:
    everygpu.seed_all(3)
    model = everygpu.DataParallel(nn.Dropout(0.5), ["cpu"] * 2, num_replicas=4)
    masks = gather(model(torch.ones(4, 64)))
    again = gather(model(torch.ones(4, 64)))
    rows = [*masks.unbind(), *again.unbind()]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(rows, 2))


def test_what_the_loop_draws_is_no_replicas() -> None:
    found = []
    for num_devices in (1, 2):
        everygpu.seed_all(3)
        everygpu.DataParallel(nn.Dropout(0.5), ["cpu"] * num_devices, num_replicas=2)(torch.ones(4, 4))
        found.append(torch.rand(8))
    assert torch.equal(*found)


def test_replicas_on_a_device_share_its_parameters() -> None:
    places: list[int] = []

    class Seen(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            places.append(self.weight.data_ptr())
            return super().forward(input)

    layer = Seen(4, 4)
    model = everygpu.DataParallel(layer, ["cpu"] * 2, num_replicas=8)
    model(torch.ones(8, 4))
    assert places == [layer.weight.data_ptr()] * 4 + [places[-1]] * 4
    assert places[0] != places[-1]
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    step = everygpu.TrainStep(model, lambda output: output.sum(), optimizer)
    places.clear()
    step(torch.ones(8, 4))
    assert places == [layer.weight.data_ptr()] * 4 + [places[-1]] * 4
    assert places[0] != places[-1]


class Counted(torch.autograd.Function):
    """A product whose weight's gradient is counted as long as it is alive."""

    alive = most = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        found = x.t() @ grad
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)
        weakref.finalize(found.untyped_storage(), Counted.end)
        return grad @ weight.t(), found

    @staticmethod
    def end() -> None:
        Counted.alive -= 1


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(64, 64) / 8) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = Counted.apply(x, weight)  # type: ignore[no-untyped-call]
        return x


@pytest.mark.parametrize("step", [False, True])
def test_few_gradients_are_alive_at_once(step: bool) -> None:
    module = Products()
    model = everygpu.DataParallel(module, ["cpu"], num_replicas=8, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    Counted.most = 0
    if step:
        everygpu.TrainStep(model, lambda output: output.square().mean(), optimizer)(torch.randn(16, 64))
    else:
        model(torch.randn(16, 64)).square().mean().backward()
    assert 0 < Counted.most < 6 * 8 / 2


def test_gradients_are_those_of_the_whole_batch() -> None:
    everygpu.seed_all(0)
    layer, x = nn.Linear(4, 3), torch.randn(16, 4)
    layer(x).square().mean().backward()
    expected = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    model = everygpu.DataParallel(layer, ["cpu"] * 2, num_replicas=8)
    model(x).square().mean().backward()
    for p, grad in zip(layer.parameters(), expected):
        torch.testing.assert_close(p.grad, grad)
    first, second = torch.autograd.grad(model(x).square().mean(), layer.parameters(), create_graph=True)
    (first.square().sum() + second.square().sum()).backward()


def test_left_out_nothing_is_drawn() -> None:
    everygpu.seed_all(0)
    everygpu.DataParallel(nn.Linear(4, 4), ["cpu"] * 2)(torch.ones(4, 4))
    drawn = torch.rand(4)
    everygpu.seed_all(0)
    nn.Linear(4, 4)
    assert torch.equal(drawn, torch.rand(4))


@pytest.mark.parametrize(
    ("num_devices", "options", "message"),
    [
        (3, {}, "num_replicas=6, or a number of devices that fits 8: 1, 2, 4, 8"),
        (2, {"split": [1, 1]}, "split"),
        (2, {"shard": "parameters"}, "shard"),
        (2, {"engine": "compile"}, "engine"),
    ],
)
def test_what_depends_on_devices_is_refused(num_devices: int, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        everygpu.DataParallel(nn.Linear(2, 2), ["cpu"] * num_devices, num_replicas=8, **options)


def test_a_plain_tensor_that_takes_a_gradient_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.scale = torch.ones(2, requires_grad=True)
    with pytest.raises(ReplicaError, match="must be a parameter"):
        everygpu.DataParallel(module, ["cpu"] * 2, num_replicas=4)(torch.ones(4, 2))


@pytest.mark.parametrize("num_replicas", [0, -1, 2.0, True, "2"])
def test_no_number_of_replicas_is_refused(num_replicas: Any) -> None:
    with pytest.raises(OptionError, match="num_replicas must be"):
        everygpu.DataParallel(nn.Linear(2, 2), ["cpu"], num_replicas=num_replicas)


def run_of(
    path: Path, num_devices: int, stops: int | None, *, last: int
) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Go on with a run, in the middle of an epoch too, until a step; return losses by step, and all tensors."""
    everygpu.seed_all(7)
    module = mlp()[0]
    random_data = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(100, 7, generator=random_data), torch.randint(3, (100,), generator=random_data))
    model = everygpu.DataParallel(module, ["cpu"] * num_devices, num_replicas=NUM_REPLICAS)
    optimizer = adamw(module.parameters())
    step = everygpu.TrainStep(model, nn.CrossEntropyLoss(), optimizer)
    feeder = everygpu.Feeder(DataLoader(data, 16, shuffle=True), model)
    manager = everygpu.CheckpointManager(path, model=module, optimizer=optimizer, step=step, data=feeder)
    losses: dict[int, Tensor] = {}
    done = manager.resume()
    with manager:
        for x, y in itertools.chain.from_iterable(itertools.repeat(feeder)):
            done += 1
            losses[done] = step(x, y)
            manager.save(done)
            if done == (stops or last):
                break
    feeder.close()
    model.release()
    return losses, {**module.state_dict(), **states_of(optimizer)}


def test_a_run_goes_on_on_other_numbers_of_devices(tmp_path: Path) -> None:
    losses, tensors = run_of(tmp_path / "whole", 8, None, last=24)
    found: dict[int, Tensor] = {}
    for num_devices, stops in ((4, 5), (1, 11), (2, 18), (4, None)):
        some, others = run_of(tmp_path / "parts", num_devices, stops, last=24)
        found |= some
    assert found.keys() == losses.keys()
    assert all(torch.equal(found[i], losses[i]) for i in losses)
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []


def in_loop(devices: Sequence[str]) -> Iterator[Tensor]:
    everygpu.seed_all(2)
    layer = nn.Linear(4, 4)
    model = everygpu.DataParallel(layer, devices, num_replicas=4)
    yield gather(model(torch.randn(8, 4))).detach()
    layer.weight.data.mul_(2)
    yield gather(model(torch.randn(8, 4))).detach()


def test_writes_that_torch_does_not_count_reach_all_replicas() -> None:
    for a, b in zip(list(in_loop(["cpu"])), list(in_loop(["cpu"] * 4))):
        assert torch.equal(a, b)
