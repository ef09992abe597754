"""Hooks and patched forwards in replicas."""

import functools
import os
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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
        return self.lin(x) + self.kept["input"].sum(1, keepdim=True)


class Tapping(Mlp):
    """Registers a hook inside forward."""

    def forward(self, x):
        taps = []
        handle = self.first.register_forward_hook(lambda m, args, out: taps.append(out))
        out = super().forward(x)
        handle.remove()
        assert len(taps) == 1
        return out, taps[0]


@pytest.mark.parametrize("make", [Hooked, Tapping])
def test_hooks_of_a_model_belong_to_their_replica(devs, make):
    model, bare = pair(make, devs)
    for step in range(3):
        assert_same(model, bare, rows(7, 3, device=devs[0], seed=step).requires_grad_())
    assert make is Hooked or not model.module.first._forward_hooks


def test_hooks_are_called_once_per_replica(model, bare, x):
    before, after, everywhere, features = [], [], [], []
    handles = [
        model.module.first.register_forward_pre_hook(lambda m, args: before.append(m)),
        model.module.first.register_forward_hook(lambda m, args, out: after.append(m) or features.append(out.detach())),
        model.module.register_forward_hook(lambda m, args, out: out * 2),
        nn.modules.module.register_module_forward_hook(lambda m, args, out: everywhere.append(m)),
    ]
    try:
        torch.testing.assert_close(model(x), bare(x) * 2)
    finally:
        for handle in handles:
            handle.remove()
    for seen in (before, after):
        assert len(seen) == len({id(m) for m in seen}) == 3
    assert len([m for m in everywhere if type(m) is nn.Linear]) == 3 * 2 + 2
    assert sorted(map(len, features)) == [1, 3, 3]
    torch.testing.assert_close(model(x), bare(x))
    assert len(before) == len(after) == 3, "a removed hook is gone in all replicas"


def test_full_backward_hooks(model, bare, x):
    seen = []

    def double(module, grad_input, grad_output):
        seen.append((id(module), grad_output[0].shape[0]))
        return tuple(None if g is None else g * 2 for g in grad_input)

    for m in (model.module, bare):
        m.second.register_full_backward_hook(double)
        m.first.register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] * 3,))
        m.register_full_backward_hook(double)
    assert_same(model, bare, x.requires_grad_())
    ours = [entry for entry in seen if entry[0] not in (id(bare), id(bare.second))]
    assert len(ours) == len(set(ours)) == 2 * 3, "each on its own replica"
    assert sum(size for _, size in ours) == 2 * 7


class Checkpointed(Mlp):
    def __init__(self, use_reentrant) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=self.use_reentrant)


@pytest.mark.parametrize(
    ("make", "calls"),
    [(Mlp, 1), (lambda: Checkpointed(False), 1), (lambda: Checkpointed(True), 3)],
    ids=["plain", "checkpoint", "reentrant"],
)
def test_hooks_on_parameters_see_the_whole_gradient_once(devs, x, make, calls):
    """A reentrant checkpoint runs a backward of its own for each replica; the others have one for all."""
    model, bare = pair(make, devs)
    seen, accumulated = [], []
    model.module.second.weight.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
    bare.second.weight.register_hook(lambda grad: grad * 2)
    model.module.second.weight.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.grad.clone()))
    assert_same(model, bare, x)
    assert len(seen) == len(accumulated) == calls
    torch.testing.assert_close(sum(seen) * 2, bare.second.weight.grad, **TOLERANCE)
    torch.testing.assert_close(accumulated[-1], bare.second.weight.grad, **TOLERANCE)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_a_parameter_that_takes_no_part_are_not_called(devs, x, when):
    class Idle(Mlp):
        def __init__(self):
            super().__init__()
            self.idle = nn.Parameter(torch.ones(3))

    model, _ = pair(Idle, devs)
    called = []
    if when == "after":
        model(x).sum().backward()
    model.module.idle.register_hook(called.append)
    model.module.idle.register_post_accumulate_grad_hook(called.append)
    model(x).sum().backward()
    assert not called
    assert model.module.idle.grad is None


def note(path, owner):
    """Write down which object of which process this is."""
    with path.open("a") as file:
        file.write(f"{os.getpid()} {id(owner)}\n")


def as_partial(m, see):
    def forward(self, x, scale):
        see(self)
        return self.second(self.first(x)) * scale

    m.forward = functools.partial(forward, m, scale=2)


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


PATCHES = [as_partial, as_default_argument, as_wraps, as_wrapped_attribute, as_wraps_found_by_name, on_submodule]


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after the first call"])
def test_patched_forward_runs_on_its_replica(model, bare, x, patch, late, tmp_path):
    if late:
        model(x)
    for m, name in ((model.module, "ours"), (bare, "theirs")):
        patch(m, functools.partial(note, tmp_path / name))
    assert_same(model, bare, x)
    # Replicas' calls come in any order.
    ours, theirs = (Counter((tmp_path / name).read_text().splitlines()) for name in ("ours", "theirs"))
    assert sorted(ours.values()) == sorted([*theirs.values()] * 3), "each replica runs on itself"
