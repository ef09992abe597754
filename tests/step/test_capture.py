"""Captured steps are the steps they stand for; what can't be captured runs as it is."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import everygpu
from everygpu.errors import OptimizerError

Devices = Callable[[int], list[torch.device]]


Batch = tuple[Tensor, Tensor]

once = pytest.mark.parametrize("capturing", ["fused"], indirect=True)
"""For what doesn't depend on the kind of update."""


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True, capturable=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.001),
}


NUM_STEPS = 12  # two rounds of the rows that batches ignore


class Net(nn.Module):
    """With a buffer that changes, a frozen weight and a parameter that takes no part."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 16, bias=False)  # whose gradient would be rounding errors, which Adam enlarges
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(16, 5)
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.dropout(self.norm(self.first(x))).tanh() * self.frozen)


class Moving(Net):
    """Moves its weights in forward, as a recurrent layer's ``flatten_parameters`` does on GPUs."""

    def forward(self, x: Tensor) -> Tensor:
        for p in (self.first.weight, self.last.weight, self.last.bias):
            p.data = p.data.clone()
        return super().forward(x)


def batches(num: int, device: torch.device, rows: int = 12, *, ignore: bool = True) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(num):
        y = torch.randint(0, 5, (rows,), generator=generator)
        if ignore:
            y[: i % (rows // 2)] = -100  # all of them of the first device, and other numbers in each batch
        found.append((torch.randn(rows, 6, generator=generator).to(device), y.to(device)))
    return found


def train(net: nn.Module, used: list[torch.device], data: Iterable[Batch], make: Any, **options: Any) -> Any:
    """Train with and without capture; return the losses and the step."""
    optimizer = make([p for p in net.parameters() if p.requires_grad])
    loss = options.pop("loss", F.cross_entropy)
    step = everygpu.TrainStep(everygpu.DataParallel(net, used), loss, optimizer, **options)
    losses = [step(x, y) for x, y in data]
    return torch.stack(losses).cpu(), step


def num_graphs(step: everygpu.TrainStep) -> int:
    capture = step._capture
    assert capture is not None
    return len(capture._graphs)


def assert_nets_equal(a: nn.Module, b: nn.Module, **tolerance: float) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values()):
        torch.testing.assert_close(x, y, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def assert_replicas_equal(step: everygpu.TrainStep) -> None:
    for first, *others in step._strategy.flat_params.values:
        assert all(first.cpu().equal(other.cpu()) for other in others)


def check_same(
    capturing: Devices, optimizer: str = "SGD", *, count: int = 2, make: Any = Net, data: Any = None, num: int = 1,
    rtol: float = 1e-4, atol: float = 1e-5, **options: Any,
) -> everygpu.TrainStep:  # fmt: skip
    """Train without and with captures, of which there are to be so many; everything must be equal."""
    used = capturing(count)
    found = batches(NUM_STEPS, used[0]) if data is None else data(used)
    nets = [make().to(used[0]) for _ in range(2)]
    plain, _ = train(nets[0], used, found, OPTIMIZERS[optimizer], capture=False, **options)
    captured, step = train(nets[1], used, found, OPTIMIZERS[optimizer], **options)
    assert num_graphs(step) == num
    torch.testing.assert_close(captured, plain, rtol=rtol, atol=atol)
    assert_nets_equal(nets[1], nets[0], rtol=10 * rtol, atol=10 * atol)
    assert_replicas_equal(step)
    return step


@pytest.mark.parametrize(
    ("name", "count"), [*((name, 2) for name in OPTIMIZERS), ("AdamW", 1), ("SGD", 1), ("AdamW", 8)]
)
def test_captured_steps_are_the_same(capturing: Devices, name: str, count: int) -> None:
    step = check_same(capturing, name, count=count, rtol=1e-5, atol=1e-6)
    assert step.stats().num_steps == NUM_STEPS


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.1},
        {"accumulate": 3},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": "fp16", "accumulate": 2},
    ],
    ids=str,
)
def test_with_every_option(capturing: Devices, options: dict[str, Any]) -> None:
    check_same(capturing, "AdamW", **options)


def in_bf16(used: list[torch.device]) -> list[Batch]:
    return [(x.bfloat16(), y) for x, y in batches(NUM_STEPS, used[0])]


@pytest.mark.parametrize(("name", "clip_norm"), [("AdamW", None), ("SGD", 0.1)])
def test_captured_steps_of_parameters_in_bf16(capturing: Devices, name: str, clip_norm: float | None) -> None:
    # Kernels round once, torch at each operation.
    tolerance = {"rtol": 0.02, "atol": 0.02}
    check_same(capturing, name, make=lambda: Net().bfloat16(), data=in_bf16, clip_norm=clip_norm, **tolerance)


@pytest.mark.parametrize(("name", "clip_norm"), [("AdamW", 0.1), ("SGD", None)])
def test_the_default_dtype_says_nothing_about_options_and_counts(
    capturing: Devices, name: str, clip_norm: float | None
) -> None:
    used = capturing(2)
    data = in_bf16(used)
    nets = [Net().bfloat16().to(used[0]) for _ in range(2)]
    expected, usual = train(nets[0], used, data, OPTIMIZERS[name], clip_norm=clip_norm)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found, step = train(nets[1], used, data, OPTIMIZERS[name], clip_norm=clip_norm)
    finally:
        torch.set_default_dtype(torch.float32)
    assert num_graphs(step) == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert_nets_equal(nets[1], nets[0], rtol=0, atol=0)
    states = [s.optimizer.state_dict()["state"] for s in (step, usual)]
    for state, same in zip(*(found.values() for found in states)):
        assert {k: v.dtype for k, v in state.items()} == {k: v.dtype for k, v in same.items()}


def test_a_momentum_of_more_precision_than_its_parameter_keeps_it(capturing: Devices) -> None:
    used = capturing(2)
    net = nn.Linear(6, 5).to(used[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    step = everygpu.TrainStep(everygpu.DataParallel(net, used), F.cross_entropy, optimizer)
    data = batches(6, used[0])
    for x, y in data:
        step(x, y)
    net.bfloat16()
    for x, y in data:
        step(x.bfloat16(), y)
    kept = optimizer.state_dict()["state"][0]["momentum_buffer"]
    assert kept.dtype is torch.float32
    assert not kept.equal(kept.bfloat16().float())


class WideGrad(torch.autograd.Function):
    """A product whose weight has a gradient in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w, grad.float().t() @ x.float()


class WithWideGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 6).bfloat16())
        self.weight.grad_dtype = None

    def forward(self, x: Tensor) -> Tensor:
        return WideGrad.apply(x, self.weight).float()


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_of_another_dtype_are_converted(capturing: Devices, count: int) -> None:
    check_same(capturing, count=count, make=WithWideGrad, data=in_bf16, rtol=0.03, atol=0.03)


def test_gradients_that_must_have_another_dtype_are_refused(devices: Devices) -> None:
    used = devices(2)
    net = WithWideGrad().to(used[0])
    net.weight.grad_dtype = torch.float32
    message = "grad_dtype=torch.float32. Set its grad_dtype to torch.bfloat16"
    with pytest.raises(OptimizerError, match=message):
        train(net, used, [], OPTIMIZERS["SGD"])
    net.weight.grad_dtype = torch.bfloat16
    _, step = train(net, used, in_bf16(used)[:2], OPTIMIZERS["SGD"])
    net.weight.grad_dtype = torch.float32
    with pytest.raises(OptimizerError, match=message):
        step(*in_bf16(used)[0])


@pytest.mark.parametrize("capture", [False, "auto"])
def test_amsgrad_that_is_loaded_counts(capturing: Devices, capture: Any) -> None:
    used = capturing(2)
    data = batches(20, used[0])
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).to(used[0])
    ours = copy.deepcopy(plain)
    earlier = torch.optim.AdamW(plain.parameters(), lr=0.01, amsgrad=True)
    F.cross_entropy(plain(data[0][0]), data[0][1]).backward()
    earlier.step()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01)
    step = everygpu.TrainStep(everygpu.DataParallel(ours, used), F.cross_entropy, optimizer, capture=capture)
    for x, y in data[:8]:
        step(x, y)
    ours.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(earlier.state_dict()))
    for x, y in data[8:]:
        earlier.zero_grad()
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        earlier.step()
        torch.testing.assert_close(step(x, y), loss.detach(), rtol=1e-4, atol=1e-5)
    kept, expected = optimizer.state_dict()["state"][0], earlier.state_dict()["state"][0]
    torch.testing.assert_close(kept["max_exp_avg_sq"].cpu(), expected["max_exp_avg_sq"].cpu())


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_rate_that_becomes_a_tensor_is_read_at_every_step(capturing: Devices, name: str) -> None:
    used = capturing(2)
    losses = []
    for as_tensor in (False, True):
        net = Net().to(used[0])
        optimizer = OPTIMIZERS[name]([p for p in net.parameters() if p.requires_grad])
        step = everygpu.TrainStep(everygpu.DataParallel(net, used), F.cross_entropy, optimizer)
        (group,) = optimizer.param_groups
        for i, (x, y) in enumerate(batches(20, used[0])):
            if i == 8 and as_tensor:
                group |= {"lr": torch.tensor(group["lr"]), "foreach": False}
            if i >= 8:
                group["lr"] *= 0.5  # in place
            losses.append(step(x, y).item())
    assert losses[20:] == pytest.approx(losses[:20], rel=1e-3, abs=1e-4)


class Branching(Net):
    """Of small batches it uses only a part of itself."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.norm(h).tanh() if len(x) > 4 else h.tanh())


def test_the_norm_is_that_of_the_parameters_that_take_part(
    capturing: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr("everygpu.parallel.buckets.UPDATE_BYTES", 1)

    def data(used: list[torch.device]) -> list[Batch]:
        pairs = zip(batches(16, used[0]), batches(16, used[0], rows=6, ignore=False))
        return [batch for pair in pairs for batch in pair]

    check_same(capturing, make=Branching, data=data, num=2, clip_norm=0.1)


@once
@pytest.mark.parametrize("count", [1, 3])
def test_dropout_draws_the_same_numbers(capturing: Devices, count: int) -> None:
    used = capturing(count)
    data = batches(16, used[0])
    found = []
    for capture in (False, "auto"):
        everygpu.seed_all(3)
        net = Net(dropout=0.5).to(used[0])
        losses, step = train(net, used, data, OPTIMIZERS["SGD"], capture=capture)
        found.append((losses, torch.rand(2, device=used[-1]).cpu()))
    assert num_graphs(step) == 1
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-6)
    assert found[1][1].equal(found[0][1]), "the generators have gone as far"


@once
def test_a_new_seed_counts(capturing: Devices) -> None:
    used = capturing(2)
    x, y = batches(1, used[0])[0]
    net = Net(dropout=0.5).to(used[0])
    step = everygpu.TrainStep(
        everygpu.DataParallel(net, used), F.cross_entropy, torch.optim.SGD(net.parameters(), lr=0.0)
    )
    for _ in range(8):
        step(x, y)
    assert num_graphs(step) == 1
    net.norm.reset_running_stats()
    losses = []
    for _ in range(3):
        everygpu.seed_all(7)
        losses.append(step(x, y).item())
    assert losses[0] == losses[1] == losses[2]
    assert step(x, y).item() != losses[0]


def test_schedulers_loaded_weights_and_evaluations_in_between(capturing: Devices) -> None:
    used = capturing(2)
    data = batches(34, used[0])
    results = []
    for capture in (False, "auto"):
        net = Net().to(used[0])
        start = copy.deepcopy(net.state_dict())
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
        step = everygpu.TrainStep(everygpu.DataParallel(net, used), F.cross_entropy, optimizer, capture=capture)
        losses = []
        for i, (x, y) in enumerate(data):
            losses.append(step(x, y).item())
            schedule.step()
            if i % 8 == 0:
                losses.append(step.evaluate(x, y).loss.item())
            if i == 12:
                net.load_state_dict(start)
            if i == 15:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if i == 18:
                with torch.no_grad():
                    net.frozen.mul_(0.5)
                    net.last.weight.mul_(0.5)
            if i == 24:
                net.eval()
        results.append(losses)
    assert num_graphs(step) == 1
    torch.testing.assert_close(torch.tensor(results[1]), torch.tensor(results[0]), rtol=1e-4, atol=1e-5)


@once
def test_batches_of_other_shapes_and_places(capturing: Devices) -> None:
    def data(used: list[torch.device]) -> list[Batch]:
        found = [b for i in range(8) for b in (batches(1, used[0])[0], batches(1, torch.device("cpu"))[0])]
        found += [b for _ in range(8) for b in (batches(1, used[0], 10)[0], batches(1, used[0], 5)[0])]
        return found + list(everygpu.Feeder(batches(8, torch.device("cpu")), used))

    check_same(capturing, data=data, num=3)


@once
def test_capture_while_batches_are_on_their_way(capturing: Devices) -> None:
    used = capturing(4)
    home, rows = torch.device("cpu"), 4096
    nets = [Net().to(used[0]) for _ in range(2)]
    plain, _ = train(nets[0], used, batches(10, home, rows), OPTIMIZERS["SGD"], capture=False)
    fed = everygpu.Feeder(batches(10, home, rows), used)
    captured, step = train(nets[1], used, fed, OPTIMIZERS["SGD"])
    assert num_graphs(step) == 1
    torch.testing.assert_close(captured, plain, rtol=1e-4, atol=1e-5)
