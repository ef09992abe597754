"""The kernels against the stock optimizers, on CPU replicas under Triton's interpreter; run by test_fused.py."""

import itertools
import sys

import torch
import triton.language as tl
from torch import nn
from triton.runtime import interpreter

from everygpu import ShardedOptimizer
from everygpu.parallel.buckets import sizes
from everygpu.step.early_update import EarlyUpdate
from everygpu.step.flat_parameters import FlatParameters
from everygpu.step.fused import FusedUpdate, has_kernel
from everygpu.step.kernels import blocks
from everygpu.step.rules.table import find_rule
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
DTYPES = (torch.float32, torch.bfloat16)


def groups(params):
    return [{"params": params[:3]}, {"params": params[3:], "lr": 0.02}]


def make(name, dtype):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape).bfloat16().to(dtype)) for shape in SHAPES]
    return params, OPTIMIZERS[name](groups(params))


def draw(shape, dtype):
    """Draw a gradient; in bfloat16 one whose sums over a few devices need no rounding."""
    grad = torch.randn(shape, dtype=torch.float32)
    return grad if dtype is torch.float32 else ((grad * 8).round() / 8).to(dtype)


@torch.no_grad()
def step_plainly(stock, dtype):
    """Update in float32, and round once what is kept in another dtype."""
    stock.step()
    kept = [state.get(key) for state in stock.state.values() for key in state if key != "step"]
    for t in [p for group in stock.param_groups for p in group["params"]] + kept:
        if t is not None:
            t.copy_(t.to(dtype))


def assert_alike(actual, expected, what=""):
    if actual.dtype is torch.bfloat16:  # the last bit in float32 decides how it is rounded, once in a while
        expected = expected.bfloat16()
        assert (actual == expected).float().mean() > 0.99, what
        torch.testing.assert_close(actual, expected, rtol=0, atol=2**-6, msg=lambda m: f"{what}: {m}")
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, msg=lambda m: f"{what}: {m}")


def check(name, num_devices, dtype, how):
    plain, stock = make(name, torch.float32)
    params, optimizer = make(name, dtype)
    flat_params = FlatParameters(params, [torch.device("cpu")] * num_devices)
    sharded = ShardedOptimizer(optimizer, flat_params.devices)

    def new_shards():
        shards = Shards(
            optimizer,
            params,
            flat_params.plans,
            flat_params.chunks(flat_params.values),
            flat_params.chunks(flat_params.grads),
        )
        sharded.attach(params, shards)
        return shards

    shards = new_shards()
    assert has_kernel(optimizer, flat_params)
    assert len(flat_params.plans) > 1
    fused = FusedUpdate(optimizer, find_rule(optimizer), flat_params, shards)
    for step in range(8):
        # A parameter takes no part at times; the rate changes; a state is loaded; the stock optimizers step too.
        touched = set(range(len(params))) - ({step % 3} if step > 1 else set())
        for group in (*stock.param_groups, *optimizer.param_groups):
            group["lr"] *= 0.9
        flat_params.begin()
        for i, p in enumerate(plain):
            parts = [draw(p.shape, dtype) for _ in range(num_devices)]
            p.grad = 0.5 * sum(parts).float() if i in touched else None
            for slots, part in zip(flat_params._grad_slots, parts):
                slots[i].copy_(part if i in touched else torch.zeros(p.shape))
        step_plainly(stock, dtype)
        if step == 3 and dtype is torch.float32:  # by torch's own optimizers, which round others more often
            flat_params.reduce()
            for bucket in flat_params.grads:
                for flat in bucket:
                    flat.mul_(0.5)
            with torch.no_grad():
                shards.step(optimizer.param_groups, touched)
            flat_params.all_gather_params()
        else:
            if how == "on sums":
                flat_params.reduce()
                fused.run_on_sums(touched, factor=0.5)
            else:
                fused.run(touched, factor=0.5, losses=torch.ones(()) if how == "checked" else None)
        if step == 5:
            optimizer.load_state_dict(optimizer.state_dict())
        for i, (p, q) in enumerate(zip(params, plain)):
            assert_alike(p, q, f"{name} step {step} {i}")
        for first, *others in flat_params.values:
            assert all(other.equal(first) for other in others), "replicas differ"
    ours, theirs = optimizer.state_dict()["state"], stock.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for index, state in theirs.items():
        assert state.keys() == ours[index].keys(), (state.keys(), ours[index].keys())
        for key, value in state.items():
            if value is not None:
                assert_alike(ours[index][key], value, f"{name} {index} {key}")


def set_grads(tensors, step):
    """Gradients as a backward leaves them: memory of their own, one laid out in another way, some missing."""
    for i, t in enumerate(tensors):
        grad = draw(t.shape, t.dtype)
        t.grad = grad.T.contiguous().T if i == 3 else grad
        if i == 4 and step % 2:
            t.grad = None


def check_in_place(name, num_devices, dtype, clip_norm):
    """Gradients read where they are, as in recorded steps: with and without clipping, which adds them up first."""
    plain, stock = make(name, torch.float32)
    params, optimizer = make(name, dtype)
    flat_params = FlatParameters(params, [torch.device("cpu")] * num_devices)
    shards = Shards(
        optimizer,
        params,
        flat_params.plans,
        flat_params.chunks(flat_params.values),
        flat_params.chunks(flat_params.grads),
    )
    ShardedOptimizer(optimizer, flat_params.devices).attach(params, shards)
    fused = FusedUpdate(optimizer, find_rule(optimizer), flat_params, shards)
    for step in range(4):
        touched = {i for i in range(len(params)) if not (i == 4 and step % 2 and num_devices == 1)}
        update = EarlyUpdate(flat_params, fused, touched, beside=clip_norm is None)
        with update.watching():
            set_grads(flat_params.params, step)
            for twins in flat_params.twins:
                set_grads(twins, step=0)
            for i, q in enumerate(plain):
                found = [
                    t.grad
                    for t in (flat_params.params[i], *(twins[i] for twins in flat_params.twins))
                    if t.grad is not None
                ]
                q.grad = sum(found).float() if found else None
        held = update._sources._grads  # a recording's memory stays where it is; here it must be kept
        assert update.touched() == touched
        update.write_tables()
        update.rows.follow(fused.prepare(touched))
        chunks = list(itertools.product(range(len(flat_params.plans)), range(num_devices)))
        for b, rank in chunks:
            (update._update if clip_norm is None else update._reduce)(b, rank)
        if clip_norm is not None:
            norm = fused.update_from_sums(update.rows, clip_norm=clip_norm, is_checked=False)
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain, clip_norm))
        del held
        fused.finish(touched)
        step_plainly(stock, dtype)
        for i, (p, q) in enumerate(zip(params, plain)):
            assert_alike(p, q, f"{name} step {step} {i}")
        for first, *others in flat_params.values:
            assert all(other.equal(first) for other in others), "replicas differ"


def rounding_to_nearest(convert):
    """Round to bfloat16 as GPUs do, where the interpreter cuts off."""

    def rounded(data, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        return torch.from_numpy(data).bfloat16().view(torch.uint16).numpy()

    return rounded


if __name__ == "__main__":
    interpreter._convert_float = rounding_to_nearest(interpreter._convert_float)
    sizes.UPDATE_BYTES = 4096  # several buckets
    blocks.num_programs = lambda num_blocks, device, num_away: 1 + num_away  # each has several blocks, as on GPUs
    for name, num_devices, dtype in itertools.product(OPTIMIZERS, (1, 2, 3), DTYPES):
        for how in ("at once", "checked", "on sums"):
            check(name, num_devices, dtype, how)
        for clip_norm in (None, 0.1, 1e9):
            check_in_place(name, num_devices, dtype, clip_norm)
        print(name, num_devices, dtype, "as torch")
    sys.stdout.flush()
