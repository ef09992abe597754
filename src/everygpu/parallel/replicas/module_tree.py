"""The places of parameters and buffers in a module tree."""

import itertools
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from everygpu.parallel.replicas.snapshot import Contents

Table = dict[str, Any]
"""A module's ``_parameters`` or ``_buffers``."""

_chain = itertools.chain.from_iterable
_tables_of = operator.attrgetter("_parameters", "_buffers")
_children_of = operator.attrgetter("_modules")
_getters = [operator.attrgetter(name) for name in ("dtype", "shape", "requires_grad", "is_leaf", "device")]
_hooks = [operator.attrgetter(name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]


class ModuleTree:
    """The modules of a tree and the tensors in them.

    Attributes:
        modules: The tree's modules, the root first, each once.
        tensors: Its parameters and buffers, each once however often it is tied.
        order: For each place that can hold a tensor, the index into ``tensors``; None for an empty place.
    """

    def __init__(self, root: nn.Module) -> None:
        self.modules = list(root.modules())
        self._children = Contents(list(map(_children_of, self.modules)), [], [])
        self._keys, self._values = self._read()
        self.tensors, self.order = _sort(self._values)
        self._metas = _metas(self.tensors)

    def is_same(self) -> bool:
        """Tell whether the tree holds the identical modules and tensors, whatever their properties."""
        keys, values = self._read()
        return self._children.is_same() and keys == self._keys and all(map(operator.is_, values, self._values))

    def is_current(self) -> bool:
        """Tell whether the tree has the same arrangement; adopt new tensors that fit in place of old ones."""
        keys, values = self._read()
        if not self._children.is_same() or keys != self._keys:
            return False
        if not all(map(operator.is_, values, self._values)):
            tensors, order = _sort(values)
            if order != self.order:
                return False
            self._values, self.tensors = values, tensors
        return _metas(self.tensors) == self._metas

    def places(self, modules: Sequence[nn.Module]) -> list[tuple[Table, str]]:
        """List the places of another tree of the same arrangement, in the order of ``order``."""
        lengths, names = self._keys
        tables = itertools.chain.from_iterable(map(itertools.repeat, _chain(map(_tables_of, modules)), lengths))
        return list(zip(tables, names))

    def _read(self) -> tuple[tuple[list[int], list[str]], list[Any]]:
        """Return the tables' lengths and keys, and their values, one table after another; runs in every step."""
        tables = list(_chain(map(_tables_of, self.modules)))
        return (list(map(len, tables)), list(_chain(tables))), list(_chain(map(dict.values, tables)))


def is_dense(t: Tensor) -> bool:
    """Tell whether a tensor has memory and strides, as a plain one has."""
    return t.layout == torch.strided and type(t.data) is Tensor and not t.is_quantized


def has_hooks(t: Tensor) -> bool:
    """Tell whether a tensor has gradient hooks, which must receive the sum over all replicas."""
    return bool(t._backward_hooks or t._post_accumulate_grad_hooks)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to eval mode; afterwards each module is as it was."""
    training = [m for m in model.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True


def _sort(values: Sequence[Tensor | None]) -> tuple[list[Tensor], list[int | None]]:
    """Return each tensor once, and the index of that in each place."""
    tensors = list({id(t): t for t in values if t is not None}.values())
    index = {id(t): i for i, t in enumerate(tensors)}
    return tensors, [None if t is None else index[id(t)] for t in values]


def _metas(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """Return the properties of tensors that their copies depend on, one list for each: it runs in every step."""
    strided = [t for t in tensors if t.layout is torch.strided]
    hooks, late_hooks = (list(map(get, tensors)) for get in _hooks)
    return [
        *(list(map(get, tensors)) for get in _getters),
        [isinstance(t, nn.Parameter) for t in tensors],
        [bool(a or b) for a, b in zip(hooks, late_hooks)],
        list(map(Tensor.stride, strided)),
        list(map(Tensor.storage_offset, strided)),
    ]
