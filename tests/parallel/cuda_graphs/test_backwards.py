"""``engine="capture"``: a replay goes backward once, from the outputs that were used before; else it says so."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import everygpu
from everygpu.errors import CaptureError
from tests.parallel.cuda_graphs.forwards import NUM_STEPS, Devices, check_grads, loss_of, make_batches, num_graphs


class Pair(nn.Module):
    """Returns two heads' outputs, and the first one's loss beside them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.actor, self.critic = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x).tanh()
        actions = self.actor(h).tanh()
        return actions, self.critic(h).tanh(), actions.square().mean(1)


def both(actions: Tensor, values: Tensor, loss: Tensor) -> None:
    (loss.mean() + 0.1 * actions.mean() + values.mean()).backward()


def one(actions: Tensor, values: Tensor, loss: Tensor) -> None:
    loss.mean().backward()


def twice(actions: Tensor, values: Tensor, loss: Tensor) -> None:
    loss.mean().backward(retain_graph=True)
    values.mean().backward()


def again(actions: Tensor, values: Tensor, loss: Tensor) -> None:
    loss.mean().backward(retain_graph=True)
    loss.mean().backward()


def kept(actions: Tensor, values: Tensor, loss: Tensor) -> None:
    loss.mean().backward(retain_graph=True)


def differentiable(actions: Tensor, values: Tensor, loss: Tensor) -> None:
    loss.mean().backward(create_graph=True)


def train(model: Any, backward: Any, num: int, device: torch.device) -> list[Tensor]:
    found = []
    for x, _ in make_batches(num):
        model.zero_grad()
        backward(*model(x.to(device)))
        found += [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad.detach()
    return found


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    ("backward", "is_captured"),
    [(both, True), (one, True), (kept, True), (twice, False), (again, False), (differentiable, False)],
)
def test_steps_are_those_of_one_device(capturing: Devices, backward: Any, is_captured: bool) -> None:
    used = capturing(2)
    model = everygpu.DataParallel(Pair().to(used[0]), used, engine="capture")
    found, expected = (train(m, backward, NUM_STEPS, used[0]) for m in (model, Pair().to(used[0])))
    assert num_graphs(model) == is_captured
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    ("later", "reason"),
    [
        (both, "begin at other outputs from step to step"),
        (again, "gone backward through twice"),
        (differentiable, "differentiated again"),
    ],
)
def test_another_backward_later_is_refused_and_then_runs_in_threads(
    capturing: Devices, later: Any, reason: str
) -> None:
    used = capturing(2)
    model = everygpu.DataParallel(Pair().to(used[0]), used, engine="capture")
    train(model, one, NUM_STEPS, used[0])
    assert num_graphs(model) == 1
    with pytest.raises(CaptureError, match=reason):
        train(model, later, 1, used[0])
    bare = Pair().to(used[0])
    bare.load_state_dict(model.state_dict())
    found, expected = (train(m, later, NUM_STEPS, used[0]) for m in (model, bare))
    assert num_graphs(model) == 0
    assert model.engine_in_use == "threads"
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_batched_gradients_are_refused(capturing: Devices) -> None:
    used = capturing(2)
    model = everygpu.DataParallel(Pair().to(used[0]), used, engine="capture")
    train(model, one, NUM_STEPS, used[0])
    x = make_batches(1)[0][0].to(used[0])
    with pytest.raises(CaptureError, match="engine='threads'"):
        torch.autograd.grad(model(x)[2], list(model.module.first.parameters()), torch.randn(3, len(x), device=used[0]),
                            is_grads_batched=True)  # fmt: skip


class Writing(Pair):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.mul_(2))


def test_a_forward_that_writes_to_its_input_is_not_captured(capturing: Devices, caplog: Any) -> None:
    used = capturing(2)
    model = everygpu.DataParallel(Writing().to(used[0]), used, engine="capture")
    found, expected = (train(m, one, NUM_STEPS, used[0]) for m in (model, Writing().to(used[0])))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert num_graphs(model) == 0
    assert "the batch is written to" in caplog.text


class Checkpointed(nn.Module):
    """Runs a norm again in backward, which changes its buffers once more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = checkpoint(
            lambda h: self.norm(h).tanh(), self.first(x), use_reentrant=False, preserve_rng_state=False
        )
        out: Tensor = self.last(h)
        return out


def test_a_checkpoint_runs_again_in_backward_alone(capturing: Devices) -> None:
    model = check_grads(capturing, Checkpointed)
    threads = everygpu.DataParallel(Checkpointed().to(model.src_device_obj), model.replica_devices, engine="threads")
    for x, y in make_batches(NUM_STEPS):
        loss_of(threads(x), y).backward()
    torch.testing.assert_close(list(model.buffers()), list(threads.buffers()), rtol=1e-4, atol=1e-5)
