"""Small models trained by one device, and by ranks that share them out."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import everygpu
from everygpu.parallel.fully_sharded.shards import full_tensor, is_shard

NUM_STEPS, VOCABULARY, WIDTH = 3, 11, 6


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 7), nn.Linear(7, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    """A transformer's shape: an embedding, blocks, a head, which may be tied; rows don't divide by ranks."""

    def __init__(self, tied=False, frozen=False, synced=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]), persistent=False)
        if synced:
            self.norm = everygpu.SyncBatchNorm(WIDTH)
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.blocks[0].requires_grad_(False)
            self.embedding.requires_grad_(False)

    def forward(self, ids):
        x = self.embedding(ids).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale.prod()


def adamw(params):
    return torch.optim.AdamW([p for p in params if p.requires_grad], lr=0.05)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@dataclass
class Case:
    """How a model is trained."""

    make: Callable[[], nn.Module] = Net
    level: str = "parameters"
    optimizer: Callable[..., torch.optim.Optimizer] = adamw
    clip: float | None = None
    accumulate: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    rows: tuple[int, ...] = (3, 2, 4, 3)
    """Of each rank in each batch."""


def batch(step, num_rows):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (num_rows, 4), generator=generator)
    return ids, torch.randint(0, VOCABULARY, (num_rows,), generator=generator)


def make(case):
    torch.manual_seed(0)
    return case.make()


def backward_in_bf16(net, ids, y):
    """Compute in a copy of that dtype, and leave gradients to the parameters in float32."""
    half = copy.deepcopy(net).to(torch.bfloat16)
    half.scale = net.scale
    half.zero_grad()
    loss = F.cross_entropy(half(ids), y)
    loss.backward()
    for p, q in zip(net.parameters(), half.parameters()):
        p.grad = q.grad.float() if p.grad is None else p.grad + q.grad
    return loss


def train_alone(case, size, *, as_step=False):
    """Train on one device; return each step's loss and norm, and the parameters."""
    net = make(case)
    optimizer = case.optimizer(net.parameters())
    found = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for part in range(case.accumulate):
            ids, y = batch(step * case.accumulate + part, sum(case.rows[:size]))
            if case.options.get("precision") == "bf16":
                loss = backward_in_bf16(net, ids, y)
            else:
                loss = F.cross_entropy(net(ids), y)
                (loss / case.accumulate if as_step else loss).backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), case.clip) if case.clip else torch.zeros(())
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found, net.state_dict()


def train_on_ranks(case, rank, size, *, as_step=False):
    """Train the same as one of several ranks; by ``TrainStep``, whose loss is that of all rows of an update's end."""
    model = everygpu.DataParallel(make(case), ["cpu"], shard=case.level, **case.options)
    optimizer = case.optimizer(model.parameters())
    train = by_step(case, model, optimizer) if as_step else by_loop(case, model, optimizer)
    mine = slice(sum(case.rows[:rank]), sum(case.rows[: rank + 1]))
    found = []
    for number in range(NUM_STEPS * case.accumulate):
        ids, y = batch(number, sum(case.rows[:size]))
        is_last = (number + 1) % case.accumulate == 0
        outcome = train(ids[mine], y[mine], is_last)
        if is_last:
            found.append(outcome)
    return found, whole_state(model)


def by_loop(case, model, optimizer):
    def train(ids, y, is_last):
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = F.cross_entropy(model(ids), y)
            loss.backward()
        if not is_last:
            return None
        norm = nn.utils.clip_grad_norm_(model.parameters(), case.clip) if case.clip else torch.zeros(())
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm.item()

    return train


def by_step(case, model, optimizer):
    step = everygpu.TrainStep(model, F.cross_entropy, optimizer, accumulate=case.accumulate, clip_norm=case.clip)

    def train(ids, y, is_last):
        return step(ids, y).item(), step.stats().grad_norm if case.clip else 0

    return train


def whole_state(model):
    """Return a state dict whole, without a share's rows."""
    return {k: full_tensor(v) if is_shard(v) else v.detach().clone() for k, v in model.state_dict().items()}
