"""A replica of a module tree, and updates of its Python state from the original's.

A replica is built once. Before each forward its plain attributes (flags, containers, hooks, patched methods)
are updated from the original's, so it behaves as a copy made at that moment would.
"""

import copy
import operator
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from everygpu import comm, tree
from everygpu.keys import compiled_original
from everygpu.parallel.replicas.callables import open_callable, rebind_function
from everygpu.parallel.replicas.contents import is_constant
from everygpu.parallel.replicas.watch import TABLES, Watch


class ReplicaModule:
    """One replica of a module tree.

    Args:
        modules: The original's modules, the root first, each once.
        device: Where the replica lives.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._originals = modules
        self._device = device
        self.modules = [_blank_copy(m) for m in modules]
        self._replica_of = {id(m): replica for m, replica in zip(modules, self.modules)}
        for original in modules:
            # torch.compile's wrapper calls the module that it was made from.
            inner = compiled_original(original)
            if inner is not None:
                self._replica_of[id(original)] = self._replica_of[id(inner)]
        for original, replica in zip(modules, self.modules):
            children = {k: None if c is None else self._replica_of[id(c)] for k, c in original._modules.items()}
            replica._modules.update(children)
        # Changes that forward makes to a replica's attributes are undone before the next.
        self._watch = Watch(self.modules)
        self._stale = set(range(len(modules)))

    @property
    def root(self) -> nn.Module:
        """The replica of the whole model."""
        return self._replica_of[id(self._originals[0])]

    def expire(self, indices: Iterable[int]) -> None:
        """Mark these modules as changed in the original, and those that have changed in the replica."""
        self._stale.update(indices, self._watch.changed())

    def release(self) -> None:
        """Drop the attributes that ``update`` will set, and the tensors in them."""
        for index in self._stale:
            replica = vars(self.modules[index])
            for name in [k for k in replica if k not in TABLES]:
                del replica[name]

    def update(self, tensors: Mapping[int, Tensor]) -> None:
        """Update the plain attributes of changed modules.

        Args:
            tensors: From ``id`` of each of the original's parameters and buffers to the replica's.
        """
        remapper = _AttributeRemapper(self._replica_of, tensors, self._device)
        for index in self._stale:
            original, replica = self._originals[index], self.modules[index]
            tables = {name: vars(replica)[name] for name in TABLES}
            attributes = {k: remapper.remap(v) for k, v in vars(original).items() if k not in tables}
            vars(replica).clear()
            vars(replica).update(tables | attributes)
            if type(replica) is not type(original):
                object.__setattr__(replica, "__class__", type(original))
        self._watch.accept(self._stale)
        self._stale.clear()


class _AttributeRemapper:
    """Maps values of the original to the replica's."""

    def __init__(
        self, replica_of: Mapping[int, nn.Module], tensors: Mapping[int, Tensor], device: torch.device
    ) -> None:
        self._replica_of = replica_of
        self._tensors = tensors
        self._device = device
        self._done: dict[int, Any] = {}
        self._in_progress: set[int] = set()

    def remap(self, value: Any) -> Any:
        """Map an attribute: containers are copied, so that replicas don't write into each other's."""
        if is_constant(value):
            return value
        if isinstance(value, Tensor) and id(value) not in self._tensors:
            return self._copy_tensor(value)
        if not isinstance(value, (dict, list, tuple, set, frozenset)):
            return self.remap_reference(value)
        if id(value) in self._in_progress:  # a container that contains itself
            return value
        self._in_progress.add(id(value))
        try:
            return self._container(value)
        finally:
            self._in_progress.discard(id(value))

    def remap_reference(self, value: Any) -> Any:
        """Map a function's referent if it is part of the module tree; everything else stays shared."""
        if isinstance(value, nn.Module):
            return self._replica_of.get(id(value), value)
        if isinstance(value, Tensor):
            return self._tensors.get(id(value), value)
        if id(value) in self._done:
            return self._done[id(value)]
        if isinstance(value, types.FunctionType):
            return rebind_function(value, self.remap_reference, self._done)
        # Lists and dicts are the caller's own, for hooks to write into.
        opened = tree.open_container(value) if isinstance(value, tuple) else open_callable(value)
        if opened is None:
            return value
        self._done[id(value)] = value
        parts = [self.remap_reference(part) for part in opened.children]
        if not all(map(operator.is_, parts, opened.children)):
            self._done[id(value)] = opened.rebuild(parts)
        return self._done[id(value)]

    def _container(self, value: Any) -> Any:
        if isinstance(value, (set, frozenset)):
            plain = type(value) in (set, frozenset)
            return type(value)(map(self.remap, value)) if plain else copy.copy(value)
        opened = tree.open_container(value)
        if opened is None:
            return value
        children = [self.remap(child) for child in opened.children]
        if isinstance(value, tuple) and all(map(operator.is_, children, opened.children)):
            return value
        return opened.rebuild(children)

    def _copy_tensor(self, x: Tensor) -> Tensor:
        """Copy a plain tensor attribute to the replica's device; one on the CPU stays there, as in the original."""
        if x.device.type == "cpu" and self._device.type != "cpu":
            return x
        return comm.copy(x, self._device, fresh=not x.requires_grad)


def _blank_copy(original: nn.Module) -> nn.Module:
    # Not type(original)(): the constructor's arguments are unknown. Not copy.copy: classes may define it.
    replica: nn.Module = object.__new__(type(original))
    vars(replica).update({name: {} for name in TABLES})
    return replica
