"""Batches of captured steps: their structure, their rows, and what is written into them."""

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import everygpu
from tests.parallel.cuda_graphs.forwards import OwnLoss, check_own_loss
from tests.step.scenarios import Devices, Step, X, Y, check, make_step, train_on
from tests.step.test_capture import Moving, Net, num_graphs, once


class Optional(Net):
    """Tells nothing from an empty container."""

    def forward(self, x: Tensor, more: Any = None) -> Tensor:
        return super().forward(x) * (1.0 if more is None else 0.5 if isinstance(more, list) else 0.25)


@once
def test_empty_containers_count(capturing: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        train_on(step, losses, more=[])
        train_on(step, losses, more={})
        train_on(step, losses)

    check(capturing, scenario, make=Optional)


class Numbered(Net):
    def forward(self, x: Tensor, number: int = 0) -> Tensor:
        return super().forward(x)


@once
def test_values_that_never_come_back_take_no_memory(capturing: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everygpu.parallel.cuda_graphs.batch_kinds.MAX_COUNTED", 20)
    step = make_step(capturing(2), Numbered)
    for number in range(30):
        step(X, Y, number=number)
    assert len(step._capture._kinds._times) == 20
    for _ in range(4):
        step(X, Y, number=0)
    assert num_graphs(step) == 1


@once
def test_a_model_that_returns_its_loss(capturing: Devices) -> None:
    used = capturing(2)
    net = OwnLoss().to(used[0])
    step = Step(everygpu.DataParallel(net, used), None, torch.optim.SGD(net.parameters(), lr=0.5))
    check_own_loss(net, lambda x: step((x, x)), used[0])
    assert num_graphs(step) == 1


@once
def test_a_capture_does_not_keep_the_batch(capturing: Devices) -> None:
    step = make_step(capturing(2))
    refs = []
    for _ in range(6):
        x = X.clone().to(step._home)
        step(x, Y)
        refs.append(weakref.ref(x))
        del x
    assert num_graphs(step) == 1
    assert not any(ref() is not None for ref in refs)


class Many(Net):
    """Takes a dict of tensors, a scale without rows, and the rest by keyword."""

    def forward(self, x: Tensor, more: Any = None, scale: Any = 1.0) -> Tensor:
        h = super().forward(x["a"][0] + x["b"])
        return h * scale if more is None else h * scale + more.sum()


def each(step: Step, losses: list[Tensor], *batches_of: Any) -> None:
    """Go through every batch often enough for it to be captured."""
    for args, kwargs in batches_of:
        losses += [step(*args, **kwargs) for _ in range(5)]


@once
def test_nested_inputs_and_such_without_rows(capturing: Devices) -> None:
    half = X * 0.5
    one = ({"x": {"a": (half,), "b": X}}, Y), {}

    def scenario(step: Step, losses: list[Tensor]) -> None:
        for i in range(6):
            losses.append(
                step(*one[0], scale=torch.tensor(0.1 * i), more=everygpu.Replicated(torch.full((3,), 0.1 * i)))
            )
        for i in range(6):
            losses.append(step(*one[0], scale=0.5 + i % 2))

    check(capturing, scenario, make=Many, first=one)


@once
def test_fewer_rows_than_replicas(capturing: Devices) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        step.model.module.norm.eval()
        each(step, losses, ((X[:1], Y[:1]), {}), ((X[:5], Y[:5]), {}), ((X, Y), {}))

    check(capturing, scenario, count=4)


class Writing(Net):
    """Changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


@once
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_inputs_that_are_written(capturing: Devices, count: int, is_sharded: bool) -> None:
    used = capturing(count)
    found = []
    for capture in (False, "auto"):
        step = make_step(used, Writing, capture=capture)
        for _ in range(6):
            x = X.clone().to(used[0])
            if is_sharded:
                ((x, y),) = everygpu.Feeder([(X.clone(), Y)], used)
            step(x, y if is_sharded else Y.to(used[0]))
        assert step.stats().engine == "threads"
        found.append(x)
    assert found[0].equal(found[1])
    assert not found[0].equal(X.to(used[0]))


@once
@pytest.mark.parametrize("split", ["even", [2.0, 1.0], [1.0, 0.0]], ids=str)
def test_rows_along_another_dimension(capturing: Devices, split: Any) -> None:
    class Sideways(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.T).T

    def scenario(step: Step, losses: list[Tensor]) -> None:
        losses += [step(X.T[:, :11], Y[None, :11]) for _ in range(6)]
        assert step._capture is None or num_graphs(step) == 2

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.T, target[0])

    wrapper = {"dim": 1, "split": split}
    check(capturing, scenario, make=Sideways, loss=loss, first=((X.T, Y[None]), {}), wrapper=wrapper)


@once
def test_outputs_that_are_joined(capturing: Devices) -> None:
    check(capturing, train_on, wrapper={"gather": "joined"})


@once
@pytest.mark.parametrize(("make", "rows"), [(Net, (4, 5, 7, 12)), (Moving, (4, 5, 12))])
def test_kinds_of_batches_in_turn_are_all_captured(capturing: Devices, make: Any, rows: tuple[int, ...]) -> None:
    """Also where forward moves its weights."""

    def scenario(step: Step, losses: list[Tensor]) -> None:
        for _ in range(5):
            losses += [step(X[:num], Y[:num]) for num in rows]
        assert step._capture is None or num_graphs(step) == len(rows)

    check(capturing, scenario, make=make)


@once
def test_no_more_kinds_than_may_be_are_captured(
    capturing: Devices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("everygpu.parallel.cuda_graphs.batch_kinds.MAX_CAPTURES", 3)

    def scenario(step: Step, losses: list[Tensor]) -> None:
        for _ in range(5):
            losses += [step(X[:rows], Y[:rows]) for rows in (4, 5, 6, 7)]
        assert step._capture is None or num_graphs(step) == 3

    check(capturing, scenario)
    assert caplog.text.count("batches of some shapes run without CUDA graphs: there are graphs of 3 others.") == 1


@once
def test_captures_that_are_no_longer_used_make_room(capturing: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everygpu.parallel.cuda_graphs.batch_kinds.MAX_CAPTURES", 2)

    def scenario(step: Step, losses: list[Tensor]) -> None:
        for several in ((4, 5), (6, 7), (5, 9)):
            for _ in range(6):
                losses += [step(X[:rows], Y[:rows]) for rows in several]
            assert step._capture is None or num_graphs(step) == 2
            assert step._capture is None or step.stats().engine == "capture"

    check(capturing, scenario)


class Sometimes(Net):
    """Can't be captured with most numbers of rows."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] not in (4, 6):
            x = x * x.abs().max().item()
        return super().forward(x)


@once
@pytest.mark.parametrize("rows", [(6, 8, 12), (6, 8, 12, 7, 9, 10, 4, 5)], ids=["one of three", "six of eight"])
def test_kinds_that_cannot_be_captured_leave_the_others(capturing: Devices, rows: tuple[int, ...]) -> None:
    def scenario(step: Step, losses: list[Tensor]) -> None:
        for _ in range(6):
            losses += [step(X[:num], Y[:num]) for num in rows]
        assert step._capture is None or (num_graphs(step) == 2 and step._capture.reason is None)
        assert step._capture is None or step._capture._step._overlaps_backward

    check(capturing, scenario, make=Sometimes)


class LossInside(nn.Module):
    """As transformers' models: its loss is the mean over the labels that aren't -100."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.net(x), labels)}


@once
def test_models_that_weigh_their_loss_by_labels(capturing: Devices) -> None:
    labels = Y.clone()
    labels[: len(Y) // 2 - 1] = -100

    def scenario(step: Step, losses: list[Tensor]) -> None:
        losses += [step({"x": X, "labels": labels}) for _ in range(4)]
        assert step._capture is None or step.stats().engine == "capture"

    check(capturing, scenario, make=LossInside, loss=None, first=(({"x": X, "labels": labels},), {}))
