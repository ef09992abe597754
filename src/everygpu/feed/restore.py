"""Restore the model, optimizer and generators after trial steps."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from everygpu import tree
from everygpu.checkpoint.rng import rng_states_kept


@contextmanager
def restored(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Put back parameters, buffers, gradients, training flags, the optimizer's state and all random generators.

    Copies wait on the CPU meanwhile, so that the GPUs' memory is the steps' own. The tensors stay the same
    objects, for optimizers and others refer to them; buffers that a step has replaced are the old ones again.

    Args:
        model: Any module.
        optimizer: Of its parameters.
    """
    tensors = [*model.parameters(), *model.buffers()]
    values = [_on_host(t) for t in tensors]
    grads = [(t.grad, _on_host(t.grad)) if t.is_leaf and t.grad is not None else None for t in tensors]
    flags = [(module, module.training) for module in model.modules()]
    buffers = [(module, name, t) for module in model.modules() for name, t in module._buffers.items()]
    put_optimizer_back = None if optimizer is None else _save_optimizer(optimizer)
    with restored_generators():
        try:
            yield
        finally:
            _put_back(tensors, values, grads)
            for module, is_training in flags:
                module.training = is_training
            for module, name, t in buffers:
                if getattr(module, name) is not t:
                    setattr(module, name, t)
            if put_optimizer_back is not None:
                put_optimizer_back()


@contextmanager
def restored_generators(*others: torch.Generator) -> Iterator[None]:
    """Put back the random generators of Python, NumPy and torch, on every device, and some others."""
    states = [generator.get_state() for generator in others]
    with rng_states_kept():
        try:
            yield
        finally:
            for generator, state in zip(others, states):
                generator.set_state(state)


def _on_host(t: Tensor) -> Tensor:
    return t.detach().to("cpu", copy=True)


def _put_back(tensors: list[Tensor], values: list[Tensor], grads: list[tuple[Tensor, Tensor] | None]) -> None:
    with torch.no_grad():
        for t, value, grad in zip(tensors, values, grads):
            t.copy_(value)
            if t.is_leaf:
                t.grad = None if grad is None else grad[0].copy_(grad[1])


def _save_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a call that puts an optimizer back to where it is."""
    stock = getattr(optimizer, "module", optimizer)
    if not stock._optimizer_state_dict_pre_hooks:
        return _SavedState(optimizer).put_back
    # Its state is elsewhere, as ShardedOptimizer's is on all devices, and brought together by these hooks.
    state = tree.map_leaves(lambda x: _on_host(x) if isinstance(x, Tensor) else x, optimizer.state_dict())
    return lambda: optimizer.load_state_dict(state)


class _SavedState:
    """An optimizer's state: its tensors, their values, and everything else."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {p: tree.map_leaves(lambda leaf: leaf, known) for p, known in optimizer.state.items()}
        self._groups = [{k: copy.copy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        everything = [*self._state.values(), *({**g, "params": None} for g in optimizer.param_groups)]
        tensors = [leaf for _, leaf in tree.leaves(everything, "") if isinstance(leaf, Tensor)]
        self._values = [(t, _on_host(t)) for t in tensors]

    def put_back(self) -> None:
        with torch.no_grad():
            for t, value in self._values:
                t.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, saved in zip(self._optimizer.param_groups, self._groups):
            group.update(saved)
