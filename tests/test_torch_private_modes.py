"""What we rely on in torch's thread-local states, and in the tensors of its transforms; see test_torch_private.py."""

import torch

from everygpu.torch_private import autograd, modes


def test_batched_tensors_are_told_from_others():
    x, seen = torch.ones(2, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda grad: seen.append(autograd.is_batched(grad)))
    y.sum().backward(retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(3, 2), is_grads_batched=True, retain_graph=True)
    torch.func.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True))(torch.ones(3, 2))
    assert seen == [False, True, True]
    assert not autograd.are_batched([None, torch.ones(1)])
    assert autograd.are_batched([]) is False


def test_torch_function_can_be_enabled_within():
    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "seen"

    x = torch.ones(1).as_subclass(Seen)
    with modes.without_torch_function():
        assert x.tanh() != "seen"
        with modes.with_torch_function():
            assert x.tanh() == "seen"
        assert x.tanh() != "seen"
