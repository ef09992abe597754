"""What a helper needs to know of a replica: all of it once, then what changes."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from everygpu.parallel.batch_norm.layer import SyncBatchNorm
from everygpu.parallel.buckets.bucket import Bucket
from everygpu.parallel.buckets.memory import versions_of
from everygpu.parallel.buckets.plan import BucketPlan
from everygpu.parallel.cuda_graphs.guards import HOOKS
from everygpu.parallel.engines.processes.globals_sender import GlobalsSender
from everygpu.parallel.engines.processes.messages import Buckets, Members, ModuleUpdate, Packed, ParameterUpdate
from everygpu.parallel.engines.processes.packing import CannotTravelError, Names, pack
from everygpu.parallel.engines.processes.shared_tensors import Exporter, SharedTensor
from everygpu.parallel.engines.processes.used_globals import Path
from everygpu.parallel.replicas.contents import CONTAINERS, DeepContents, is_constant, is_open
from everygpu.parallel.replicas.watch import TABLES, Watch

_NUM_LOOKS = 3
"""Updates whose tensors are looked at for what they were computed from."""


class ModuleSender:
    """Finds what has changed in a replica of this process since the helper was told last.

    Args:
        module: The replica. It is a new one when the arrangement of its modules and tensors changes.
        exporter: Describes its tensors to the helper.
        direct: The tensors of each bucket, and how their gradients lie in it, where these aren't connected one by one.
        originals: The parameters of the module that this is a replica of.
    Raises:
        CannotTravelError: a layer computes with what the other replicas compute.
    """

    def __init__(
        self,
        module: nn.Module,
        exporter: Exporter,
        direct: Sequence[tuple[list[Tensor], BucketPlan]] = (),
        originals: Iterable[Tensor] = (),
    ) -> None:
        self.module = module
        self._exporter = exporter
        _check_layers(module)
        self._modules = list(module.modules())
        self._watch = Watch(self._modules)
        self._originals = list(originals)
        self._num_looks = 0
        self._places: list[tuple[dict[str, Any], str]] = [
            (t, key) for m in self._modules for t in (m._parameters, m._buffers) for key in t
        ]
        self._order = _order([table[key] for table, key in self._places])
        firsts = {index: place for place, index in reversed(list(zip(self._places, self._order))) if index is not None}
        self._firsts = [firsts[index] for index in range(len(firsts))]
        self._globals = GlobalsSender(self._modules, exporter)
        self._contents: DeepContents | None = None
        self._opaque: list[int] = []
        self._addresses: list[tuple[int, int]] = []
        self._versions: list[int] = []
        self._last: tuple[list[int], bytes] | None = None
        self._is_told = False
        self.changing: set[int] | None = None
        """Buffers that forward writes to; None before the first has returned."""
        self.has_answered = False
        """The replica has returned something, so its calls can be made in the helper."""
        self.buckets: list[Members] = []
        self.owners: list[Bucket] = []
        """Of each bucket, unless its gradients stay in the helper's memory, which is ``flats``."""
        self.flats: dict[int, tuple[SharedTensor, Tensor]] = {}
        index = {id(t): i for i, t in enumerate(self.tensors())}
        self.buckets += [([index[id(t)] for t in members], plan) for members, plan in direct]
        for members, bucket in [] if direct else members_of_buckets(self.tensors()):
            self.buckets.append((members, bucket.plan))
            self.owners.append(bucket)

    def tensors(self) -> list[Tensor]:
        """Return the replica's parameters and buffers now, each once."""
        return [table[key] for table, key in self._firsts]

    def update(self, tensors: Sequence[Tensor]) -> tuple[ModuleUpdate, list[Tensor]]:
        """Say what has changed, and take it as told.

        Args:
            tensors: As ``tensors`` returns them.
        Returns:
            The message, and tensors to be kept until the helper has read it.
        Raises:
            CannotTravelError: an attribute can't be sent; the message names it.
        """
        names = functools.cache(lambda: self._names(tensors))
        structure = None if self._is_told else self._structure(names())
        attributes, kept = self._attributes(names)
        moved, written = self._moved_and_written(tensors, names)
        buckets = None if self._is_told else Buckets(self.buckets, stay=not self.owners)
        self._is_told = True
        self._num_looks += 1
        update = ModuleUpdate(
            structure=structure, attributes=attributes, tensors=moved, written=written, buckets=buckets
        )
        return update, kept

    def update_globals(self, tensors: Sequence[Tensor], told: dict[Path, bool]) -> tuple[Packed | None, list[Tensor]]:
        """Say what has changed in variables that forward reads outside the module; see ``GlobalsSender.update``."""
        return self._globals.update(lambda: self._names(tensors), told)

    def _names(self, tensors: Sequence[Tensor]) -> Names:
        names: dict[int, tuple[str, int]] = {id(m): ("module", i) for i, m in enumerate(self._modules)}
        names.update((id(t), ("parameter", i)) for i, t in enumerate(tensors))
        return names

    @contextmanager
    def with_tensors(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Have the replica use other tensors, as ``tensors`` returned them at some time."""
        before = [table[key] for table, key in self._places]
        attributes = [dict(vars(m)) for m in self._modules]
        try:
            for (table, key), index in zip(self._places, self._order):
                table[key] = None if index is None else tensors[index]
            yield
        finally:
            for (table, key), t in zip(self._places, before):
                table[key] = t
            for m, values in zip(self._modules, attributes):
                vars(m).clear()
                vars(m).update(values)

    def _structure(self, names: Names) -> Packed:
        index = {id(m): i for i, m in enumerate(self._modules)}
        order = iter(self._order)
        rows = []
        for m in self._modules:
            children = {k: None if c is None else index[id(c)] for k, c in m._modules.items()}
            tables = [{key: next(order) for key in table} for table in (m._parameters, m._buffers)]
            rows.append((type(m), children, *tables))
        packed, _ = self._pack(rows, names, range(len(self._modules)))
        return packed

    def _attributes(self, names: Callable[[], Names]) -> tuple[Packed | None, list[Tensor]]:
        changed = self._watch.changed()
        if self._contents is None or not self._contents.is_same():
            changed = list(range(len(self._modules)))
        if changed:
            volatile = set(self._watch.volatile())
            held = [list(_held(m, i in volatile)) for i, m in enumerate(self._modules)]
            known = dict.fromkeys(names())
            self._contents = DeepContents(itertools.chain(*held), known)
            self._opaque = [i for i, values in enumerate(held) if DeepContents(values, known).is_opaque]
        changed = sorted({*changed, *self._opaque})
        if not changed:
            return None, []
        self._check_hooks(changed)
        packed, kept = self._pack([(i, *_attributes(self._modules[i])) for i in changed], names(), changed)
        if not packed.tensors and self._last == (changed, packed.data):
            return None, []
        self._last = (changed, packed.data)
        return packed, kept

    def _check_hooks(self, which: Sequence[int]) -> None:
        for m in (self._modules[i] for i in which):
            for hook in (hook for table in HOOKS for hook in getattr(m, table, {}).values()):
                if not getattr(hook, "__module__", "").startswith("torch."):
                    name = next(name for name, other in self.module.named_modules() if other is m)
                    raise CannotTravelError(f"module {name or type(m).__name__!r} has hooks, which run in this process")

    def _pack(self, value: Any, names: Names, which: Sequence[int]) -> tuple[Packed, list[Tensor]]:
        try:
            return pack(value, self._exporter, names, params=self._known_params())
        except CannotTravelError as error:
            culprit = self._name_culprit(names, which) or self._globals.find_culprit(names)
            raise CannotTravelError(culprit or str(error)) from error

    def _known_params(self) -> set[int] | None:
        """Return what kept tensors may have been computed from, in the first updates: graphs are long to walk."""
        return {*map(id, self._originals), *map(id, self.tensors())} if self._num_looks < _NUM_LOOKS else None

    def _name_culprit(self, names: Names, which: Sequence[int]) -> str | None:
        """Find the attribute that can't be sent."""
        paths = {id(m): name for name, m in self.module.named_modules()}
        for m in (self._modules[i] for i in which):
            for key, value in _attributes(m)[1].items():
                try:
                    pack(value, self._exporter, names, params=self._known_params())
                except CannotTravelError as error:
                    path = ".".join(filter(None, (paths[id(m)], key)))
                    return f"attribute {path} of type {type(value).__name__} can't be sent ({error})"
        return None

    def _moved_and_written(
        self, tensors: Sequence[Tensor], names: Callable[[], Names]
    ) -> tuple[list[ParameterUpdate], list[int]]:
        grads = [t.grad if t.is_leaf else None for t in tensors]
        addresses, versions = _addresses(tensors, grads), versions_of(tensors)
        before: Sequence[Any] = self._addresses or [None] * len(tensors)
        then = self._versions or versions
        moved = []
        if addresses != before:
            which = [i for i, (a, b) in enumerate(zip(addresses, before)) if a != b]
            moved = [self._describe(i, tensors[i], grads[i], names()) for i in which]
            addresses = _addresses(tensors, grads)  # on the CPU, what is shared for the first time moves
        told = {update.index for update in moved}
        written = [i for i, (a, b) in enumerate(zip(versions, then)) if a != b and i not in told]
        self._addresses, self._versions = addresses, versions
        return moved, written

    def _describe(self, index: int, t: Tensor, grad: Tensor | None, names: Names) -> ParameterUpdate:
        plain = t.detach().as_subclass(Tensor)
        reason = self._exporter.why_not_shared(plain)
        if reason is not None:
            raise CannotTravelError(f"a parameter or buffer is {reason}")
        return ParameterUpdate(
            index=index,
            tensor=self._exporter.describe(plain),
            grad=None if grad is None else self._exporter.describe(grad),
            requires_grad=t.requires_grad,
            is_parameter=isinstance(t, nn.Parameter),
            kind=self._pack((type(t), vars(t)), names, ())[0] if _is_own_kind(t) else None,
        )


def _check_layers(module: nn.Module) -> None:
    for name, m in module.named_modules():
        if isinstance(m, SyncBatchNorm):
            raise CannotTravelError(f"the layer {name or 'SyncBatchNorm'} normalizes over all replicas' batches")


def members_of_buckets(tensors: Sequence[Tensor]) -> list[tuple[list[int], Bucket]]:
    """Return which tensors' gradients travel together, and how: those that one node connects to the originals."""
    groups: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        if t.grad_fn is not None:
            groups.setdefault(t.grad_fn, []).append(i)
    return [(sorted(members, key=lambda i: tensors[i].output_nr), node.bucket) for node, members in groups.items()]


def _attributes(module: nn.Module) -> tuple[type, dict[str, Any]]:
    return type(module), {k: v for k, v in vars(module).items() if k not in TABLES}


def _addresses(tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[tuple[int, int]]:
    return list(zip(map(Tensor.data_ptr, tensors), [-1 if g is None else g.data_ptr() for g in grads]))


def _is_own_kind(t: Tensor) -> bool:
    return type(t) not in (Tensor, nn.Parameter) or bool(vars(t))


def _order(contents: Sequence[Tensor | None]) -> list[int | None]:
    index: dict[int, int] = {}
    return [None if t is None else index.setdefault(id(t), len(index)) for t in contents]


def _held(module: nn.Module, is_volatile: bool) -> Iterator[Any]:
    """List attributes that may hold what ``Watch`` leaves to others, such as a configuration; it sees the empty ones.

    Of a module that is told of at every call only objects are listed: kept tensors would be kept memory.
    """
    for name, value in vars(module).items():
        is_listed = is_open(value) if is_volatile else not (isinstance(value, CONTAINERS) and not value)
        if name not in TABLES and is_listed and not is_constant(value):
            yield value
