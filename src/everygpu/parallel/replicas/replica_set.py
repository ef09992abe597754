"""Persistent replicas of a module, refreshed from it before each forward."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from everygpu import comm
from everygpu.devices.parse import DeviceLike, parse_devices
from everygpu.errors import ReplicaError
from everygpu.keys import compiled_original
from everygpu.parallel.buckets import (
    REPLICA_BYTES,
    BroadcastBucket,
    broadcast_tensor,
    group_by_storage,
    group_tensors,
    is_plain,
    split_head,
)
from everygpu.parallel.replicas.module_tree import ModuleTree, check_module, has_hooks, is_dense, place_module
from everygpu.parallel.replicas.optimizer_steps import OptimizerSteps
from everygpu.parallel.replicas.remap import TABLES, Remap, in_place_of
from everygpu.parallel.replicas.snapshot import Snapshot
from everygpu.torch_private.core import cache_parametrizations_apart, caches_parametrizations, replicates_itself

ReplicaLeaves = Mapping[int, Sequence[Tensor]]

logger = logging.getLogger("everygpu")


def replicate(network: nn.Module, devices: Sequence[DeviceLike], detach: bool = False) -> list[nn.Module]:
    """Make one replica of a module on each device.

    ::

        network = nn.Linear(4, 3)
        first, second = everygpu.parallel.replicate(network, ["cpu", "cpu"])  # first is network
        (first(x[:1]).sum() + second(x[1:]).sum()).backward()  # both add to network's gradients

    Args:
        network: The module. It serves as the first replica, so its buffers and attributes are updated in place. It
            is moved to ``devices[0]`` if it is elsewhere.
        devices: As ints (CUDA indices), names or ``torch.device``.
        detach: Give the other replicas leaf parameters of their own, so that no gradients flow back to the module.
    Returns:
        One module per device, with parameters and buffers of the same shapes and dtypes. Gradients of the replicas'
        parameters are added to the module's.
    Raises:
        ModuleError: ``network`` is no module, or a class, an optimizer, a TorchScript or a distributed module.
        PlacementError: its parameters are spread over several devices.
        DeviceError: a device is unknown or absent.
    Source:
        ``torch.nn.parallel.replicate``, whose replicas have no ``parameters()``.
    """
    parsed = parse_devices(devices)
    check_module(network, "replicate")
    replicas = ReplicaSet(network, parsed).refresh(range(len(parsed)))
    for module in [m for replica in replicas[1:] for m in replica.modules()] if detach else ():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(p.detach(), p.requires_grad)
    return replicas


class ReplicaSet:
    """A module, which serves as the replica on ``devices[0]``, and its replicas on the devices after that.

    Args:
        strict_device: Refuse to move the module there.
        fixed: Keep the replicas' tensors at their addresses, for CUDA graphs.
        make_leaves: Returns leaf parameters that the caller keeps up to date: from ``id`` of an original to its
            copy on each device after the first. Called whenever the module's tree has changed. Frozen parameters
            are then sent only when torch counts a write to them, or always on the CPU, where a copy costs no more
            than a comparison.
        num_together: So many neighbours among the devices share one copy of the parameters, and one of the leaves;
            gradients are added up by a tree over all. 0 for a copy each.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        *,
        strict_device: bool = False,
        fixed: bool = False,
        make_leaves: Callable[[], ReplicaLeaves] | None = None,
        bucket_bytes: int = REPLICA_BYTES,
        num_together: int = 0,
    ) -> None:
        self.module = module
        self._num_together, self._size = num_together, max(1, num_together)
        self._own: dict[int, Tensor] = {}
        self._fixed = fixed
        self._bucket_bytes = bucket_bytes
        self._make_leaves = make_leaves
        self._devices = list(devices)
        self._strict_device = strict_device
        self._is_interrupted = False
        self._leaves: dict[int, Sequence[Tensor]] = {}
        self._build()

    def refresh(
        self, positions: Sequence[int], fresh: set[int] | None = None, rows: Sequence[int] = ()
    ) -> list[nn.Module]:
        """Bring replicas up to date with the module, and return them; their parameters are connected to the module's.

        Those in ``fresh`` are up to date while no gradients are recorded, and those refreshed are added. ``rows`` are
        of the batch for each position, to find what forward leaves of them in attributes.
        """
        if fresh is None or torch.is_grad_enabled() or not fresh.issuperset(positions):
            self._update([p - 1 for p in positions if p > 0])
            if fresh is not None and not torch.is_grad_enabled():
                fresh.update(positions)
        rows_of = dict(zip(positions, rows))
        for p, replica in enumerate(self._replicas, 1):
            replica.num_rows = rows_of.get(p, 0)
        return [self._replicas[p - 1].root if p else self.module for p in positions]

    @contextmanager
    def with_leaves(self, others: Sequence[Mapping[int, Tensor]]) -> Iterator[None]:
        """Make replicas use other leaves, those of each device by the ``id`` of what ``make_leaves`` gave."""
        before = self._leaves
        self._leaves = {i: [new.get(id(t), t) for t, new in zip(row, others)] for i, row in before.items()}
        try:
            yield
        finally:
            self._leaves = before

    def first_in_place(self) -> AbstractContextManager[None]:
        """Have the module itself use what stands for its parameters within, where gradients are added up by a tree.

        A parameter then gets one gradient, the sum: of several that come to it, autograd adds up the earliest first.
        """
        own, self._own = self._own, {}
        return in_place_of(self.module, own) if own else nullcontext()

    def position_of(self, root: nn.Module) -> int | None:
        """Return a replica's place among the devices; None if it isn't among them."""
        roots = [self.module, *(replica.root for replica in self._replicas)]
        return next((i for i, replica in enumerate(roots) if replica is root), None)

    def forget(self) -> None:
        """Send everything at the next refresh, after writes that torch doesn't count."""
        self._is_forgotten = True
        for _, bucket in self._buckets:
            bucket.forget()

    def send_forgotten(self) -> None:
        """Bring all replicas up to date if there were writes that torch doesn't count."""
        self._look_for_steps()
        if self._is_forgotten:
            self._update(range(len(self._replicas)))

    def _look_for_steps(self) -> None:
        if self._steps.have_come:
            self.forget()
            self._steps.have_come = False

    def frozen_copies(self) -> dict[int, list[Tensor]]:
        """Return each frozen parameter and its copies, by its ``id``; alone where these are out of date."""
        self._look_for_steps()
        found: dict[int, list[Tensor]] = {}
        for members, bucket in self._buckets:
            params = [self._tree.tensors[i] for i in members]
            if self._make_leaves is not None and _is_frozen(params[0]):
                found |= {id(p): [p, *copies] for p, *copies in zip(params, *bucket.current_copies(params))}
        return found

    def average_buffers(self, positions: Sequence[int], weights: Sequence[int]) -> None:
        """Set the module's float buffers to their weighted average over the replicas that ran."""
        total = sum(weights)
        trees = [self._places, *(replica.places for replica in self._replicas)]
        with torch.no_grad():
            for place in self._float_buffers if total else ():
                mine, *theirs = (trees[p][place][0][trees[p][place][1]] for p in (0, *positions))
                # Through .data, as batch_norm itself does: the version stays, so backward accepts what forward saved.
                mine.data.add_(sum(_difference(t, mine) * (w / total) for t, w in zip(theirs, weights)))

    def _update(self, others: Sequence[int]) -> None:
        if not (self._is_built and self._tree.is_current()):
            self._build()
        if caches_parametrizations():
            cache_parametrizations_apart(self._tree.modules)
        self._look_for_steps()
        was_interrupted = self._is_interrupted
        self._is_interrupted = True
        changed: Iterable[int] = self._snapshot.changed()
        if was_interrupted:  # what had changed then is no longer known
            changed = range(len(self._tree.modules))
        for replica in self._replicas:
            replica.expire(changed)
        for i in others:
            self._replicas[i].release()
        for i, tensors in zip(others, self._broadcast(others)):
            self._replicas[i].fill(tensors)
        self._is_interrupted = self._is_forgotten = False

    def _build(self) -> None:
        """Build replicas and buckets for the module's present tree."""
        place_module(self.module, self._devices[0], "DataParallel", strict=self._strict_device)
        others = self._devices[1:]
        leaves = {} if self._make_leaves is None else self._make_leaves()
        self._is_built = False  # until all is built: after an interrupt it is built again
        self._tree = ModuleTree(self.module)
        self._snapshot = Snapshot(self._tree.modules)
        self._replicas = [_Replica(self._tree, device, by_tree=self._num_together > 0) for device in others]
        tensors = self._tree.tensors
        self._places = self._tree.places(self._tree.modules)
        first = {index: place for place, index in reversed(list(enumerate(self._tree.order)))}  # a shared one once
        self._float_buffers = [first[i] for i, t in enumerate(tensors) if _is_float_buffer(t)]
        self._leaves = {i: leaves[id(t)] for i, t in enumerate(tensors) if id(t) in leaves}
        kept = list(self._leaves)
        groups = group_tensors([tensors[i] for i in kept], lambda t: t.dtype, self._bucket_bytes)
        self._leaf_groups = [[kept[k] for k in members] for members in groups]
        sent = [i for i, t in enumerate(tensors) if id(t) not in leaves]
        self._unbucketed = [i for i in sent if not is_dense(tensors[i])]
        flat = [i for i in sent if is_dense(tensors[i])]
        frozen = [i for i in flat if self._make_leaves is not None and _is_frozen(tensors[i])]
        trusted = trusts_versions(self._devices)
        self._steps = OptimizerSteps(tensors[i] for i in frozen if trusted)
        self._is_interrupted = self._is_forgotten = False
        # A bucket each: a node whose backward computes other parameters' gradients calls a hook without a gradient,
        # and continues into the graph of a buffer that an earlier forward has computed.
        single = [[i] for i in flat if tensors[i].requires_grad and (has_hooks(tensors[i]) or not tensors[i].is_leaf)]
        alone = {*frozen, *(i for (i,) in single)}
        self._buckets: list[tuple[list[int], BroadcastBucket]] = []
        rest = [i for i in flat if i not in alone]
        # A buffer is each replica's own: forward writes it.
        shared = [i for i in rest if self._num_together and isinstance(tensors[i], nn.Parameter)]
        own = [i for i in rest if i not in set(shared)]
        for which in (frozen, *single, shared, own):
            for members, together in group_by_storage(tensors, which, self._bucket_bytes):
                bucket = BroadcastBucket(
                    [tensors[i] for i in members],
                    self._devices[0],
                    others if which is own else self._devices[self._size :: self._size],
                    keep_storage=together,
                    fixed=self._fixed,
                    keeps=which is frozen,
                    trusts_versions=trusted and which is frozen,
                    by_tree=self._num_together > 0,
                )
                self._buckets.append((members, bucket))
        self._num_shared = len(self._buckets) - sum(members[0] in set(own) for members, _ in self._buckets)
        self._is_built = True

    def _broadcast(self, replicas: Sequence[int]) -> list[list[Tensor]]:
        """Return, for each of ``replicas``, its copies of the tree's tensors."""
        tensors = self._tree.tensors
        rows: list[dict[int, Tensor]] = [{} for _ in range(len(self._devices))]
        positions = [0, *(r + 1 for r in replicas)]
        places = list(dict.fromkeys(p // self._size for p in positions))
        for members in self._leaf_groups if self._num_together else ():
            heads = [[self._leaves[i][d] for i in members] for d in range(len(self._leaves[members[0]]))]
            if len(heads) < len(self._devices) // self._size:
                heads.insert(0, [tensors[i] for i in members])
            self._spread(members, [heads[d] for d in places], positions, rows)
        for i, copies in () if self._num_together else self._leaves.items():
            for r in replicas:
                rows[r + 1][i] = copies[r]
        for k, (members, bucket) in enumerate(self._buckets):
            originals, is_shared = [tensors[i] for i in members], self._num_together and k < self._num_shared
            found = bucket.refresh(originals, [d - 1 for d in places if d] if is_shared else replicas)
            if is_shared:
                heads = found if len(found) == len(places) else [originals, *found]
                self._spread(members, heads, positions, rows, bucket)
                continue
            if len(found) > len(replicas):
                rows[0].update(zip(members, found.pop(0)))
            for r, copies in zip(replicas, found):
                rows[r + 1].update(zip(members, copies))
        self._own = {id(tensors[i]): t for i, t in rows[0].items() if t is not tensors[i]}
        for i in self._unbucketed:
            copies = broadcast_tensor(tensors[i], [self._devices[p] for p in positions])
            for p, copy in zip(positions[1:], copies[1:]):
                # This flag makes isinstance(t, nn.Parameter) true for tensors of other classes.
                copy._is_param = isinstance(tensors[i], nn.Parameter)
                rows[p][i] = copy
        return [[rows[r + 1][i] for i in range(len(tensors))] for r in replicas]

    def _spread(
        self,
        members: Sequence[int],
        heads: Sequence[Sequence[Tensor]],
        positions: Sequence[int],
        rows: list[dict[int, Tensor]],
        bucket: BroadcastBucket | None = None,
    ) -> None:
        """Give replicas that share a copy of some tensors, one of ``heads``, each tensors of its own in that memory."""
        together = [list(found) for _, found in itertools.groupby(positions, lambda p: p // self._size)]
        for head, mine in zip(heads, together):
            memory = [[t.detach() for t in head] for _ in mine]
            if mine[0] == 0 and len(mine) > 1 and bucket is not None and not all(map(is_plain, head)):
                memory[1:] = [bucket.copy_here(head)] * (len(mine) - 1)
            for p, tensors in zip(mine, split_head(head, memory)):
                rows[p].update(zip(members, tensors))


class _Replica:
    """One replica of a module tree, built once: before each forward it becomes what a copy made then would be."""

    def __init__(self, tree: ModuleTree, device: torch.device, *, by_tree: bool = False) -> None:
        self._tree = tree
        self._device = device
        self._by_tree = by_tree
        self.modules = [_blank_copy(m) for m in tree.modules]
        self._replica_of = {id(m): replica for m, replica in zip(tree.modules, self.modules)}
        for original in tree.modules:
            # torch.compile's wrapper calls the module that it was made from.
            inner = compiled_original(original)
            if inner is not None:
                self._replica_of[id(original)] = self._replica_of[id(inner)]
        for original, replica in zip(tree.modules, self.modules):
            children = {k: None if c is None else self._replica_of[id(c)] for k, c in original._modules.items()}
            replica._modules.update(children)
        self.root = self._replica_of[id(tree.modules[0])]
        self.places = tree.places(self.modules)
        self.num_rows = 0
        self._buffers = [(r, name) for m, r in zip(tree.modules, self.modules) for name in m._buffers]
        # Changes that forward makes to a replica's attributes are undone before the next.
        self._snapshot = Snapshot(self.modules)
        self._stale = set(range(len(self.modules)))
        self._replicating = {i for i, m in enumerate(tree.modules) if replicates_itself(m)}
        self._given: set[int] = set()

    def expire(self, changed: Iterable[int]) -> None:
        """Mark these modules as changed in the original, and those that have changed in the replica."""
        mine = self._snapshot.changed()
        if self.num_rows > 1:
            self._look_for_rows([self.modules[i] for i in mine])
        self._stale.update(changed, mine, self._replicating)

    def release(self) -> None:
        """Drop the tensors, and the attributes that ``fill`` will set: their memory may be free for the next ones."""
        for table, key in self.places:
            table[key] = None
        for index in self._stale:
            replica = vars(self.modules[index])
            for name in [k for k in replica if k not in TABLES]:
                del replica[name]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Set the tensors, copies of the tree's, and the attributes of changed modules."""
        for (table, key), index in zip(self.places, self._tree.order):
            table[key] = None if index is None else tensors[index]
        self._given = set(map(id, tensors))
        if not self._stale:
            return
        others = self._replica_of | dict(zip(map(id, self._tree.tensors), tensors))
        remap = Remap(others, self._copy_tensor)
        for index in self._stale:
            original, replica = self._tree.modules[index], self.modules[index]
            source: Any = original
            if index in self._replicating:
                source = original._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
            for name, value in vars(source).items():
                if name in TABLES:
                    continue
                try:
                    vars(replica)[name] = remap.of(value)
                except Exception as error:
                    kind = type(original).__name__
                    raise error from ReplicaError(f"DataParallel: attribute {name!r} of {kind} can't be copied.")
            if type(replica) is not type(original):
                object.__setattr__(replica, "__class__", type(original))
        self._snapshot.accept(self._stale)
        self._stale.clear()

    def _copy_tensor(self, x: Tensor) -> Tensor:
        """Copy a plain tensor attribute to the replica's device; one on the CPU stays there, as in the original."""
        if self._by_tree and x.requires_grad and x.is_leaf:
            raise ReplicaError(
                "DataParallel: with num_replicas, what takes a gradient must be a parameter, got a tensor in an "
                "attribute, whose gradients add up in no fixed order. Make it an nn.Parameter."
            )
        stays = x.device.type == "cpu" and self._device.type != "cpu"
        copied = x if stays else comm.copy(x, self._device, fresh=not x.requires_grad)
        self._given.add(id(copied))
        return copied

    def _look_for_rows(self, changed: Sequence[nn.Module]) -> None:
        """Warn of tensors that forward has left in attributes, with as many entries as the replica had rows."""
        held = [(m, name, value) for m in changed for name, value in vars(m).items() if name not in TABLES]
        held += [(m, name, m._buffers.get(name)) for m, name in self._buffers]
        found = [
            (module, name)
            for module, name, value in held
            for t in (value if type(value) in (tuple, list) else [value])
            if isinstance(t, Tensor) and id(t) not in self._given and self.num_rows in t.shape
        ]
        if found:
            paths = {m: f"{path}." if path else "" for path, m in self.root.named_modules()}
            _warn_of_rows(", ".join(dict.fromkeys(paths[module] + name for module, name in found)))


@functools.cache
def _warn_of_rows(paths: str) -> None:
    logger.warning(
        "DataParallel: forward has left rows of the batch in %s: the module keeps those of the first replica alone, "
        "which all replicas get at the next forward. Return them, and pass them in as an argument. This is said once.",
        paths,
    )


def _blank_copy(original: nn.Module) -> nn.Module:
    # Not type(original)(): the constructor's arguments are unknown. Not copy.copy: classes may define it.
    replica: nn.Module = object.__new__(type(original))
    vars(replica).update({name: {} for name in TABLES})
    return replica


def trusts_versions(devices: Sequence[torch.device]) -> bool:
    """Whether frozen parameters are sent only when torch counts a write: comparing them would take too long."""
    return any(d.type != "cpu" for d in devices)


def _difference(theirs: Tensor, mine: Tensor) -> Tensor:
    # The difference of equal values is 0, also of the infinities of a mask: inf - inf would be nan.
    theirs = comm.copy(theirs, mine.device)
    return torch.where(theirs == mine, torch.zeros_like(mine), theirs - mine)


def _is_float_buffer(t: Tensor) -> bool:
    return not isinstance(t, nn.Parameter) and t.is_floating_point() and not t.requires_grad


def _is_frozen(t: Tensor) -> bool:
    return isinstance(t, nn.Parameter) and not t.requires_grad
