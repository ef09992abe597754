"""What a step refuses, and what a failure leaves."""

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import everygpu
from everygpu.errors import EveryGPUError, LossError, OptimizerError, OptionError, PlacementError
from tests.step.test_train_step import OPTIMIZERS, Devices, Net, Pair, assert_close, batches, train_plainly


def test_gradients_are_not_left_and_an_old_graph_notices_the_update(devices: Devices) -> None:
    pair = Pair(devices(2))
    ((x, y),) = pair.data(1)
    old = pair.ours(x.requires_grad_()).sum()
    pair.step(x.detach(), y)
    assert all(p.grad is None for p in pair.ours.parameters())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


class Masked(nn.Module):
    """A network beside an input that it leaves alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


# Failures.


class Breaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("broken")


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_failure_loses_nothing(devices: Devices, part: str) -> None:
    broken = [False]

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(Breaking.apply(out) + out if broken[0] else out, y)

    pair = Pair(devices(3), loss=loss, plain_loss=F.cross_entropy)
    for x, y in pair.data(6):
        broken[0] = part == "backward"
        with pytest.raises((RuntimeError, ArithmeticError), match="broken|mat1 and mat2"):
            pair.step(x if broken[0] else x[:, :4], y)
        broken[0] = False
        pair.train([(x, y)])
    pair.check()


def test_optimizers_that_cannot_be_spread_step_on_the_first_device(
    devices: Devices, caplog: pytest.LogCaptureFixture
) -> None:
    class Mine(torch.optim.Adam):
        pass

    used = devices(2)
    with caplog.at_level(logging.INFO, "everygpu"):
        pair = Pair(used, Mine, clip_norm=1.0, accumulate=2, capture=False)
    assert f"TrainStep: Mine can't be spread, so the optimizer steps on {used[0]}." in caplog.messages
    pair.train(pair.data(8))
    pair.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp64"}, "precision must be one of"),
        ({"compile": "max-autotune"}, "compile must be True or False, got 'max-autotune'"),
        ({"accumulate": 0}, "accumulate must be a whole number of 1 or more, got 0"),
        ({"accumulate": 1.5}, "accumulate"),
        ({"clip_norm": 0}, "clip_norm must be a number above 0"),
        ({"loss": 3}, "loss must be callable"),
        ({"loss": nn.CrossEntropyLoss}, r"got the class CrossEntropyLoss.*Pass CrossEntropyLoss\(\)"),
        ({"compile": True}, "engine='compile'"),
        ({"capture": "yes"}, "capture must be 'auto', True or False, got 'yes'"),
        ({"capture": 1}, "capture must be 'auto', True or False, got 1"),
        ({"capture": True}, "capture=True needs CUDA devices"),
        ({"on_nonfinite": "stop"}, "on_nonfinite must be one of"),
        ({"on_nonfinite": True}, "on_nonfinite must be one of"),
        ({"check_every": 0}, "check_every must be a whole number of updates, 1 or more, or None, got 0"),
        ({"check_every": True}, "check_every must be a whole number of updates, 1 or more, or None, got True"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    net = Net()
    everything = {"loss": F.cross_entropy, **options}
    with pytest.raises(OptionError, match=f"TrainStep: .*{message}"):
        everygpu.TrainStep(
            everygpu.DataParallel(net, ["cpu"]), optimizer=torch.optim.SGD(net.parameters()), **everything
        )


def test_bad_optimizers() -> None:
    net = Net()
    with pytest.raises(OptimizerError, match="without a closure, got LBFGS"):
        everygpu.TrainStep(net, F.cross_entropy, torch.optim.LBFGS(net.parameters()))
    with pytest.raises(OptimizerError, match="needs a torch optimizer"):
        everygpu.TrainStep(net, F.cross_entropy, net.parameters())


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, everygpu.ShardedOptimizer])
def test_an_optimizer_of_another_model_is_refused(wrap: Any) -> None:
    net, old = everygpu.DataParallel(Net(), ["cpu"]), Net()
    optimizer = wrap(torch.optim.SGD(old.parameters()))
    with pytest.raises(
        OptimizerError, match="none of them is one of its 8. Make the optimizer from this model's parameters"
    ):
        everygpu.TrainStep(net, F.cross_entropy, optimizer)
    optimizer.add_param_group({"params": [next(net.parameters())]})
    everygpu.TrainStep(net, F.cross_entropy, optimizer)


def test_an_optimizer_of_what_is_around_a_frozen_model() -> None:
    """Of the loss's own parameters, with any model; of an input's, with a model that takes no gradients."""
    weighted, prompt = nn.Linear(3, 3), nn.Parameter(torch.ones(2))
    everygpu.TrainStep(everygpu.DataParallel(Net(), ["cpu"]), weighted, torch.optim.SGD(weighted.parameters()))
    frozen = everygpu.DataParallel(Net().requires_grad_(False), ["cpu"])
    everygpu.TrainStep(frozen, F.cross_entropy, torch.optim.SGD([prompt]))


CPUS = [torch.device("cpu")] * 2


@pytest.mark.parametrize(("count", "accumulate"), [(1, 1), (2, 1), (2, 2)])
def test_a_batch_without_rows_is_said_to_be_one(caplog: Any, count: int, accumulate: int) -> None:
    pair = Pair(CPUS[:count], "SGD", accumulate=accumulate)
    ((x, y),) = pair.data(1)
    for _ in range(accumulate):
        pair.step(x[:0], y[:0])
    assert re.search("update is left out.*nan if it has 0 rows", caplog.text)
    assert pair.step.stats().num_skipped == 1
    torch.testing.assert_close(list(pair.ours.parameters()), list(pair.plain.parameters()))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out, y: F.cross_entropy(out, y, reduction="none"), r"one number, got shape \(12,\).*reduction='mean'"),
        (lambda out, y: 1.0, "must be a tensor, got float"),
        (None, r"under \['loss'\] or as .loss, got list"),
    ],
)
def test_losses_that_are_no_number(loss: Any, message: str) -> None:
    class Listing(Net):
        def forward(self, x: Tensor, *_: Tensor) -> Any:
            out = super().forward(x)
            return [out] if loss is None else out

    step = Pair(CPUS, "SGD", make=Listing, loss=loss).step
    with pytest.raises(LossError, match=f"TrainStep: .*{message}"):
        step(*next(batches(1)))


def test_gradients_of_parameters_within_a_loss(devices: Devices) -> None:
    """The loss would get those of the first replica."""
    used = devices(2)

    def make(net: Net, way: str) -> Callable[..., Tensor]:
        def loss(out: Tensor, y: Tensor) -> Tensor:
            value = F.cross_entropy(out, y)
            if way == "backward":
                value.backward(retain_graph=True)
                return value
            of = net.last.weight if way == "parameter" else out
            (grad,) = torch.autograd.grad(value, of, create_graph=True)
            return value + grad.square().sum()

        return loss

    for way in ("output", "parameter", "backward"):
        plain, ours = Net().to(used[0]), Net().to(used[0])
        step = everygpu.TrainStep(
            everygpu.DataParallel(ours, used), make(ours, way), OPTIMIZERS["SGD"](ours.parameters())
        )
        x, y = (t.to(used[0]) for t in next(batches(1)))
        if way == "parameter":
            with pytest.raises(LossError, match="can't ask for gradients with respect to the model's parameters"):
                step(x, y)
            continue
        step(x, y)
        train_plainly(plain, OPTIMIZERS["SGD"](plain.parameters()), [(x, y)], make(plain, way))
        assert_close(ours, plain)


def test_a_step_is_not_copied() -> None:
    net = Net()
    step = everygpu.TrainStep(net, F.cross_entropy, torch.optim.SGD(net.parameters()))
    with pytest.raises(EveryGPUError, match="Copy the model and the optimizer"):
        copy.deepcopy(step)


def test_parameters_elsewhere_are_refused() -> None:
    net = Net()
    stray = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.SGD([*net.parameters(), stray], lr=0.1)
    with pytest.raises(PlacementError, match=r"must be on cpu, got parameter \d+ of shape \(2,\) on meta"):
        everygpu.TrainStep(everygpu.DataParallel(net, ["cpu"] * 2), F.cross_entropy, optimizer)


def test_a_loss_with_parameters_of_its_own(devices: Devices) -> None:
    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(out * self.scale, y)

    used = devices(2)
    plain, ours = (nn.ModuleList([Net(), Weighed()]).to(used[0]) for _ in range(2))
    data = [(x.to(used[0]), y.to(used[0])) for x, y in batches(8)]
    optimizer = OPTIMIZERS["AdamW"](ours.parameters())
    step = everygpu.TrainStep(everygpu.DataParallel(ours[0], used), ours[1], optimizer)
    for batch in data:
        step(*batch)
    train_plainly(plain[0], OPTIMIZERS["AdamW"](plain.parameters()), data, plain[1])
    assert_close(ours, plain)


def test_a_models_own_loss_is_not_weighed_where_rows_are_unknown() -> None:
    net = Net()
    optimizer = OPTIMIZERS["SGD"](net.parameters())
    joined = everygpu.DataParallel(net, ["cpu"] * 2, gather="joined")
    with pytest.raises(OptionError, match="loss=None needs a DataParallel with gather='sharded'.*got gather='joined'"):
        everygpu.TrainStep(joined, None, optimizer)
    everygpu.TrainStep(joined, F.cross_entropy, optimizer)
    alone = Net()
    everygpu.TrainStep(
        everygpu.DataParallel(alone, ["cpu"], gather="joined"), None, OPTIMIZERS["SGD"](alone.parameters())
    )


WRONG_WEIGHTS: list[tuple[Any, str]] = [
    (lambda x, y: 1, r"weight\(Tensor, Tensor, Tensor\), got \(x, y\): too many positional.*lambda x, mask, y"),
    (lambda x, mask, y, z: 1, "missing a required argument: 'z'"),
    (lambda *batch: None, "one number, got NoneType"),
    (lambda *batch: batch[2] != 0, r"one number, got a tensor of shape \(\d+,\)"),
]


@pytest.mark.parametrize(("weight", "said"), WRONG_WEIGHTS)
def test_a_weight_that_takes_other_arguments_or_returns_no_number_is_named(weight: Any, said: str) -> None:
    step = Pair(CPUS, "SGD", make=lambda: Masked(Net()), accumulate=2, weight=weight).step
    x, y = next(batches(1))
    with pytest.raises(OptionError, match=rf"TrainStep: weight must .*{said}"):
        step((x, torch.ones(len(x))), y)


def test_a_weight_gets_inputs_and_targets_and_its_own_error_stays() -> None:
    found: list[Any] = []

    def weight(y: Tensor, *, x: Tensor, mask: Tensor) -> Tensor:
        found.append((x, mask, y))
        if len(found) == 2:
            raise TypeError("mine")
        return mask.sum(0, keepdim=True)

    step = Pair(CPUS, "SGD", make=lambda: Masked(Net()), accumulate=2, weight=weight).step
    x, y = next(batches(1))
    mask = torch.ones(len(x))
    step({"x": x, "mask": mask}, y)
    assert all(given is own for given, own in zip(found[0], (x, mask, y)))
    with pytest.raises(TypeError, match=r"^mine$"):
        step({"x": x, "mask": mask}, y)


def test_a_weight_that_only_the_model_has_is_not_passed_over() -> None:
    net = Net()
    optimizer = OPTIMIZERS["SGD"](net.parameters())
    weighted = everygpu.DataParallel(net, ["cpu"] * 2, weight=lambda x: len(x))
    with pytest.raises(OptionError, match=r"weight must be passed to the step.*TrainStep\(\.\.\., weight=\.\.\.\)"):
        everygpu.TrainStep(weighted, F.cross_entropy, optimizer)
    everygpu.TrainStep(weighted, F.cross_entropy, optimizer, weight=lambda x, y: len(x))


def test_a_model_that_returns_its_loss_second_is_told_to_return_it_first() -> None:
    class Second(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            logits = super().forward(x)
            return logits, F.cross_entropy(logits, y)

    step = Pair(CPUS, "SGD", make=lambda: Second(6, 5), loss=None).step
    with pytest.raises(LossError, match=r"one number, got shape \(12, 5\). Return it first, or as \{'loss': ...\}"):
        step(*next(batches(1)))


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_a_model_that_returns_several_losses_is_told_how_all_are_trained(
    devices: Devices, num_replicas: int, shape: tuple[int]
) -> None:
    class Several(nn.Linear):
        way = "tuple"

        def forward(self, x: Tensor, y: Tensor) -> Any:
            logits = super().forward(x)
            a, b = (loss.reshape(shape) for loss in (F.cross_entropy(logits, y), logits.square().mean()))
            made = {"tuple": (a, b), "nested": (a, {"b": [b]}), "total": (a + b, b.detach(), logits)}
            return made.get(self.way, {"loss": a + b, "b": b})

    pair = Pair(devices(num_replicas), "SGD", make=lambda: Several(6, 5), loss=None)
    module, (batch,) = pair.ours, pair.data(1, (7,), ignore=False)
    for way, place in (("tuple", r"out\[1\]"), ("nested", r'out\[1\]\["b"\]\[0\]')):
        module.way = way
        with pytest.raises(
            LossError, match=rf"one loss, got several .*, out\[0\] and {place}, .* sum first and others"
        ):
            pair.step(*batch)
    pair.plain.load_state_dict(module.state_dict())
    added = everygpu.TrainStep(pair.model, lambda losses: sum(losses), pair.optimizer)
    for way, step in (("total", pair.step), ("dict", pair.step), ("tuple", added)):
        module.way = way
        found = step(*batch) if step is pair.step else step(tuple(batch))
        expected = sum(pair.plain(*batch)).sum()
        torch.testing.assert_close(found, expected)
        pair.reference.zero_grad()
        expected.backward()
        pair.reference.step()
    assert_close(pair.ours, pair.plain, 1e-5)
