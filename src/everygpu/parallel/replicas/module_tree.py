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

_tables_of = operator.attrgetter("_parameters", "_buffers")
_children_of = operator.attrgetter("_modules")
_getters = [
    operator.attrgetter(name)
    for name in ("dtype", "shape", "requires_grad", "device", "_backward_hooks", "_post_accumulate_grad_hooks")
]


class ModuleTree:
    """The modules of a tree and the tensors in them.

    Attributes:
        modules: The tree's modules, the root first, each once.
        tensors: Its parameters and buffers, each once however often it is tied.
        order: For each place that can hold a tensor, the index into ``tensors``; None for an empty place.
    """

    def __init__(self, root: nn.Module) -> None:
        self.modules = list(root.modules())
        self._children = _flatten(_children(self.modules))
        self._contents = _flatten(_tensor_tables(self.modules))
        self.tensors = _unique(self._contents.values)
        self.order = _indices(self._contents.values, self.tensors)
        self._metas = _metas(self.tensors)

    def is_same(self) -> bool:
        """Tell whether the tree holds the identical modules and tensors, whatever their properties."""
        return self._has_same_children() and _is_same(_flatten(_tensor_tables(self.modules)), self._contents)

    def is_current(self) -> bool:
        """Tell whether the tree has the same arrangement; adopt new tensors that fit in place of old ones."""
        if not self._has_same_children():
            return False
        contents = _flatten(_tensor_tables(self.modules))
        if not _is_same(contents, self._contents):
            tensors = _unique(contents.values)
            if not _has_same_keys(contents, self._contents) or _indices(contents.values, tensors) != self.order:
                return False
            self._contents, self.tensors = contents, tensors
        return _metas(self.tensors) == self._metas

    def _has_same_children(self) -> bool:
        return _is_same(_flatten(_children(self.modules)), self._children)

    def places(self, modules: Sequence[nn.Module]) -> list[tuple[Table, str]]:
        """List the places of another tree of the same arrangement, in the order of ``order``."""
        pairs = zip(_tensor_tables(modules), self._contents.lengths)
        return list(zip((table for table, length in pairs for _ in range(length)), self._contents.keys))


def is_dense(t: Tensor) -> bool:
    """Tell whether a tensor has memory and strides, as a plain one has."""
    return t.layout == torch.strided and type(t.data) is Tensor and not t.is_quantized


def has_hooks(t: Tensor) -> bool:
    """Tell whether a tensor has gradient hooks, which must receive the sum over all replicas."""
    return bool(t._backward_hooks or t._post_accumulate_grad_hooks)


class _Flat(NamedTuple):
    """Tables one after another."""

    lengths: list[int]
    """Of each table."""
    keys: list[str]
    values: list[Any]


def _flatten(tables: Sequence[Table]) -> _Flat:
    chain = itertools.chain.from_iterable
    return _Flat(list(map(len, tables)), list(chain(tables)), list(chain(map(dict.values, tables))))


def _has_same_keys(now: _Flat, before: _Flat) -> bool:
    return now.lengths == before.lengths and now.keys == before.keys


def _is_same(now: _Flat, before: _Flat) -> bool:
    """Tell whether tables have identical values in the same places; runs in every step."""
    return _has_same_keys(now, before) and all(map(operator.is_, now.values, before.values))


def _tensor_tables(modules: Sequence[nn.Module]) -> list[Table]:
    return list(itertools.chain.from_iterable(map(_tables_of, modules)))


def _children(modules: Sequence[nn.Module]) -> list[Table]:
    return list(map(_children_of, modules))


def _unique(contents: Sequence[Tensor | None]) -> list[Tensor]:
    return list({id(t): t for t in contents if t is not None}.values())


def _indices(contents: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> list[int | None]:
    index = {id(t): i for i, t in enumerate(tensors)}
    return [None if t is None else index[id(t)] for t in contents]


def _metas(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """Return the properties of tensors that their copies depend on, one list for each: it runs in every step."""
    strided = [t for t in tensors if t.layout is torch.strided]
    *plain, hooks, late_hooks = (list(map(get, tensors)) for get in _getters)
    return [
        *plain,
        [isinstance(t, nn.Parameter) for t in tensors],
        [bool(a or b) for a, b in zip(hooks, late_hooks)],
        list(map(Tensor.stride, strided)),
        list(map(Tensor.storage_offset, strided)),
    ]


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
