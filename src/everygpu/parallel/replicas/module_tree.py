"""The places of parameters and buffers in a module tree, and checks of the module to replicate."""

import itertools
import logging
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import DataParallel as TorchDataParallel
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from everygpu.devices.p2p import trusted_peers
from everygpu.errors import ModuleError, PlacementError

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
        """Whether the tree holds the identical modules and tensors, whatever their properties."""
        return self._read_children().is_same(self._children) and self._read_tensors().is_same(self._contents)

    def is_current(self) -> bool:
        """Whether the tree has the same arrangement; adopt new tensors that fit in place of old ones."""
        contents = self._read_tensors()
        if not self._read_children().is_same(self._children) or contents[:2] != self._contents[:2]:
            return False
        if not contents.is_same(self._contents):
            tensors, order = _sort(contents.values)
            if order != self.order:
                return False
            self.tensors = tensors
            self._contents = contents  # last: an interruption has it done again
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
        """Whether tables have identical values in the same places."""
        return self[:2] == before[:2] and all(map(operator.is_, self.values, before.values))


def _flatten(tables: Sequence[Table]) -> _Flat:
    filled = list(filter(None, tables))  # most are empty
    return _Flat(list(map(len, tables)), list(_chain(filled)), list(_chain(map(dict.values, filled))))


def modules_of(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """List the modules of some trees, each once: in less than half the time of ``Module.modules``."""
    found: dict[int, nn.Module] = {}
    left: list[nn.Module | None] = list(roots)
    while left:
        module = left.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            left += module._modules.values()
    return list(found.values())


def is_dense(t: Tensor) -> bool:
    """Whether a tensor has memory and strides, as a plain one has."""
    return t.layout == torch.strided and type(t.data) is Tensor and not t.is_quantized


def has_hooks(t: Tensor) -> bool:
    """Whether a tensor has gradient hooks, which must receive the sum over all replicas."""
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


# By name: the modules that define them take long to import.
_DISTRIBUTED = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})

logger = logging.getLogger("everygpu")


def without_wrappers(module: Any, caller: str) -> Any:
    """Unwrap a module that is wrapped already, as in a notebook cell that is run again."""
    while isinstance(module, TorchDataParallel) or getattr(type(module), "wraps_a_module", False):
        kind = f"{type(module).__module__.partition('.')[0]}'s {type(module).__qualname__}"
        logger.warning("%s: taking the module out of %s; options that were given there don't count.", caller, kind)
        module = module.module
    return module


def check_module(module: Any, caller: str) -> None:
    """Refuse a module that can't be replicated with a ModuleError."""
    if isinstance(module, torch.optim.Optimizer):
        raise ModuleError(
            f"{caller}: needs a torch.nn.Module, got the optimizer {type(module).__name__}. Wrap the model, and "
            f"build the optimizer from model.parameters() as usual."
        )
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise ModuleError(
            f"{caller}: needs a module, got the class {module.__name__}. Call it: {module.__name__}(...)."
        )
    if not isinstance(module, nn.Module):
        raise ModuleError(
            f"{caller}: needs a torch.nn.Module, got {type(module).__name__}. "
            f"Put a function into the forward of an nn.Module."
        )
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise ModuleError(
                f"{caller}: a TorchScript module can't be replicated, got one at {name or 'the top'!r}. "
                f"Wrap the eager module it was made from."
            )
        kinds = {k.__qualname__ for k in type(child).__mro__ if k.__module__.startswith("torch.")} & _DISTRIBUTED
        if kinds:
            raise ModuleError(
                f"{caller}: a module that works with other processes can't be replicated, got {kinds.pop()} at "
                f"{name or 'the top'!r}. Pass the module without it; it takes a training loop of its own."
            )


def place_module(module: nn.Module, device: torch.device, caller: str, *, strict: bool = False) -> None:
    """Move all parameters and buffers to one device together, if they are elsewhere."""
    found: dict[torch.device, str] = {}
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if isinstance(tensor, UninitializedTensorMixin):
            raise ModuleError(
                f"{caller}: parameters need a shape, got the lazy {name!r}. Run one batch through the module first."
            )
        found.setdefault(tensor.device, name)
    if len(found) > 1:
        (first, a), (second, b) = list(found.items())[:2]
        raise PlacementError(
            f"{caller}: the module must be on one device, got {a!r} on {first} and {b!r} on {second}. "
            f"Move it with module.to({str(device)!r})."
        )
    elsewhere = next((d for d in found if d != device), None)
    if elsewhere is None:
        return
    if strict:
        raise PlacementError(
            f"module must have its parameters and buffers on device {device} (device_ids[0]) but found one of them "
            f"on device: {elsewhere}"
        )
    logger.info("%s: moving the module from %s to %s", caller, elsewhere, device)
    if not trusted_peers((elsewhere, device)):
        module.to("cpu")
    module.to(device)
