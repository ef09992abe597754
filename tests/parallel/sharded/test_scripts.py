"""Training loops written for one device run unmodified on batches of shards."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import everygpu
from tests.parallel.batches import CPU, numbers
from tests.parallel.oracle import TOLERANCE, Mlp, rows

REPLICAS = ["cpu"] * 3


class Outputs(nn.Module):
    """Returns things of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Mlp()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.calls += 1
        out = self.net(x)
        return {"out": out, "input": x, "scale": self.scale, "calls": self.calls.expand(len(x), 2), "list": [out * 2]}


class TinyGpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.table(tokens)))


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    bare = make().double()
    return everygpu.DataParallel(copy.deepcopy(bare), REPLICAS), bare


def trained(model: nn.Module, batches: list[Any], loss_of: Callable[..., Any]) -> tuple[list[float], list[Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    for batch in batches:
        loss, *numbers_seen = loss_of(model, *batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += [loss.item(), *numbers_seen]
    return losses, list(model.parameters())


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    loss = nn.CrossEntropyLoss()(out, y)
    return loss, (out.argmax(1) == y).sum().item(), (out.topk(1)[1].squeeze(1) == y).float().mean().item()


def next_token(model: nn.Module, tokens: Tensor) -> Any:
    logits = model(tokens[:, :-1])
    return (F.cross_entropy(logits.view(-1, 11), tokens[:, 1:].reshape(-1)),)


def shifted(model: nn.Module, tokens: Tensor) -> Any:
    logits = model(tokens)
    shift_logits, shift_labels = logits[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return (nn.CrossEntropyLoss()(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1)),)


def segment(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    smooth = 1 - (out.softmax(1) * F.one_hot(y.clamp(min=0), 5).permute(0, 3, 1, 2)).sum((0, 2, 3)).mean() / y.numel()
    pixels = (out.argmax(dim=1) == y)[y != -100].float().mean().item()
    return F.cross_entropy(out, y, ignore_index=-100) + smooth, pixels


def by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    logp = out.log_softmax(-1)
    picked = logp.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    focal = -((1 - picked.exp()) ** 2 * picked).mean()
    out.retain_grad()
    return focal + 0.1 * out.pow(2).mean() + F.l1_loss(
        out, torch.zeros_like(out)
    ), out.detach().cpu().numpy().mean().item()


def smoothed(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    loss = F.cross_entropy(model(x), y, label_smoothing=0.1, weight=numbers(2))
    loss /= 2
    return (loss,)


def vectors(num_rows: int) -> tuple[Tensor, Tensor]:
    return rows(num_rows, 3, device=CPU, seed=num_rows), torch.arange(num_rows) % 2


def pictures(num_rows: int) -> tuple[Tensor, Tensor]:
    y = torch.arange(num_rows * 16).view(num_rows, 4, 4) % 5
    y[:2] = -100
    return rows(num_rows, 3, 4, 4, device=CPU), y


def tokens(num_rows: int) -> tuple[Tensor]:
    return (torch.arange(num_rows * 6).view(num_rows, 6) * 7 % 11,)


LOOPS = [
    (Mlp, vectors, classify),
    (Mlp, vectors, by_hand),
    (Mlp, vectors, smoothed),
    (TinyGpt, tokens, next_token),
    (TinyGpt, tokens, shifted),
    (Segmenter, pictures, segment),
]


class TestScripts:
    @pytest.mark.parametrize(("make", "batch", "loss_of"), LOOPS, ids=lambda v: v.__name__)
    def test_a_training_loop_equals_one_device(self, make: Any, batch: Any, loss_of: Any) -> None:
        model, bare = pair(make)
        batches = [batch(n) for n in (10, 7, 4, 10)]
        torch.testing.assert_close(trained(model, batches, loss_of), trained(bare, batches, loss_of), **TOLERANCE)

    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
    def test_outputs_keep_what_was_returned(self, mode: Any) -> None:
        """Inputs, parameters and buffers that a module returned may be written before the output is read."""
        model, _ = pair(Outputs)
        x = rows(7, 3, device=CPU)
        with mode():
            out = model(x)
            expected = {k: everygpu.parallel.gather(model(x)[k]).clone() for k in ("input", "scale")}
            with torch.no_grad():
                model.module.scale.add_(1)
                x.zero_()
                model.module.calls.add_(5)
        for name, value in expected.items():
            assert torch.equal(everygpu.parallel.gather(out[name]), value)
        assert everygpu.parallel.gather(out["calls"]).unique().numel() == 1
