"""States of modules, optimizers, schedulers and generators: taken without change, put back only after checks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, lr_scheduler
from torch.optim.swa_utils import AveragedModel

from everygpu.checkpoint.load import decode_part
from everygpu.checkpoint.parts import Contents, Part
from everygpu.checkpoint.states import Fit, encode_parts, plan_parts
from everygpu.errors import CheckpointMismatchError
from tests.checkpoint.models import Counting, Net, same_state


def part_of(value: object, model: object = None) -> Any:
    """A part as it comes back from disk."""
    tensors: dict[str, dict[str, torch.Tensor]] = {"model": {}, "training": {}}
    parts = {"x": value} if model is None else {"x": value, "model": model}
    encoded = encode_parts(parts, tensors)
    copies = {name: tensor.clone() for group in tensors.values() for name, tensor in group.items()}
    return decode_part(encoded["x"], copies)


def stored(value: object) -> Any:
    """The state as it comes back from disk."""
    return part_of(value).state


def plan(target: object, part: Any, strict: bool = True) -> Callable[[], None]:
    planned = plan_parts(Contents(format="", parts={}, extras={"x": part}), {"x": target}, Fit(strict=strict))
    return lambda: [restore() for restore in planned.values()] and None


def restore(target: object, source: object, strict: bool = True) -> None:
    plan(target, part_of(source), strict)()


def test_non_persistent_buffers_are_left_out() -> None:
    assert "scratch" not in stored(Net())["values"]


@pytest.mark.parametrize("extra", [None, {"steps": 3, (1, 2): [torch.ones(2)]}, torch.ones(3), "text"], ids=str)
def test_extra_state_comes_back(extra: object) -> None:
    target = Counting("old")
    restore(target, Counting(extra))
    assert same_state(target.extra, extra)


def test_lazy_modules_take_their_shape_from_the_state() -> None:
    target = nn.LazyLinear(3)
    restore(target, nn.Linear(5, 3))
    assert target.weight.shape == (3, 5)


def test_a_half_precision_target_keeps_its_dtype() -> None:
    target = nn.Linear(2, 2).bfloat16()
    source = nn.Linear(2, 2)
    restore(target, source)
    assert torch.equal(target.weight, source.weight.bfloat16())


def net_without(*names: str) -> nn.Module:
    model = Net()
    for name in names:
        delattr(model, name)
    return model


def test_not_strict_loads_what_both_have() -> None:
    source, target = Net(seed=1), net_without("norm")
    target.other = nn.Linear(1, 1)
    restore(target, source, strict=False)
    assert torch.equal(target.embed.weight, source.embed.weight)
    assert torch.equal(target.module.weight, source.module.weight)


def test_complex_into_real_is_refused() -> None:
    with pytest.raises(CheckpointMismatchError, match=r"complex64"):
        restore(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64))


def trained(make: Callable[[Any], Any], steps: int = 3) -> tuple[nn.Module, Any]:
    model = Net()
    optimizer = make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.full((4, 4), 1.0 + step)).square().sum()
        loss.backward()
        optimizer.step(lambda loss=loss: loss)
    return model, optimizer


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: AdamW(p, lr=0.1),
    "AdamW amsgrad": lambda p: AdamW(p, lr=0.1, amsgrad=True),
    "Adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=2),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "groups": lambda p: SGD([{"params": [q], "lr": 0.1 * i, "name": f"g{i}"} for i, q in enumerate(p)], momentum=0.5),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_every_optimizer_comes_back(make: Callable[[Any], Any]) -> None:
    _, source = trained(make)
    expected = source.state_dict()
    assert same_state(stored(source), expected)
    target = make(Net(seed=5).parameters())
    restore(target, source)
    assert same_state(target.state_dict(), expected)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10),
    "CosineWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 2)]
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=list(SCHEDULERS))
def test_every_scheduler_goes_on_where_it_was(make: Callable[[Any], Any]) -> None:
    def fresh() -> tuple[Any, Any]:
        optimizer = SGD([nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9)
        return optimizer, make(optimizer)

    def advance(optimizer: Any, scheduler: Any, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    source = fresh()
    advance(*source, 3)
    target = fresh()
    for there, here in zip(target, source):
        restore(there, here)
    assert same_state(target[1].state_dict(), source[1].state_dict())
    assert advance(*target, 5) == advance(*source, 5)


def test_reduce_on_plateau_keeps_its_best_and_its_infinities() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    source = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    assert stored(source)["best"] == float("inf")
    for loss in (0.5, 0.7, 0.7):
        source.step(loss)
    target = lr_scheduler.ReduceLROnPlateau(optimizer)
    restore(target, source)
    assert target.best == 0.5
    assert same_state(target.state_dict(), source.state_dict())


def test_an_averaged_model_comes_back() -> None:
    model = Net(seed=1)
    source, target = AveragedModel(model), AveragedModel(Net(seed=2))
    source.update_parameters(model)
    restore(target, source)
    assert same_state(dict(target.state_dict()), dict(source.state_dict()))
    assert target.n_averaged == 1


@pytest.mark.parametrize("state", [torch.zeros(16, dtype=torch.uint8), None, [1]], ids=str)
def test_a_generator_of_another_device_is_refused(state: object) -> None:
    with pytest.raises(CheckpointMismatchError, match="generator"):
        plan(torch.Generator(), Part(kind="generator", state=state))


@pytest.mark.parametrize("kind", ["plain", "state_dict", "generator"])
def test_another_kind_is_refused(kind: Any) -> None:
    with pytest.raises(CheckpointMismatchError, match=f"saved as a {kind}, which Linear can't take"):
        plan(nn.Linear(1, 1), Part(kind=kind, state={}))


def test_missing_and_unknown_names_are_listed_and_cut() -> None:
    target = net_without("norm")
    target.norms = nn.BatchNorm1d(6)
    with pytest.raises(CheckpointMismatchError, match=r"(?s)5 missing, 5 unknown and 0 of .*strict=False.*norms\.bias"):
        restore(target, Net(seed=1))
    with pytest.raises(CheckpointMismatchError, match=r"(?s)missing in the checkpoint \(50\):.*and 30 more"):
        restore(nn.Sequential(*(nn.Linear(1, 1) for _ in range(25))), nn.Sequential())
