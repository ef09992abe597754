"""Random programs of several wrapped models: called often or never, chained, frozen, with parameters used outside."""

import contextlib
import copy
import random

import pytest
import torch
from torch import nn

import everygpu
from everygpu.ranks.group import init_group
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.usefixtures("warm_python")

SIZE = 5


class Tower(nn.Module):
    """Has a parameter that forward doesn't use."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return nn.functional.normalize(self.inner(x) + 1, dim=1)


class Experts(Tower):
    """Uses one layer for some rows only, so that a rank may not use it at all."""

    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        h = torch.tanh(self.inner(x))
        (chosen,) = torch.where(x[:, 0] > 0.8)
        return h.index_add(0, chosen, self.expert(h[chosen])) if len(chosen) else h


class Rotary(Tower):
    """Needs a buffer in backward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.linspace(0.5, 1.5, SIZE))

    def forward(self, x):
        return torch.tanh(self.inner(x) * self.angles)


class Normed(Tower):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(SIZE)

    def forward(self, x):
        return torch.tanh(self.norm(self.inner(x)))


class Pair(Tower):
    """Returns a second tensor that no parameter is needed for."""

    def forward(self, x):
        return {"h": torch.sigmoid(self.inner(x)), "more": [x * 2, "text"]}


KINDS = (Tower, Experts, Rotary, Normed, Pair)


class Program:
    """What one seed says: models, and what is done with them in each step, alike on all ranks."""

    def __init__(self, seed, num_ranks, num_devices):
        draw = random.Random(seed)
        # With several devices in a rank, independent layers may go backward in another order, which is an error.
        kinds = [kind for kind in KINDS if kind is not Normed or num_devices == 1]
        self.kinds = [draw.choice(kinds) for _ in range(draw.randint(1, 3))]
        self.frozen = [draw.random() < 0.15 for _ in self.kinds]
        self.shared = draw.random() < 0.2
        if self.shared:  # else a rank's output may take no gradient at all
            self.frozen[:2] = [False] * len(self.frozen[:2])
        self.steps = []
        for _ in range(2):
            self.steps.append([self.backward(draw, num_ranks) for _ in range(draw.randint(1, 3))])
        trained = [i for i, is_frozen in enumerate(self.frozen) if not is_frozen]
        for step in self.steps:  # the last backward averages what is held
            step[-1]["held"] = False
            step[-1]["terms"] += [("mean", i, 0, 0) for i in trained[:1]]

    def backward(self, draw, num_ranks):
        rows = [[draw.choice((0, 1, 2, 2, 3)) for _ in range(num_ranks)] for _ in range(3)]
        if draw.random() < 0.4:
            rows = [[2] * num_ranks] * 3
        for row in rows:
            row[0] = max(row[0], 2)  # one batch of the whole is never empty
        pick = lambda: draw.randrange(len(self.kinds))  # noqa: E731
        kinds = ("mean", "mean", "product", "chain", "weight", "penalty", "detached", "unused", "passed on", "in place")
        terms = [(draw.choice(kinds), pick(), pick(), draw.randrange(3)) for _ in range(draw.randint(1, 3))]
        return {
            "terms": [("mean", pick(), pick(), 0), *terms],
            "rows": rows,
            "held": draw.random() < 0.3,
            "dropped": draw.random() < 0.15,
            "data": draw.randrange(1 << 30),
        }


def make_models(program, seed):
    torch.manual_seed(seed)
    models = [kind() for kind in program.kinds]
    if program.shared and len(models) > 1:
        models[1].inner = models[0].inner
    for model, is_frozen in zip(models, program.frozen):
        if is_frozen:
            model.requires_grad_(False)
    return models


def main_output(found):
    return found["h"] if isinstance(found, dict) else found


def batches_of(backward):
    generator = torch.Generator().manual_seed(backward["data"])
    return [torch.randn(sum(rows), SIZE, generator=generator) for rows in backward["rows"]]


def loss_of(terms, models, bare, batches, mean):
    """The sum of the terms' means; parameters that are used outside of a forward are those of ``bare``."""
    total = 0.0
    for kind, i, k, b in terms:
        x, a, second = batches[b], models[i], models[k]
        is_normed = isinstance(bare[i], Normed) or isinstance(bare[k], Normed)
        if kind == "mean":
            total = total + mean(main_output(a(x)).square().sum(1), b)
        elif kind == "product":
            both = (main_output(a(x)) * main_output(second(x))).sum(1)
            total = total + mean((both * bare[i].scale.exp() - 1).square(), b)
        elif kind == "chain":
            total = total + mean(main_output(second(main_output(a(x)))).square().sum(1), b)
        elif kind == "weight":
            total = total + bare[i].scale.square()
        elif kind == "penalty" and not is_normed:
            x = x.clone().requires_grad_()
            (g,) = torch.autograd.grad(main_output(a(x)).sum(), x, create_graph=True)
            total = total + mean(g.square().sum(1), b)
        elif kind == "detached":
            total = total + mean(main_output(second(main_output(a(x)).detach())).square().sum(1), b)
        elif kind == "unused":
            a(x)
        elif kind == "passed on":
            found = a(x.clone().requires_grad_())
            total = total + mean((found["more"][0] if isinstance(found, dict) else found).square().sum(1), b)
        elif kind == "in place":
            found = main_output(a(x))
            if not isinstance(bare[i], (Rotary, Normed, Pair, Experts)):  # whose backward needs the output
                found = found.mul_(2)
            total = total + mean(found.sum(1).square(), b)
    return total


def reached_by(terms):
    """The models to whose outputs or parameters the backward of these terms comes."""
    found = set()
    for kind, i, k, _ in terms:
        if kind not in ("unused", "penalty"):  # a penalty is left out of some
            found |= {i, k} if kind in ("product", "chain") else {k if kind == "detached" else i}
    return found


def expect(program, backward, models, rank_of):
    """Go backward on one device: each forward's rows count equally; what is used outside counts by ranks."""
    batches = batches_of(backward)
    num_ranks = len(backward["rows"][0])
    outside = copy.deepcopy(models)
    for model in outside:
        model.zero_grad()
    frozen = [copy.deepcopy(m).requires_grad_(False) for m in models]
    state = [copy.deepcopy(m.state_dict()) for m in models]
    whole = lambda values, b: values.mean()  # noqa: E731
    loss = loss_of(backward["terms"], models, frozen, batches, whole)
    if loss.requires_grad:
        loss.backward()
    after = [copy.deepcopy(m.state_dict()) for m in models]
    for model, values in zip(frozen, state):
        model.load_state_dict(values)

    def by_ranks(values, b):
        parts = values.split(backward["rows"][b])
        return sum(part.sum() / max(len(part), 1) for part in parts) / num_ranks

    loss = loss_of(backward["terms"], frozen, outside, batches, by_ranks)
    if loss.requires_grad:
        loss.backward()
    for model, other, values in zip(models, outside, after):
        model.load_state_dict(values)
        if other.scale.grad is not None and model.scale.requires_grad:
            model.scale.grad = other.scale.grad if model.scale.grad is None else model.scale.grad + other.scale.grad


def check(seed, num_devices):
    """Return what differs from one device, and from rank 0."""
    group = init_group()
    program = Program(seed, group.size, num_devices)
    bare = make_models(program, seed)
    own = make_models(program, seed + group.rank)  # wrapped, they start with rank 0's values
    own = [everygpu.SyncBatchNorm.convert(m) for m in own]
    wrapped = [everygpu.DataParallel(m, ["cpu"] * num_devices) for m in own]
    params = [[p for m in models for p in m.parameters() if p.requires_grad] for models in (bare, own)]
    optimizers = [torch.optim.SGD(list(dict.fromkeys(p)), lr=0.1) if p else None for p in params]
    found = []
    for step in program.steps:
        for backward in step:
            expect(program, backward, bare, group.rank)
            mine = [x.split(r)[group.rank] for x, r in zip(batches_of(backward), backward["rows"])]
            with contextlib.ExitStack() as stack:
                for model in wrapped if backward["held"] else ():
                    stack.enter_context(model.no_sync())
                mean = lambda values, _: values.sum() / max(len(values), 1)  # noqa: E731
                loss = loss_of(backward["terms"], wrapped, own, mine, mean)
                if loss.requires_grad:
                    loss.backward()
            if backward["dropped"] and backward["held"]:
                for model in (*bare, *own):
                    model.zero_grad()
            # Held gradients wait for a backward that comes to a parameter.
            if not backward["held"] and any(not program.frozen[i] for i in reached_by(backward["terms"])):
                found += differences(bare, own)
        for optimizer in optimizers:
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    values = [t.tolist() for m in own for t in m.state_dict().values()]
    if group.broadcast_object(values) != values:
        found.append("ranks differ")
    return found


def differences(bare, own):
    found = []
    for i, (one, several) in enumerate(zip(bare, own)):
        for (name, p), q in zip(one.named_parameters(), several.parameters()):
            a, b = (torch.zeros_like(t) if t.grad is None else t.grad for t in (p, q))
            if not torch.allclose(a, b, rtol=1e-9, atol=1e-9):
                found.append(f"{i}.{name}: {(a - b).abs().max().item():.1e} of {a.abs().max().item():.1e}")
    return found


def check_all(seeds, num_devices):
    torch.set_default_dtype(torch.float64)
    found = {}
    for seed in seeds:
        print("program", seed, flush=True)
        if lines := check(seed, num_devices):
            found[seed] = lines
    return found


CASES = [
    (2, 1, range(12)),
    (2, 2, range(40, 46)),
    *(pytest.param(n, d, range(250), marks=pytest.mark.slow) for n in (2, 3) for d in (1, 2)),
]


@pytest.mark.parametrize(("size", "num_devices", "seeds"), CASES)
def test_programs_of_several_models(tmp_path, size, num_devices, seeds):
    found = run_ranks(check_all, seeds, num_devices, size=size, folder=tmp_path)
    assert found == [{}] * size, found
