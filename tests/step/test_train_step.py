"""One call trains as a plain loop on one device does."""

import math
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import everygpu
from everygpu.errors import LossError

Devices = Callable[[int], list[torch.device]]


Batch = tuple[Tensor, Tensor]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
}


class Net(nn.Module):
    """Classifies; with a buffer that changes, a frozen weight and one that takes no part."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 16)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(16, 5)
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.dropout(self.norm(self.first(x))).tanh() * self.frozen)


def batches(num: int, sizes: tuple[int, ...] = (12, 7, 3, 1), *, ignore: bool = True) -> Iterator[Batch]:
    """Batches of uneven sizes; some targets are to be ignored."""
    generator = torch.Generator().manual_seed(1)
    for i in range(num):
        rows = sizes[i % len(sizes)]
        y = torch.randint(0, 5, (rows,), generator=generator)
        if ignore and rows > 2:
            y[: rows // 3] = -100
        yield torch.randn(rows, 6, generator=generator), y


def train_plainly(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[Batch],
    loss_of: Callable[..., Tensor] = F.cross_entropy,
    *,
    clip_norm: float | None = None,
    accumulate: int = 1,
) -> tuple[list[float], list[float]]:
    """Train in a loop; gradients of an update are the mean over its targets, hooks see them in another unit."""
    losses, norms = [], []
    counts = [int((y != -100).sum()) for _, y in data]
    unit = counts[0] if data else 1
    for i, (x, y) in enumerate(data):
        if i % accumulate == 0:
            optimizer.zero_grad()
        loss = loss_of(net(x), y)
        (loss * (counts[i] / unit / accumulate if accumulate > 1 else 1)).backward()
        losses.append(loss.item())
        if i % accumulate == accumulate - 1:
            if accumulate > 1:
                num_targets = sum(counts[i + 1 - accumulate : i + 1])
                torch._foreach_mul_(
                    [p.grad for p in net.parameters() if p.grad is not None], accumulate * unit / num_targets
                )
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), clip_norm or float("inf")).item())
            optimizer.step()
    return losses, norms


def assert_close(ours: nn.Module, plain: nn.Module, rtol: float = 1e-5) -> None:
    expected = plain.state_dict()
    for name, value in ours.state_dict().items():
        if name != "calls":
            scale = expected[name].abs().max().item()
            torch.testing.assert_close(value.cpu(), expected[name].cpu(), rtol=rtol, atol=rtol * scale, msg=name)


def assert_replicas_bit_equal(step: everygpu.TrainStep) -> None:
    flats = step._strategy.flat_params.values if step._strategy.is_spread else []
    for first, *others in flats:
        assert all(other.cpu().view(torch.uint8).equal(first.cpu().view(torch.uint8)) for other in others)


class Pair:
    """A net that a step trains, and one that a plain loop trains."""

    def __init__(
        self, used: list[torch.device], optimizer: Any = "AdamW", *, make: Any = Net, loss: Any = F.cross_entropy,
        plain_loss: Any = None, wrap: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        self.home, self.loss = used[0], plain_loss or loss
        self.plain, self.ours = make().to(used[0]), make().to(used[0])
        make_optimizer = OPTIMIZERS.get(optimizer, optimizer) if isinstance(optimizer, str) else optimizer
        self.reference = make_optimizer(self.plain.parameters())
        self.optimizer = make_optimizer(self.ours.parameters())
        self.model = everygpu.DataParallel(self.ours, used)
        self.step = everygpu.TrainStep(self.model, loss, wrap(self.optimizer) if wrap else self.optimizer, **options)
        self.options = {name: value for name, value in options.items() if name in ("clip_norm", "accumulate")}

    def data(self, num: int, sizes: tuple[int, ...] = (12, 7, 3, 1), *, ignore: bool = True) -> list[Batch]:
        return [(x.to(self.home), y.to(self.home)) for x, y in batches(num, sizes, ignore=ignore)]

    def train(self, data: list[Batch], **tolerance: float) -> None:
        """Train both, and compare their losses."""
        losses = [self.step(x, y).item() for x, y in data]
        expected, _ = train_plainly(self.plain, self.reference, data, self.loss, **self.options)
        assert losses == pytest.approx(expected, **(tolerance or {"rel": 1e-5, "abs": 1e-6}))

    def check(self, rtol: float = 1e-5) -> None:
        """Compare all values; of replicas bit by bit."""
        assert_close(self.ours, self.plain, rtol)
        assert_replicas_bit_equal(self.step)


class DecayInGradient(torch.optim.SGD):
    """Adds its weight decay to the gradients themselves."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad.add_(p, alpha=5.0)
        super().step()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("rule", ["skip", "ignore"])
@pytest.mark.parametrize("is_spread", [False, True])
def test_the_norm_is_of_the_gradient_before_others_write_to_it(
    devices: Devices, count: int, rule: str, is_spread: bool
) -> None:
    net = nn.Linear(4, 2).to(devices(count)[0])
    x, y = torch.ones(6, 4, device=devices(count)[0]), torch.zeros(6, 2, device=devices(count)[0])
    optimizer: Any = DecayInGradient(net.parameters(), lr=0.1)
    if is_spread:
        optimizer = everygpu.ShardedOptimizer(optimizer, devices(count), whole=True)
    model = everygpu.DataParallel(net, devices(count))
    options: dict[str, Any] = {"accumulate": 2, "clip_norm": math.inf, "on_nonfinite": rule}
    step = everygpu.TrainStep(model, F.mse_loss, optimizer, capture=False, **options)
    grads = torch.autograd.grad(F.mse_loss(net(x), y), list(net.parameters()))
    step(x, y)
    step(x, y)
    optimizer.zero_grad(set_to_none=False)
    step(x, y)  # of the next update
    assert step.stats().grad_norm == pytest.approx(nn.utils.get_total_norm(grads).item(), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "count", "clip_norm"),
    [
        *zip(["AdamW"] * 4, [1, 2, 3, 2], [None, 0.5, math.inf, None]),
        *zip(["SGD"] * 3, [1, 2, 3], [math.inf, None, 0.5]),
    ],
)
def test_equals_a_plain_loop_on_one_device(
    devices: Devices, name: str, count: int, clip_norm: float | None
) -> None:  # fmt: skip
    pair = Pair(devices(count), name, loss=nn.CrossEntropyLoss(), clip_norm=clip_norm)
    data, figures = pair.data(50), []
    losses = []
    for x, y in data:
        losses.append(pair.step(x, y).item())
        figures.append(pair.step.stats())
    expected, expected_norms = train_plainly(pair.plain, pair.reference, data, clip_norm=clip_norm)
    assert losses == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert [f.loss for f in figures] == losses
    for f, norm in zip(figures, expected_norms):
        assert f.grad_norm == pytest.approx(math.nan if clip_norm is None else norm, rel=1e-4, nan_ok=True)
    assert (figures[-1].num_steps, figures[-1].num_skipped) == (len(data), 0)
    pair.check()
    ours_state, plain_state = pair.optimizer.state_dict()["state"], pair.reference.state_dict()["state"]
    assert ours_state.keys() == plain_state.keys(), "a parameter without a gradient has no state"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_accumulation_equals_a_plain_loop(devices: Devices, count: int) -> None:
    pair = Pair(devices(count), accumulate=3, clip_norm=1.0)
    pair.train(pair.data(24))
    pair.check()
    assert pair.step.stats().num_steps == 8


def test_flush_updates_with_the_mean_of_what_was_seen(devices: Devices) -> None:
    pair = Pair(devices(2), "SGD", accumulate=5)
    data = pair.data(2)
    for x, y in data:
        pair.step(x, y)
    pair.step.flush()
    pair.step.flush()
    train_plainly(pair.plain, pair.reference, data, accumulate=2)
    pair.check()
    assert pair.step.stats().num_steps == 1


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=-100),
        lambda out, y: F.cross_entropy(out, y) + 0.1 * out.square().mean() + 0.01 * out.abs().sum(),
        lambda out, y: F.nll_loss(out.log_softmax(-1), y),
        lambda out, y: (out[y >= 0].logsumexp(1) - out[y >= 0, y[y >= 0]]).mean(),
    ],
)
def test_any_loss_is_exact_for_uneven_shards(loss: Callable[..., Tensor]) -> None:
    pair = Pair([torch.device("cpu")] * 3, lambda p: torch.optim.SGD(p, lr=0.01), loss=loss)
    pair.train(pair.data(8, (12, 7, 4)))
    pair.check()


# What it is called with.


class ModelOutput(OrderedDict):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class Knowing(nn.Module):
    """Returns its loss, in one of the usual ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.net = Net()
        self.way = way

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = self.net(x)
        loss = F.mse_loss(out, F.one_hot(y, 5).float())
        return {"number": loss, "vector": loss[None], "matrix": loss[None, None],
                "vector in dict": {"loss": loss[None]},
                "dict": {"loss": loss, "out": out}, "tuple": (loss, out),
                "output": ModelOutput(loss=loss, logits=out)}[self.way]  # fmt: skip


def mse(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out, F.one_hot(y, 5).float())


WAYS = ["number", "vector", "matrix", "vector in dict", "dict", "tuple", "output"]
CALLS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "positional": lambda step, x, y: step(x, y),
    "tuple": lambda step, x, y: step((x, y)),
    "dict": lambda step, x, y: step({"x": x, "y": y}),
    "UserDict": lambda step, x, y: step(UserDict(x=x, y=y)),
    "keywords": lambda step, x, y: step(x, y=y),
}


@pytest.mark.parametrize(("way", "call"), [*((w, "positional") for w in WAYS), *(("dict", c) for c in CALLS)])
@pytest.mark.parametrize("count", [1, 3])
def test_a_model_that_returns_its_loss(devices: Devices, way: str, call: str, count: int) -> None:
    pair = Pair(devices(count), lambda p: torch.optim.SGD(p, lr=0.1), make=lambda: Knowing(way), loss=None)
    data = pair.data(6, ignore=False)
    losses = [CALLS[call](pair.step, x, y).item() for x, y in data]
    expected, _ = train_plainly(pair.plain.net, pair.reference, data, mse)
    assert losses == pytest.approx(expected, rel=1e-5)
    pair.check()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [2, 3, 5])
def test_a_model_that_returns_one_number_of_shape_1(devices: Devices, count: int, num_rows: int) -> None:
    pair = Pair(devices(count), lambda p: torch.optim.SGD(p, lr=0.1), make=lambda: Knowing("vector"), loss=None)
    ((x, y),) = pair.data(1, (num_rows,), ignore=False)
    expected = pair.plain.eval()(x, y).item()
    assert pair.step.evaluate(x, y).loss.item() == pytest.approx(expected, rel=1e-5)
    (expected,), _ = train_plainly(pair.plain.train().net, pair.reference, [(x, y)], mse)
    assert pair.step(x, y).item() == pytest.approx(expected, rel=1e-5)
    pair.check()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    "take", [lambda loss: loss, lambda loss: loss.mean(1).flatten(), lambda loss: loss.mean(1)[:2]]
)
def test_a_model_that_returns_more_than_one_number(devices: Devices, count: int, take: Any) -> None:
    class Unreduced(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return take(F.mse_loss(super().forward(x), F.one_hot(y, 5).float(), reduction="none"))

    pair = Pair(devices(count), make=Unreduced, loss=None)
    with pytest.raises(LossError, match="one number, got shape"):
        pair.step(*next(batches(1, ignore=False)))


def test_a_loss_that_is_not_reduced_is_no_number_of_one_row_each(devices: Devices) -> None:
    pair = Pair(devices(2), loss=lambda out, y: F.cross_entropy(out, y, reduction="none"))
    with pytest.raises(LossError, match=r"one number, got shape \(2,\)"):
        pair.step(*next(batches(1, (2,), ignore=False)))


class Two(nn.Module):
    """Takes a dict, and returns another."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, pair: dict[str, Tensor], *, scale: float) -> dict[str, Tensor]:
        return {"a": self.net(pair["a"]) * scale, "b": self.net(pair["b"])}


def loss_of_two(out: dict[str, Tensor], y: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(out["a"], y["a"]) + F.cross_entropy(out["b"], y["b"])


def test_a_hook_may_write_to_the_gradient_of_the_loss() -> None:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        found = F.mse_loss(output, y)
        found.register_hook(lambda grad: grad.mul_(2))
        return found

    net, plain = nn.Linear(3, 1), nn.Linear(3, 1)
    plain.load_state_dict(net.state_dict())
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.1) for n in (net, plain)]
    step = everygpu.TrainStep(everygpu.DataParallel(net, ["cpu"]), loss, optimizers[0], accumulate=2)
    for _ in range(3):
        x, y = torch.randn(8, 3), torch.randn(8, 1)
        optimizers[1].zero_grad()
        loss(plain(x), y).backward()  # type: ignore[no-untyped-call]
        optimizers[1].step()
        for half in (slice(4), slice(4, 8)):
            step(x[half], y[half])
    torch.testing.assert_close(net.state_dict(), plain.state_dict())


def test_nested_batches_and_sharded_targets(devices: Devices) -> None:
    pair = Pair(devices(2), "SGD", make=Two, loss=loss_of_two)
    for x, y in pair.data(4):
        both = {"a": x, "b": x + 1}
        # The loss puts targets from the CPU where the output is.
        found = pair.step((both,), {"a": y.cpu(), "b": y.cpu()}, scale=2.0)
        pair.reference.zero_grad()
        expected = loss_of_two(pair.plain(both, scale=2.0), {"a": y, "b": y})
        expected.backward()
        pair.reference.step()
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    pair.check()


def test_a_bare_module_runs_on_every_device() -> None:
    net = Net()
    step = everygpu.TrainStep(net, F.cross_entropy, torch.optim.SGD(net.parameters(), lr=0.1))
    x, y = next(batches(1))
    assert step(x.to(step.model.src_device_obj), y).ndim == 0
    assert step.model.module is net


# State that is written between steps.


def test_dropout_is_reproducible_and_differs_between_replicas(devices: Devices) -> None:
    used = devices(2)

    def run() -> tuple[list[float], list[Tensor]]:
        everygpu.seed_all(3)
        net = Net(dropout=0.5).to(used[0])
        masks: list[Tensor] = []
        step = everygpu.TrainStep(
            everygpu.DataParallel(net, used),
            lambda out, y: masks.append(everygpu.parallel.gather(out).detach()) or F.cross_entropy(out, y),
            torch.optim.SGD(net.parameters(), lr=0.1),
        )
        row = torch.ones(8, 6, device=used[0])
        return [step(row, torch.arange(8, device=used[0]) % 5).item() for _ in range(4)], masks

    everygpu.seed_all(3)
    first, masks = run()
    second, again = run()
    assert first == second
    assert all(a.equal(b) for a, b in zip(masks, again))
    assert not masks[0][0].equal(masks[0][4])


def test_activation_checkpointing(devices: Devices) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    pair = Pair(devices(3), "SGD", make=Checkpointed)
    pair.train(pair.data(10))
    pair.check()


def test_recurrent_and_tied_weights(devices: Devices) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(5, 8)
            self.lstm = nn.LSTM(8, 8, batch_first=True)
            self.head = nn.Linear(8, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(self.embed(x))[0][:, -1])

    pair = Pair(devices(2), make=Tied)
    on = {"device": pair.home}
    pair.train([(torch.randint(0, 5, (6, 4), **on), torch.arange(6, **on) % 5) for _ in range(10)], rel=1e-4)
    assert pair.ours.head.weight is pair.ours.embed.weight
    pair.check(1e-4)


def test_evaluate_leaves_everything_as_it_was(devices: Devices) -> None:
    used = devices(2)
    net = Net(dropout=0.5).to(used[0])
    net.norm.eval()
    step = everygpu.TrainStep(everygpu.DataParallel(net, used), F.cross_entropy, torch.optim.SGD(net.parameters()))
    x, y = (t.to(used[0]) for t in next(batches(1)))
    step(x, y)
    before = {k: v.clone() for k, v in net.state_dict().items() if k != "calls"}
    loss, output = step.evaluate(x, y)
    assert not loss.requires_grad
    assert isinstance(output, everygpu.parallel.ShardedBatch)
    assert net.dropout.training
    assert not net.norm.training
    net.eval()
    torch.testing.assert_close(loss, F.cross_entropy(net(x), y))
    torch.testing.assert_close(everygpu.parallel.gather(output), net(x).detach())
    assert all(before[k].equal(v) for k, v in net.state_dict().items() if k != "calls")
