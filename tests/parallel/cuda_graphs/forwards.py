"""Models whose forwards are captured, and how they are compared with what threads give."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import everygpu
from everygpu.parallel.cuda_graphs.batch_kinds import NUM_WARM_UPS
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


class OwnLoss(nn.Module):
    """Is called with labels and returns its loss, as language models do: the next token is each one's class."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.tokens(x).cumsum(1))
        labels = labels.clone()
        labels[:, -1] = 3
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].reshape(-1))


def check_own_loss(net: OwnLoss, learn: Callable[[Tensor], Tensor], device: torch.device) -> None:
    """Train in steps of ``SGD(lr=0.5)``, and one device beside it; losses and parameters must be equal."""
    plain = copy.deepcopy(net)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(NUM_STEPS):
        x = torch.randint(7, (6, 5)).to(device)
        optimizer.zero_grad()
        expected = plain(x, x)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(learn(x).detach(), expected.detach())
    torch.testing.assert_close(list(net.parameters()), list(plain.parameters()))


def make_batches(num: int, rows: int = 12) -> list[tuple[Tensor, Tensor]]:
    return test_capture.batches(num, torch.device("cpu"), rows, ignore=False)


def num_graphs(model: everygpu.DataParallel) -> int:
    engine = getattr(model._engine, "_captured", model._engine)  # "auto" has one
    recorder = getattr(engine, "captured_forward", None)
    return 0 if recorder is None else len(recorder.capture._graphs)


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


def check(capturing: Devices, scenario: Scenario, *, make: Any = Net, count: int = 2, **options: Any) -> None:
    """Go through a scenario with threads and with captures; everything must be equal."""
    used = capturing(count)
    results = []
    for engine in ("threads", "capture"):
        torch.manual_seed(0)
        net = make().to(used[0])
        model = everygpu.DataParallel(net, used, engine=engine, **options)
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
        found: list[Tensor] = []
        train(model, optimizer, found)
        assert num_graphs(model) == (engine == "capture")
        scenario(model, optimizer, found)
        results.append((found, copy.deepcopy(net.state_dict()), [p.grad is None for p in net.parameters()]))
    (plain, values, missing), (captured, ours, ours_missing) = results
    assert len(plain) == len(captured)
    for a, b in zip(captured, plain):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for name, value in values.items():
        # Threads add up in bfloat16, kernels in float32.
        rtol, atol = (0.02, 0.02) if value.dtype is torch.bfloat16 else (1e-3, 1e-4)
        torch.testing.assert_close(ours[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    assert ours_missing == missing


def captured(capturing: Devices, make: Any = Net, count: int = 2, num: int = 1) -> everygpu.DataParallel:
    """Make a model, and go through so many steps that it is captured."""
    used = capturing(count)
    model = everygpu.DataParallel(make().to(used[0]), used, engine="capture")
    for x, y in make_batches(NUM_STEPS):
        loss_of(model(x), y).backward()
    assert num_graphs(model) == num
    return model


def check_grads(capturing: Devices, make: Any, *, num: int | None = 1, warm_ups: int = 0) -> everygpu.DataParallel:
    """Compare the gradients that captures, of which there are to be so many, and threads give."""
    used = capturing(2)
    found = []
    for engine in ("threads", "capture"):
        net = make().to(used[0])
        model = everygpu.DataParallel(net, used, engine=engine)
        for x, _ in make_batches(warm_ups):
            model(x)
        for x, y in make_batches(NUM_STEPS):
            net.zero_grad()
            loss_of(model(x), y).backward()
        found.append([p.grad.to_dense().cpu() for p in net.parameters() if p.grad is not None])
    assert num is None or num_graphs(model) == num
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    return model


def fail(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")
