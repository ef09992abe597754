"""Hooks and patched forwards in replicas."""

import functools
import os
import types
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import everygpu
from tests.parallel.oracle import TOLERANCE, Mlp, assert_same, pair, rows

pytestmark = pytest.mark.usefixtures("in_threads")


class Hooked(nn.Module):
    """Has hooks that are methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.tensor([1.5, 2.0, 3.0]))
        self.kept = {}
        self.lin.register_forward_hook(self.amplify)
        self.lin.register_forward_pre_hook(self.shift, with_kwargs=True)

    def shift(self, module, args, kwargs):
        assert module is self.lin
        self.kept["input"] = args[0].detach()
        return (args[0] + self.gain,), kwargs

    def amplify(self, module, args, output):
        assert module is self.lin
        return output * self.gain

    def forward(self, x):
        out = self.lin(x)
        return out + self.kept["input"].sum(1, keepdim=True)


def test_hooks_that_are_methods_belong_to_their_replica(devices):
    devs = devices(3)
    model, bare = pair(Hooked, devs)
    for step in range(3):
        assert_same(model, bare, rows(7, 3, device=devs[0], seed=step).requires_grad_())


def test_hooks_are_called_once_per_replica(devices):
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    before, after = [], []
    see_before, see_after = before.append, after.append
    handles = [
        model.module.first.register_forward_pre_hook(lambda m, args: see_before(m)),
        model.module.first.register_forward_hook(lambda m, args, out: see_after(m)),
        model.module.register_forward_hook(lambda m, args, out: out * 2),
    ]
    x = rows(7, 3, device=devs[0])
    torch.testing.assert_close(model(x), bare(x) * 2)
    for seen in (before, after):
        assert len(seen) == len({id(m) for m in seen}) == len(devs)
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(model(x), bare(x))
    assert len(before) == len(after) == len(devs), "a removed hook is gone in all replicas"


def test_hooks_write_into_what_they_close_over(devices):
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    features, by_size = [], {}

    def record(module, args, out):
        features.append(out.detach())
        by_size.setdefault("rows", []).append((len(out), module))

    for m in (model.module, bare):
        m.first.register_forward_hook(record)
    x = rows(7, 3, device=devs[0])
    for step in range(1, 3):
        model(x)
        assert len(features) == len(by_size["rows"]) == step * len(devs)
    parts = sorted((f.to(devs[0]) for f in features[-len(devs) :]), key=lambda f: -len(f))
    assert sum(map(len, parts)) == len(bare.first(x)) == 7


def test_hooks_registered_inside_forward_stay_in_their_replica(devices):
    devs = devices(3)

    class Tapping(Mlp):
        def forward(self, x):
            taps = []
            handle = self.first.register_forward_hook(lambda m, args, out: taps.append(out))
            out = super().forward(x)
            handle.remove()
            return out, len(taps), taps[0]

    model, bare = pair(Tapping, devs)
    for step in range(3):
        x = rows(7, 3, device=devs[0], seed=step)
        out, expected = model(x), bare(x)
        torch.testing.assert_close(out, expected)
        assert out[1] == 1
    assert not model.module.first._forward_hooks


def test_user_dicts_are_copied(devices):
    devs = devices(3)

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = {"deep": {"list": []}}

        def forward(self, x):
            self.cache["x"] = x
            self.cache["deep"]["list"].append(x)
            return self.cache["x"] + self.cache["deep"]["list"][-1], len(self.cache["deep"]["list"])

    model = everygpu.DataParallel(Caching(), devs)
    for step in range(1, 4):
        x = rows(7, 3, device=devs[0], seed=step)
        out, entries = model(x)
        torch.testing.assert_close(out, 2 * x)
        assert entries == step
    assert len(model.cache["deep"]["list"]) == 3


def test_full_backward_hooks(devices):
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    seen = []
    see = seen.append

    def double(module, grad_input, grad_output):
        see((id(module), grad_output[0].shape[0]))
        return tuple(None if g is None else g * 2 for g in grad_input)

    for m in (model.module, bare):
        m.second.register_full_backward_hook(double)
        m.first.register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] * 3,))
        m.register_full_backward_hook(double)
    x = rows(7, 3, device=devs[0]).requires_grad_()
    assert_same(model, bare, x)
    ours = [entry for entry in seen if entry[0] not in (id(bare), id(bare.second))]
    assert len(ours) == 2 * len(devs)
    assert len(set(ours)) == 2 * len(devs), "each on its own replica"
    assert sum(size for _, size in ours) == 2 * 7


def test_hooks_on_parameters_see_the_whole_gradient_once(devices):
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    seen, accumulated = [], []
    for m in (model.module, bare):
        m.first.weight.register_hook(lambda g: seen.append(g.clone()) or g * 2)
        m.first.weight.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.grad.clone()))
    assert_same(model, bare, rows(7, 3, device=devs[0]))
    assert len(seen) == len(accumulated) == 2
    torch.testing.assert_close(*seen)
    torch.testing.assert_close(*accumulated)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_a_parameter_that_takes_no_part_are_not_called(devices, when):
    class Idle(Mlp):
        def __init__(self):
            super().__init__()
            self.idle = nn.Parameter(torch.ones(3))

    devs = devices(3)
    model, _ = pair(Idle, devs)
    x = rows(6, 3, device=devs[0])
    called = []
    if when == "after":
        model(x).sum().backward()
    model.module.idle.register_hook(called.append)
    model.module.idle.register_post_accumulate_grad_hook(called.append)
    model(x).sum().backward()
    assert not called
    assert model.module.idle.grad is None


def test_global_hooks(devices):
    devs = devices(3)
    calls = []
    model, _ = pair(Mlp, devs)
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, args, out: calls.append(m) if isinstance(m, nn.Linear) else None
    )
    try:
        model(rows(7, 3, device=devs[0]))
    finally:
        handle.remove()
    assert len({id(m) for m in calls}) == 2 * len(devs)


def note(path, owner):
    """Write down which object of which process this is."""
    with path.open("a") as file:
        file.write(f"{os.getpid()} {id(owner)}\n")


def as_method(m, see):
    def forward(self, x):
        see(self)
        return self.second(self.first(x))

    m.forward = types.MethodType(forward, m)


def as_partial(m, see):
    def forward(self, x, scale):
        see(self)
        return self.second(self.first(x)) * scale

    m.forward = functools.partial(forward, m, scale=2)


def as_closure(m, see):
    old = m.forward

    def forward(x):
        see(old.__self__)
        return old(x) * 2

    m.forward = forward


def as_default_argument(m, see):
    def forward(x, old=m.forward, *, second=m.second):
        see(old.__self__)
        see(second)
        return old(x) * 2

    m.forward = forward


def as_wraps(m, see):
    old = m.forward

    @functools.wraps(old)
    def forward(*args, **kwargs):
        see(old.__self__)
        return old(*args, **kwargs) * 2

    m.forward = forward


def as_wrapped_attribute(m, see):
    """As accelerate does it: update_wrapper around a partial, the old forward found again by name."""

    def new_forward(module, *args, **kwargs):
        see(module)
        see(module.forward.__wrapped__.__self__)
        return module._old_forward(*args, **kwargs) * 2

    m._old_forward = m.forward
    m.forward = functools.update_wrapper(functools.partial(new_forward, m), m._old_forward)


def as_wraps_found_by_name(m, see):
    @functools.wraps(m.forward)
    def forward(x):
        see(m.forward.__wrapped__.__self__)
        return m.forward.__wrapped__(x) * 2

    m.forward = forward


def on_submodule(m, see):
    old = m.first.forward

    def forward(x):
        see(m)
        return old(x) + m.second.weight.sum()

    m.first.forward = forward


@pytest.mark.parametrize(
    "patch",
    [
        as_method,
        as_partial,
        as_closure,
        as_default_argument,
        as_wraps,
        as_wrapped_attribute,
        as_wraps_found_by_name,
        on_submodule,
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after the first call"])
def test_patched_forward_runs_on_its_replica(devices, patch, late, tmp_path):
    devs = devices(3)
    model, bare = pair(Mlp, devs)
    x = rows(7, 3, device=devs[0])
    if late:
        model(x)
    for m, name in ((model.module, "ours"), (bare, "theirs")):
        patch(m, functools.partial(note, tmp_path / name))
    assert_same(model, bare, x)
    # Replicas' calls come in any order.
    ours, theirs = (Counter((tmp_path / name).read_text().splitlines()) for name in ("ours", "theirs"))
    assert sorted(ours.values()) == sorted([*theirs.values()] * len(devs)), "each replica runs on itself"


class Checkpointed(Mlp):
    def __init__(self, use_reentrant) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_hooks_on_parameters_in_checkpoints(devices, use_reentrant):
    """A reentrant checkpoint runs a backward of its own for each replica; the others have one for all."""
    devs = devices(3)
    model, bare = pair(lambda: Checkpointed(use_reentrant), devs)
    seen, accumulated = [], []
    model.module.second.weight.register_hook(lambda grad: seen.append(grad.clone()))
    model.module.second.weight.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.grad.clone()))
    assert_same(model, bare, rows(7, 3, device=devs[0]))
    whole = bare.second.weight.grad
    assert len(seen) == len(accumulated) == (len(devs) if use_reentrant else 1)
    torch.testing.assert_close(sum(seen), whole, **TOLERANCE)
    torch.testing.assert_close(accumulated[-1], whole, **TOLERANCE)
