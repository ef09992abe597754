"""The places of parameters and buffers in a module tree."""

import itertools
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
        self._children = self._read_children()
        self._contents = self._read_tensors()
        self.tensors, self.order = _sort(self._contents.values)
        self._metas = _metas(self.tensors)

    def is_same(self) -> bool:
        """Tell whether the tree holds the identical modules and tensors, whatever their properties."""
        return self._read_children().is_same(self._children) and self._read_tensors().is_same(self._contents)

    def is_current(self) -> bool:
        """Tell whether the tree has the same arrangement; adopt new tensors that fit in place of old ones."""
        contents = self._read_tensors()
        if not self._read_children().is_same(self._children) or contents[:2] != self._contents[:2]:
            return False
        if not contents.is_same(self._contents):
            tensors, order = _sort(contents.values)
            if order != self.order:
                return False
            self._contents, self.tensors = contents, tensors
        return _metas(self.tensors) == self._metas

    def places(self, modules: Sequence[nn.Module]) -> list[tuple[Table, str]]:
        """List the places of another tree of the same arrangement, in the order of ``order``."""
        tables = _chain(map(itertools.repeat, _chain(map(_tables_of, modules)), self._contents.lengths))
        return list(zip(tables, self._contents.keys))

    def _read_children(self) -> "_Flat":
        return _flatten(list(map(_children_of, self.modules)))

    def _read_tensors(self) -> "_Flat":
        return _flatten(list(_chain(map(_tables_of, self.modules))))


class _Flat(NamedTuple):
    """Tables one after another: read and compared in every step."""

    lengths: list[int]
    keys: list[str]
    values: list[Any]

    def is_same(self, before: "_Flat") -> bool:
        """Tell whether tables have identical values in the same places."""
        return self[:2] == before[:2] and all(map(operator.is_, self.values, before.values))


def _flatten(tables: Sequence[Table]) -> _Flat:
    filled = list(filter(None, tables))  # most are empty
    return _Flat(list(map(len, tables)), list(_chain(filled)), list(_chain(map(dict.values, filled))))


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
