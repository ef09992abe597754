"""A helper's copy of a replica of the main process, on the same memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from everygpu.parallel.buckets.slot_alias import put_back
from everygpu.parallel.engines.processes.messages import Buckets, ModuleUpdate, Packed, ParameterUpdate
from everygpu.parallel.engines.processes.packing import unpack
from everygpu.parallel.engines.processes.shared_tensors import Importer, SharedStorage
from everygpu.parallel.replicas.watch import TABLES, Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The tensors that a replica computes with, at one time: a graph belongs to those of its forward."""

    tensors: Mapping[int, Tensor]
    """Parameters and buffers."""
    grads: Mapping[int, Tensor]
    """Where the main process has gradients added up."""
    buckets: Buckets


class ModuleReceiver:
    """Builds the module from what the main process says, and keeps it up to date.

    Args:
        importer: Opens the main process's tensors.
        on_grad: Called with a parameter when its gradient is complete in a backward.
    """

    def __init__(self, importer: Importer, on_grad: Callable[[Tensor], None]) -> None:
        self._importer = importer
        self._on_grad = on_grad
        self.modules: list[nn.Module] = []
        self.binding = Binding(tensors={}, grads={}, buckets=Buckets([], stay=False))
        self._places: list[tuple[dict[str, Any], str, int | None]] = []
        self._source: dict[int, tuple[Packed, list[Tensor]]] = {}
        self._watch = Watch([])
        self.is_renewed = False
        """Attributes were unpickled in the last update."""
        self._stale: set[int] = set()
        # The main process's memory, and the tensors that are on it unless a forward has moved them.
        self._slots: dict[int, Tensor] = {}

    def apply(self, update: ModuleUpdate) -> nn.Module:
        """Take in what has changed; return the root."""
        if update.structure is not None:
            self._build(update.structure, update.buckets or Buckets([], stay=False))
        if update.written:
            increment_version([self.binding.tensors[i] for i in update.written])
        if update.tensors:
            self._place(update.tensors)
        if update.attributes is not None:
            tensors = [self._importer.open(shared) for shared in update.attributes.tensors]
            source = (update.attributes, tensors)
            told = {index: source for index, *_ in self._unpack(*source)}
            self._source |= told
            self._stale |= told.keys()
        # Attributes that forward has changed here are put back, as in every replica.
        self._stale.update(i for i in self._watch.changed() if i in self._source)
        self._restore()
        put_back(list(self.binding.tensors.values()), [self._slots[i] for i in self.binding.tensors])
        return self.modules[0]

    def find(self, kind: str, index: int) -> Any:
        """Return what both processes have, by its name."""
        return self.modules[index] if kind == "module" else self.binding.tensors[index]

    def _build(self, structure: Packed, buckets: Buckets) -> None:
        rows = self._unpack(structure, [self._importer.open(shared) for shared in structure.tensors])
        self.modules = [object.__new__(kind) for kind, *_ in rows]
        self.binding = Binding(tensors={}, grads={}, buckets=buckets)
        self._source, self._places, self._slots = {}, [], {}
        self._watch = Watch(self.modules)
        for module, (_, children, *tables) in zip(self.modules, rows):
            found: dict[str, dict[str, Any]] = {name: {} for name in TABLES}
            found["_modules"] = {k: None if i is None else self.modules[i] for k, i in children.items()}
            for name, table in zip(("_parameters", "_buffers"), tables):
                found[name] = dict.fromkeys(table)
                self._places += [(found[name], key, index) for key, index in table.items()]
            vars(module).update(found)
        self._stale = set()

    def _place(self, moved: Sequence[ParameterUpdate]) -> None:
        tensors, grads = dict(self.binding.tensors), dict(self.binding.grads)
        storages: dict[SharedStorage, torch.UntypedStorage] = {}
        for update in moved:
            tensors[update.index] = self._open(update, storages)
            self._slots[update.index] = tensors[update.index].data
            grads.pop(update.index, None)
            if update.grad is not None:
                grads[update.index] = self._importer.open(update.grad, storages)
        self.binding = replace(self.binding, tensors=tensors, grads=grads)
        for table, key, index in self._places:
            table[key] = None if index is None else tensors[index]
        self._stale.update(self._source)  # attributes may refer to tensors that have moved
        self._watch = Watch(self.modules, tensors.values())

    def _open(self, update: ParameterUpdate, storages: dict[SharedStorage, torch.UntypedStorage]) -> Tensor:
        memory = self._importer.open(update.tensor, storages)
        t = nn.Parameter(memory, update.requires_grad) if update.is_parameter else memory
        if update.kind is not None:
            kind, attributes = self._unpack(update.kind, [])
            t.__class__ = kind
            vars(t).update(attributes)
        if update.requires_grad:
            t.requires_grad_()
            t.register_post_accumulate_grad_hook(self._on_grad)  # type: ignore[no-untyped-call]
        return t

    def _restore(self) -> None:
        self.is_renewed = bool(self._stale)
        by_source: dict[int, tuple[Packed, list[Tensor]]] = {}
        for index in self._stale:
            source = self._source[index]
            by_source[id(source)] = source
        for source in by_source.values():
            for index, kind, attributes in self._unpack(*source):
                if index in self._stale and self._source[index] is source:
                    module = self.modules[index]
                    tables = {name: vars(module)[name] for name in TABLES}
                    vars(module).clear()
                    vars(module).update(tables | attributes)
                    if type(module) is not kind:
                        object.__setattr__(module, "__class__", kind)
        self._watch.accept(self._stale)
        self._stale.clear()

    def _unpack(self, packed: Packed, tensors: list[Tensor]) -> Any:
        return unpack(packed, tensors, self.find)
