"""``engine="capture"``: replays give what eager replicas give; random programs say so of many more."""

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everygpu
from everygpu.errors import CallError
from everygpu.parallel.cuda_graphs import transfer
from tests.parallel.cuda_graphs.forwards import (
    NUM_STEPS,
    Devices,
    Net,
    Outputs,
    OwnLoss,
    TwoOutputs,
    captured,
    check,
    check_own_loss,
    loss_of,
    make_batches,
    num_graphs,
    train,
)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_training_is_the_same(capturing: Devices, count: int) -> None:
    check(capturing, train, count=count)


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


@pytest.mark.parametrize(("count", "kernels"), [(3, True), (1, True), (1, False)])
def test_parameters_of_all_kinds(
    capturing: Devices, monkeypatch: pytest.MonkeyPatch, count: int, kernels: bool
) -> None:
    if not kernels:  # as where there is no Triton
        monkeypatch.setattr(transfer, "has_kernels", lambda devices: False)
    check(capturing, train, make=Odd, count=count)


def test_an_output_is_let_go_before_its_loss(capturing: Devices) -> None:
    """A language model's logits would be hundreds of megabytes, in every step before the capture."""
    used = capturing(1)
    model = everygpu.DataParallel(nn.Linear(6, 5).to(used[0]), used, engine="capture")
    output = model(torch.randn(4, 6))
    memory = weakref.ref(output.untyped_storage())
    loss = output.tanh().sum()  # which keeps its own result, not the output
    del output
    assert memory() is None
    loss.backward()


def test_structures(capturing: Devices) -> None:
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

    check(capturing, scenario, make=TwoOutputs)


def test_a_model_that_returns_its_loss(capturing: Devices) -> None:
    used = capturing(2)
    net = OwnLoss().to(used[0])
    model = everygpu.DataParallel(net, used, engine="capture")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def learn(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x, x).mean()
        loss.backward()
        optimizer.step()
        return loss

    check_own_loss(net, learn, used[0])
    assert num_graphs(model) == 1


class Tagger(nn.Module):
    """Returns the mean loss over the targets that aren't -100."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.linear(x), labels)


def train_tagger(used: list[torch.device], weight: Any) -> tuple[everygpu.DataParallel, list[tuple[Tensor, Tensor]]]:
    """Train with more and fewer targets; return the losses, each beside that of one device."""
    bare, net = Tagger().to(used[0]), Tagger().to(used[0])
    model = everygpu.DataParallel(net, used, engine="capture", weight=weight)
    losses = []
    for i in range(NUM_STEPS):
        x, labels = torch.randn(8, 3, device=used[0]), torch.randint(5, (8,), device=used[0])
        labels[: i % 4 + 1] = -100
        losses.append((model(x, labels=labels).mean(), bare(x, labels)))
        for loss, linear in zip(losses[-1], (net.linear, bare.linear)):
            (grad,) = torch.autograd.grad(loss, linear.weight)
            linear.weight.data.sub_(grad)
    return model, losses


@pytest.mark.parametrize("weight", [None, lambda x, labels: (labels >= 0).sum()], ids=["known", "given"])
def test_losses_are_weighed_by_what_each_batch_says(capturing: Devices, weight: Any) -> None:
    model, losses = train_tagger(capturing(2), weight)
    for found, expected in losses:
        torch.testing.assert_close(found, expected)
    assert num_graphs(model) == 1


def test_weights_that_are_no_tensors_are_not_captured(capturing: Devices, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = train_tagger(capturing(2), lambda x, labels: 7 + len(x))
    assert num_graphs(model) == 0
    assert "return tensors, as mask.sum()" in caplog.text


def test_results_are_the_users(capturing: Devices) -> None:
    used = capturing(2)
    model = everygpu.DataParallel(Net().to(used[0]), used, engine="capture")
    params = [p for p in model.parameters() if p.requires_grad and p is not model.module.unused]
    kept = []
    for x, _ in make_batches(NUM_STEPS):
        output = model(x)
        grads = torch.autograd.grad(output.square().mean(), params)
        kept.append((output, output.detach().clone(), grads, [g.clone() for g in grads]))
    assert num_graphs(model) == 1
    for output, values, grads, copies in kept:
        torch.testing.assert_close(output, values, rtol=0, atol=0)
        assert all(map(torch.equal, grads, copies))


class Inner(Net):
    """Returns what its scores are computed from, too."""

    def forward(self, x: Tensor) -> Any:
        h = self.norm(self.first(x)).tanh()
        return h, self.last(h)


@pytest.mark.parametrize("retains", [False, True])
def test_gradients_between_outputs(capturing: Devices, retains: bool) -> None:
    used = capturing(2)
    model = everygpu.DataParallel(Inner().to(used[0]), used, engine="capture")
    for x, y in make_batches(NUM_STEPS):
        h, scores = model(x)
        if retains:
            h.retain_grad()
        loss_of(scores, y).backward()
        assert not retains or everygpu.parallel.gather(h.grad).count_nonzero()
    assert num_graphs(model) == (not retains)
    if not retains:
        h, _ = model(make_batches(1)[0][0])
        with pytest.raises(CallError, match="engine='threads'"):
            h.retain_grad()


def test_a_graph_that_is_dropped(capturing: Devices) -> None:
    model = captured(capturing)
    replays = []
    for x, _ in make_batches(NUM_STEPS):
        model(x)  # what it returns has been dropped when the next one begins
        replays.append(model._engine.captured_forward._use)
    assert all(a is not b for a, b in itertools.pairwise(replays)), "each has been replayed"


def test_forwards_without_a_backward_are_not_captured(capturing: Devices) -> None:
    used = capturing(2)
    model = everygpu.DataParallel(Net().to(used[0]), used, engine="capture")
    for x, _ in make_batches(NUM_STEPS):
        model(x)
    assert num_graphs(model) == 0
    for x, y in make_batches(NUM_STEPS):  # nobody knew where their backward begins
        loss_of(model(x), y).backward()
    assert num_graphs(model) == 1
    assert model.module.first.weight.grad is not None


def test_parameters_written_before_the_backward(capturing: Devices) -> None:
    model = captured(capturing)
    ((x, y),) = make_batches(1)
    value = loss_of(model(x), y)
    with torch.no_grad():
        model.module.last.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
    value = loss_of(model(x), y)
    with torch.no_grad():
        model.module.last.bias.mul_(2)  # which no backward needs
    value.backward()


def test_edits_are_seen(capturing: Devices) -> None:
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

    check(capturing, scenario)


def test_dropout_is_drawn_anew(capturing: Devices) -> None:
    used = capturing(2)
    model = everygpu.DataParallel(Net(dropout=0.5).to(used[0]), used, engine="capture")
    (x, _), *_ = make_batches(1)
    outputs = [model(x).detach().cpu() + 0 for _ in range(NUM_STEPS)]
    gc.collect()
    assert not any(torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i])
