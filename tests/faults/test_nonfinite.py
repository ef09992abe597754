"""A loss or gradients that are nan or infinite in one replica."""

import copy
import functools
import logging
import math

import pytest
import torch
from torch import nn

import everygpu
from everygpu.errors import NonFiniteError
from everygpu.step.finite_check import MAX_IN_ROW

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
CLASSES = torch.randint(3, (8,), generator=torch.Generator().manual_seed(1))
SPOILT = torch.where(torch.arange(8)[:, None] == 1, float("nan"), X)


class Spoilt(nn.Module):
    """Gives what ``spoil`` makes of its rows whose first value is 7."""

    def __init__(self, spoil=lambda x: x * float("nan")):
        super().__init__()
        self.spoil = spoil

    def forward(self, x):
        return torch.where(x[:, :1] == 7, self.spoil(x), x)


def make_net(spoil=lambda x: x * float("nan"), norm=nn.Identity):
    torch.manual_seed(0)
    return nn.Sequential(Spoilt(spoil), nn.Linear(6, 16), norm(), nn.ReLU(), nn.Linear(16, 3))


def batch(bad_row=None):
    x = X.clone()
    if bad_row is not None:
        x[bad_row, 0] = 7
    return x, Y


def make(used, *, net=None, optimizer=torch.optim.AdamW, **options):
    net = make_net() if net is None else net
    net.to(used[0])
    made = optimizer(net.parameters(), lr=0.01)
    return net, everygpu.TrainStep(everygpu.DataParallel(net, used), nn.functional.mse_loss, made, **options)


def run(step, bad_rows):
    for row in bad_rows:
        step(*batch(bad_row=row))


def numbers(net, step):
    """Parameters, buffers and optimizer state of now."""
    return copy.deepcopy((net.state_dict(), step.optimizer.state_dict()["state"]))


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def warnings_of(caplog):
    """The step's own: on GPUs the model says, too, why it runs in threads, and what batch normalization does."""
    found = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return [message for message in found if not message.startswith("DataParallel: ")]


SETUPS = {
    "one device": (1, {}),
    "two": (2, {}),
    "clipped": (2, {"clip_norm": 0.1}),
    "fp16": (2, {"precision": "fp16"}),
    "not spread": (2, {"optimizer": lambda p, lr: Plain(p, lr)}),
    "not captured": (2, {"capture": False}),
}


class Plain(torch.optim.Adam):
    """A subclass may do anything: it steps on the first device."""


@pytest.mark.parametrize("setup", SETUPS)
def test_an_update_is_left_out_and_named(devices, caplog, setup):
    count, options = SETUPS[setup]
    used = devices(count)
    net, step = make(used, net=make_net(norm=lambda: nn.BatchNorm1d(16)), **options)
    for _ in range(3):
        step(*batch())
    step.stats()
    before = numbers(net, step)
    assert math.isnan(step(*batch(bad_row=7)).item())
    num_skipped = step.stats().num_skipped
    after = numbers(net, step)
    for state in (before[0], after[0]):
        state.pop("2.num_batches_tracked")
    assert_same(after, before)
    assert num_skipped == 1 + (setup == "fp16" and used[0].type == "cuda") * (num_skipped - 1)
    (message,) = warnings_of(caplog)
    assert "got others in update 4" in message
    assert "torch.autograd.set_detect_anomaly(True) finds the operation" in message
    step(*batch())
    assert all(p.isfinite().all() for p in net.parameters())
    assert not torch.equal(net[1].weight, before[0]["1.weight"])


def test_as_if_the_batch_had_not_been(devices):
    used = devices(2)
    net, step = make(used, net=make_net())
    other, plain = make(used, net=make_net())
    for i in range(6):
        if i in (0, 3):
            step(*batch(bad_row=0))
            step.stats()
        step(*batch())
        plain(*batch())
    assert_same(net.state_dict(), other.state_dict())


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_the_first_update_with_a_fused_momentum(devices, count, dampening):
    """torch's kernel, which leaves it out, leaves new memory for the momentum as it is."""
    used = devices(count)
    nets = []
    for bad_row in (0, None):
        optimizer = functools.partial(torch.optim.SGD, momentum=0.9, dampening=dampening, fused=True)
        net, step = make(used, net=make_net(), capture=False, optimizer=optimizer)
        if bad_row is not None:
            torch.full((2**16,), float("nan"), device=used[0])
            step(*batch(bad_row=bad_row))
        for _ in range(3):
            step(*batch())
        nets.append(net)
    assert_same(nets[0].state_dict(), nets[1].state_dict())


def test_sparse_gradients_have_no_fused_kernel(devices):
    used = devices(1)
    net = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)).to(used[0])
    before = net[0].weight.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)  # as TrainStep has it on a GPU
    step = everygpu.TrainStep(net, nn.functional.cross_entropy, optimizer, capture=False)
    step(torch.tensor([1, 2], device=used[0]), torch.tensor([0, 1], device=used[0]))
    assert (net[0].weight != before).any(1).tolist() == [False, True, True, False, False]


class Later(nn.Module):
    """Has a head that takes part only at times."""

    def __init__(self):
        super().__init__()
        self.body, self.head = make_net(), nn.Linear(3, 3)

    def forward(self, x, head=True):
        x = self.body(x)
        return self.head(x) if head else x


@pytest.mark.parametrize("count", [1, 2])
def test_a_momentum_that_comes_later(devices, count):
    used = devices(count)
    nets = []
    for fused in (True, False):
        torch.manual_seed(0)
        net, step = make(
            used, net=Later(), capture=False, optimizer=functools.partial(torch.optim.SGD, momentum=0.9, fused=fused)
        )
        for i in range(5):
            step(*batch(), head=i > 1)
        nets.append(net)
    torch.testing.assert_close(nets[0].state_dict(), nets[1].state_dict())


def test_one_batch_of_several(devices, caplog):
    net, step = make(devices(2), accumulate=3)
    for _ in range(3):
        step(*batch())
    before = numbers(net, step)
    for row in (None, 1, None):
        step(*batch(bad_row=row))
    assert step.stats().num_skipped == 1
    assert_same(numbers(net, step), before)
    step(*batch())
    step.flush()
    assert step.stats().num_skipped == 1


class Root(nn.Module):
    """Has infinite gradients at 0, where it is finite, between two layers that learn."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.first(x).abs().sqrt())


def make_root(used, **options):
    """A step that has been made once, and what makes the next ones' gradients infinite."""
    net, step = make(used, net=Root(), **options)

    @torch.no_grad()
    def spoil():
        net.first.weight[0].zero_()
        net.first.bias[0] = 0

    return net, step, spoil


def check_only_gradients(used, caplog, num_steps, *, begins_beside=False, **options):
    """After some steps, gradients are not finite while the loss is: the update is left out as a whole.

    Args:
        begins_beside: The first such update is made where gradients are finite, and those after it are left out.
    """
    net, step, spoil = make_root(used, **options)
    for _ in range(num_steps):
        step(*batch())
    spoil()
    step.stats()
    before = copy.deepcopy(net.first.state_dict())
    if begins_beside:
        assert step(*batch()).isfinite()
        assert step.stats().num_skipped == 1
        assert_same(net.first.weight[0], before["weight"][0])
        assert_same(net.first.bias[0], before["bias"][0])
        assert all(p.isfinite().all() for p in net.parameters())
    before = numbers(net, step)
    for _ in range(9 - begins_beside):
        assert step(*batch()).isfinite()
    assert step.stats().num_skipped == 9
    assert_same(numbers(net, step), before)
    with pytest.raises(NonFiniteError, match="update 10 in a row"):
        run(step, [None] * 9)  # on GPUs a few updates later
    assert_same(numbers(net, step), before)
    (first,) = warnings_of(caplog)
    assert f"got others in update {num_steps + 1}" in first
    assert ("only buckets with such gradients" in first) == begins_beside


def check_only_gradients_raise(used, num_steps):
    net, step, spoil = make_root(used, on_nonfinite="raise")
    for _ in range(num_steps):
        step(*batch())
    step.stats()
    spoil()
    before = numbers(net, step)
    with pytest.raises(NonFiniteError, match=f"got others in update {num_steps + 1}"):
        run(step, [None] * 9)
    step.stats()
    assert_same(numbers(net, step), before)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}, {"optimizer": torch.optim.SGD}], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_only_gradients(devices, caplog, count, options):
    check_only_gradients(devices(count), caplog, num_steps=1, capture=False, **options)


def test_only_gradients_raise(devices):
    check_only_gradients_raise(devices(2), num_steps=1)


def test_raise(devices):
    used = devices(2)
    net, step = make(used, on_nonfinite="raise")
    step(*batch())
    before = numbers(net, step)
    with pytest.raises(NonFiniteError, match="must be finite, got others in update 2"):
        run(step, [0] if used[0].type == "cpu" else [0] * 9)  # on GPUs a few updates later
    assert_same(numbers(net, step), before)
    if used[0].type == "cuda":
        with pytest.raises(NonFiniteError, match="must be finite, got others in update 3"):  # queued meanwhile
            step(*batch())
    step(*batch())


def test_ignore(devices, caplog):
    used = devices(1)
    net, step = make(used, on_nonfinite="ignore", capture=False)
    step(*batch(bad_row=0))
    assert net[1].weight.isnan().any()
    assert step.stats().num_skipped == 0
    assert not warnings_of(caplog)


def test_ten_in_a_row_raise(devices, caplog):
    net, step = make(devices(2))
    step(*batch())
    step.stats()
    before = numbers(net, step)
    with pytest.raises(NonFiniteError, match=f"update {MAX_IN_ROW} in a row"):
        run(step, [3] * 30)
    assert_same(numbers(net, step), before)
    (first,) = warnings_of(caplog)
    assert "got others in update 2" in first


def test_others_in_between_begin_anew(devices, caplog):
    _, step = make(devices(2))
    for i in range(30):
        step(*batch(bad_row=0 if i % 10 else None))
    assert step.stats().num_skipped == 27


# Running statistics that a forward writes.


class Normed(nn.Module):
    """A loss with statistics of its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.norm(x), y)


def make_normed(used, *, in_loss=False, **options):
    torch.manual_seed(0)
    norm = nn.Identity() if in_loss else nn.Sequential(nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=0.5))
    net, loss = nn.Sequential(norm, nn.Linear(6, 3)).to(used[0]), Normed().to(used[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    criterion = loss if in_loss else nn.CrossEntropyLoss()
    return everygpu.TrainStep(everygpu.DataParallel(net, used), criterion, optimizer, **options)


def buffers(step):
    owners = [step.model.module, *([step.loss] if isinstance(step.loss, nn.Module) else [])]
    return copy.deepcopy([b for owner in owners for b in owner.buffers() if b.is_floating_point()])


def check_put_back(step, num_steps):
    for _ in range(num_steps):
        step(X, CLASSES)
    before = buffers(step)
    step(SPOILT, CLASSES)
    assert step.stats().num_skipped == 1
    torch.testing.assert_close(buffers(step), before, rtol=0, atol=0)
    step(X, CLASSES)
    assert step.stats().num_skipped == 1
    assert not torch.equal(buffers(step)[0], before[0]), "they go on"


@pytest.mark.parametrize("in_loss", [False, True], ids=["model", "loss"])
def test_statistics_are_as_before(devices, in_loss):
    check_put_back(make_normed(devices(2), in_loss=in_loss), 1)


def test_statistics_of_a_module_that_the_loss_refers_to(devices):
    step = make_normed(devices(1), in_loss=True)
    module = step.loss
    step.loss = lambda output, target: module(output, target)
    for x in (X, SPOILT):
        step(x, CLASSES)
    assert module.norm.running_mean.isfinite().all()


def test_statistics_when_it_raises(devices):
    step = make_normed(devices(2), on_nonfinite="raise", capture=False)
    step(X, CLASSES)
    before = buffers(step)
    with pytest.raises(NonFiniteError):
        any(step(SPOILT, CLASSES) is None for _ in range(10))
    torch.testing.assert_close(buffers(step), before, rtol=0, atol=0)


@pytest.mark.parametrize("in_loss", [False, True], ids=["model", "loss"])
def test_statistics_in_captured_steps(devices, monkeypatch, in_loss):
    from tests import tape

    used = devices(2)
    tape.prepare(used, monkeypatch, fused=True)
    step = make_normed(used, in_loss=in_loss)
    check_put_back(step, 8)
    assert step.stats().engine == "capture"


class TestCaptured:
    """Steps captured as a CUDA graph, acted out for CPU replicas."""

    @pytest.fixture(params=["fused", "unfused"])
    def used(self, request, devices, monkeypatch):
        from tests import tape  # only here: the tests above need nothing that it reaches into

        found = devices(2)
        tape.prepare(found, monkeypatch, fused=request.param == "fused")
        return found

    @pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5}, {"accumulate": 2}], ids=str)
    def test_an_update_is_left_out(self, used, caplog, options):
        net, step = make(used, net=make_net(norm=lambda: nn.BatchNorm1d(16)), **options)
        for _ in range(10):
            step(*batch())
        assert step.stats().engine == "capture"
        before = numbers(net, step)
        for _ in range(options.get("accumulate", 1)):
            step(*batch(bad_row=7))
        assert step.stats().engine == "capture"
        after = numbers(net, step)
        for state in (before[0], after[0]):
            state.pop("2.num_batches_tracked")
        assert_same(after, before)
        assert step.stats().num_skipped == 1
        assert len(warnings_of(caplog)) == 1
        for _ in range(4):
            step(*batch())
        assert step.stats().engine == "capture"
        assert all(p.isfinite().all() for p in net.parameters())
        assert not torch.equal(net[1].weight, before[0]["1.weight"])

    def test_only_gradients(self, used, caplog):
        _, step, _ = make_root(used)
        is_fused = step._strategy._has_kernels
        check_only_gradients(used, caplog, num_steps=10, begins_beside=is_fused)

    def test_only_gradients_after_others(self, used, caplog):
        """Once an update was left out in part, steps are captured anew, with updates after backward."""
        net, step, spoil = make_root(used)
        for is_bad in [False] * 10 + [True] + [False] * 10 + [True] + [False] * 10:
            before = numbers(net, step)
            if is_bad:
                first = copy.deepcopy(net.first.state_dict())
                spoil()
                before = numbers(net, step)
            step(*batch())
            num_skipped = step.stats().num_skipped
            if is_bad and num_skipped == 2:
                assert_same(numbers(net, step), before)
            if is_bad:
                net.first.load_state_dict(first)
        assert num_skipped == 2
        assert step.stats().engine == "capture"

    def test_only_gradients_where_updates_wait(self, used, caplog):
        check_only_gradients(used, caplog, num_steps=10, clip_norm=1.0)

    def test_only_gradients_raise(self, used):
        check_only_gradients_raise(used, num_steps=10)
