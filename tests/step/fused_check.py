"""The kernels against the stock optimizers, on CPU replicas under Triton's interpreter; run by test_fused.py."""

import itertools
import sys

import torch
from torch import nn

from everygpu import ShardedOptimizer
from everygpu.step.arena import Arena
from everygpu.step.fused import FusedUpdate, has_kernel
from everygpu.step.shards import Shards

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3, betas=(0.8, 0.999)),
    "AdamW-maximize": lambda p: torch.optim.AdamW(p, lr=0.01, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01, maximize=True),
    "SGD-nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}
SHAPES = [(3, 5), (1500,), (), (40, 60), (7,), (2048,)]


def groups(params):
    return [{"params": params[:3]}, {"params": params[3:], "lr": 0.02}]


def make(name):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    return params, OPTIMIZERS[name](groups(params))


def check(name, num_devices, *, is_reduced):
    plain, stock = make(name)
    params, optimizer = make(name)
    arena = Arena(params, [torch.device("cpu")] * num_devices)
    sharded = ShardedOptimizer(optimizer, arena.devices)

    def new_shards():
        shards = Shards(optimizer, params, arena.plans, arena.chunks(arena.values), arena.chunks(arena.grads))
        sharded.attach(params, shards)
        return shards

    shards = new_shards()
    assert has_kernel(optimizer, arena)
    fused = FusedUpdate(optimizer, arena, shards)
    for step in range(8):
        # A parameter takes no part at times; the rate changes; a state is loaded; the stock optimizers step too.
        touched = set(range(len(params))) - ({step % 3} if step > 1 else set())
        for group in (*stock.param_groups, *optimizer.param_groups):
            group["lr"] *= 0.9
        arena.begin()
        for i, p in enumerate(plain):
            parts = [torch.randn(p.shape) for _ in range(num_devices)]
            p.grad = 0.5 * sum(parts) if i in touched else None
            for slots, part in zip(arena._grad_slots, parts):
                slots[i].copy_(part if i in touched else torch.zeros(p.shape))
        stock.step()
        if step == 3:  # by torch's own optimizers
            arena.reduce()
            for bucket in arena.grads:
                for flat in bucket:
                    flat.mul_(0.5)
            with torch.no_grad():
                shards.step(optimizer.param_groups, touched)
            arena.hand_out()
        else:
            if is_reduced:
                arena.reduce()
            fused.run(touched, factor=0.5, is_reduced=is_reduced)
        if step == 5:
            optimizer.load_state_dict(optimizer.state_dict())
        for i, (p, q) in enumerate(zip(params, plain)):
            torch.testing.assert_close(
                p, q, rtol=1e-5, atol=1e-6, msg=lambda m, i=i, s=step: f"{name} step {s} {i}: {m}"
            )
        for first, *others in arena.values:
            assert all(other.equal(first) for other in others), "replicas differ"
    ours, theirs = optimizer.state_dict()["state"], stock.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for index, state in theirs.items():
        assert state.keys() == ours[index].keys(), (state.keys(), ours[index].keys())
        for key, value in state.items():
            if value is not None:
                torch.testing.assert_close(ours[index][key], value, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    for name, num_devices in itertools.product(OPTIMIZERS, (1, 2, 3)):
        for is_reduced in (False, True):
            check(name, num_devices, is_reduced=is_reduced)
        print(name, num_devices, "as torch")
    sys.stdout.flush()
