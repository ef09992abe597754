"""Persistent replicas of a module, refreshed from it before each forward."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from everygpu import comm
from everygpu.devices.parse import DeviceLike, parse_devices
from everygpu.parallel.buckets.bucket import Bucket
from everygpu.parallel.buckets.copies import broadcast_tensor
from everygpu.parallel.buckets.grouping import group_by_storage
from everygpu.parallel.buckets.kept import KeptBucket
from everygpu.parallel.buckets.sizes import REPLICA_BYTES
from everygpu.parallel.replicas.attributes import ReplicaModule
from everygpu.parallel.replicas.module_tree import ModuleTree, has_hooks, is_dense
from everygpu.parallel.replicas.placement import check_module, place_module
from everygpu.parallel.replicas.plain_attributes import take_plain_attributes
from everygpu.parallel.replicas.watch import Watch

Leaves = Mapping[int, Sequence[Tensor]]


def replicate(network: nn.Module, devices: Sequence[DeviceLike], detach: bool = False) -> list[nn.Module]:
    """Make one replica of a module on each device.

    ::

        network = nn.Linear(4, 3)
        first, second = everygpu.replicate(network, ["cpu", "cpu"])  # first is network
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
    if detach:
        for replica in replicas[1:]:
            _detach_parameters(replica)
    return replicas


class ReplicaSet:
    """A module and its replicas on the devices after the first.

    Args:
        module: Serves as the replica on ``devices[0]``, and is moved there if it is elsewhere.
        devices: One per replica.
        strict_device: Refuse to move the module.
        fixed: Keep the replicas' tensors at their addresses, for CUDA graphs.
        make_leaves: Returns leaf parameters that the caller keeps up to date: from ``id`` of an original to its
            copy on each device after the first. Called whenever the module's tree has changed. Frozen parameters
            are then sent only when torch counts a write to them, or always on the CPU, where a copy costs no more
            than a comparison.
        bucket_bytes: Size at which a bucket is closed.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        *,
        strict_device: bool = False,
        fixed: bool = False,
        make_leaves: Callable[[], Leaves] | None = None,
        bucket_bytes: int = REPLICA_BYTES,
    ) -> None:
        self.module = module
        self._fixed = fixed
        self._bucket_bytes = bucket_bytes
        self._make_leaves = make_leaves
        self._devices = list(devices)
        self._strict_device = strict_device
        self._build()

    def refresh(self, positions: Sequence[int], fresh: set[int] | None = None) -> list[nn.Module]:
        """Bring replicas up to date with the module as it is now.

        Args:
            positions: Which replicas, counted in ``devices``.
            fresh: Positions of replicas that are up to date while no gradients are recorded; those refreshed are added.
        Returns:
            The replicas at these positions; their parameters are connected to the module's.
        """
        if fresh is None or torch.is_grad_enabled() or not fresh.issuperset(positions):
            self._update(positions)
            if fresh is not None and not torch.is_grad_enabled():
                fresh.update(positions)
        return [self._replicas[p - 1].root if p else self.module for p in positions]

    def position_of(self, root: nn.Module) -> int | None:
        """Return a replica's place among the devices; None where it is none of these."""
        roots = [self.module, *(replica.root for replica in self._replicas)]
        return next((i for i, replica in enumerate(roots) if replica is root), None)

    def forget(self) -> None:
        """Send everything at the next refresh, after writes that torch doesn't count."""
        for bucket in self._buckets:
            bucket.forget()

    def kept(self) -> list[KeptBucket]:
        """Return the frozen parameters, with the copies that replicas keep; without those that are out of date."""
        found = []
        for members, bucket in self._frozen:
            params = [self._tree.tensors[i] for i in members]
            copies = bucket.current_copies(params)
            found.append(KeptBucket(plan=bucket.plan, params=dict(enumerate(params)), flats=copies, is_flat=False))
        return found

    def take_buffers(self, position: int) -> None:
        """Copy the buffers of the first replica that ran into the module, which did not run."""
        with torch.no_grad():
            for (table, key), (theirs, name), index in zip(
                self._places[0], self._places[position], self._tree.order
            ):  # fmt: skip
                if index is not None and not isinstance(table[key], nn.Parameter) and not table[key].requires_grad:
                    mine, other = table[key], theirs[name]
                    if mine.shape == other.shape and mine.dtype is other.dtype and mine.layout is other.layout:
                        mine.data.copy_(comm.copy(other, mine.device))

    def take_attributes(self, position: int) -> None:
        """Set the plain attributes that the first replica that ran has changed in the module, which did not run."""
        take_plain_attributes(self._tree.modules, self._replicas[position - 1].modules)

    def average_buffers(self, positions: Sequence[int], weights: Sequence[int]) -> None:
        """Set the module's float buffers to their weighted average over the replicas that ran.

        Args:
            positions: The replicas that ran.
            weights: One per position, such as its rows.
        """
        total = sum(weights)
        if total == 0:
            return
        with torch.no_grad():
            for place in self._float_buffers():
                mine, *theirs = (self._places[p][place][0][self._places[p][place][1]] for p in (0, *positions))
                # Through .data, as batch_norm itself does: the version stays, so backward accepts what forward saved.
                mine.data.add_(sum(_difference(t, mine) * (w / total) for t, w in zip(theirs, weights)))

    def _update(self, positions: Sequence[int]) -> None:
        if not self._tree.is_current():
            self._build()
        changed = self._watch.changed()
        for replica in self._replicas:
            replica.expire(changed)
        others = [p - 1 for p in positions if p > 0]
        for i in others:
            self._release(i)
        for i, tensors in zip(others, self._broadcast(others)):
            for (table, key), index in zip(self._places[i + 1], self._tree.order):
                table[key] = None if index is None else tensors[index]
            self._replicas[i].update({id(mine): copy for mine, copy in zip(self._tree.tensors, tensors)})

    def _build(self) -> None:
        """Build replicas and buckets for the module's present tree."""
        place_module(self.module, self._devices[0], "DataParallel", strict=self._strict_device)
        others = self._devices[1:]
        leaves = {} if self._make_leaves is None else self._make_leaves()
        self._tree = ModuleTree(self.module)
        self._watch = Watch(self._tree.modules)
        self._replicas = [ReplicaModule(self._tree.modules, device) for device in others]
        trees = [self._tree.modules, *(replica.modules for replica in self._replicas)]
        self._places = [self._tree.places(tree) for tree in trees]
        tensors = self._tree.tensors
        self._leaves = [(i, leaves[id(t)]) for i, t in enumerate(tensors) if id(t) in leaves]
        sent = [i for i, t in enumerate(tensors) if id(t) not in leaves]
        flat = [i for i in sent if is_dense(tensors[i])]
        self._unbucketed = sorted(set(sent) - set(flat))
        self._members: list[list[int]] = []
        self._buckets: list[Bucket] = []
        self._frozen: list[tuple[list[int], Bucket]] = []
        frozen = [i for i in flat if self._make_leaves is not None and _is_frozen(tensors[i])]
        trusted = trusts_versions(self._devices)
        # A bucket each: a node whose backward computes other parameters' gradients calls a hook without a gradient.
        hooked = [[i] for i in flat if tensors[i].requires_grad and has_hooks(tensors[i])]
        alone = {*frozen, *(i for (i,) in hooked)}
        for which in (frozen, *hooked, [i for i in flat if i not in alone]):
            for members, together in group_by_storage(tensors, which, self._bucket_bytes):
                self._members.append(members)
                self._buckets.append(
                    Bucket(
                        [tensors[i] for i in members],
                        self._devices[0],
                        others,
                        keep_storage=together,
                        fixed=self._fixed,
                        trust_versions=trusted and which is frozen,
                        kept=which is frozen,
                    )
                )
                if which is frozen:
                    self._frozen.append((members, self._buckets[-1]))

    def _release(self, replica: int) -> None:
        """Drop a replica's tensors, so that their memory may be written."""
        for table, key in self._places[replica + 1]:
            table[key] = None
        self._replicas[replica].release()

    def _broadcast(self, replicas: Sequence[int]) -> list[list[Tensor]]:
        """Return, for each of ``replicas``, its copies of the tree's tensors."""
        tensors = self._tree.tensors
        rows = [{i: copies[r] for i, copies in self._leaves} for r in replicas]
        for members, bucket in zip(self._members, self._buckets):
            for row, copies in zip(rows, bucket.refresh([tensors[i] for i in members], replicas)):
                row.update(zip(members, copies))
        for i in self._unbucketed:
            copies = broadcast_tensor(tensors[i], [self._devices[0], *(self._devices[r + 1] for r in replicas)])
            for row, copy in zip(rows, copies[1:]):
                row[i] = _as_parameter(copy) if isinstance(tensors[i], nn.Parameter) else copy
        return [[row[i] for i in range(len(tensors))] for row in rows]

    def _float_buffers(self) -> list[int]:
        """Return the places of float buffers, a shared one once."""
        tensors, seen = self._tree.tensors, set()
        places = []
        for place, index in enumerate(self._tree.order):
            if index is None or index in seen:
                continue
            seen.add(index)
            t = tensors[index]
            if not isinstance(t, nn.Parameter) and t.is_floating_point() and not t.requires_grad:
                places.append(place)
        return places


def _detach_parameters(replica: nn.Module) -> None:
    for module in replica.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(p.detach(), p.requires_grad)


def _difference(theirs: Tensor, mine: Tensor) -> Tensor:
    # The difference of equal values is 0, also of the infinities of a mask: inf - inf would be nan.
    theirs = comm.copy(theirs, mine.device)
    return torch.where(theirs == mine, torch.zeros_like(mine), theirs - mine)


def trusts_versions(devices: Sequence[torch.device]) -> bool:
    """Tell whether frozen parameters are sent only when torch counts a write: comparing them would take too long."""
    return any(d.type != "cpu" for d in devices)


def _is_frozen(t: Tensor) -> bool:
    return isinstance(t, nn.Parameter) and not t.requires_grad


def _as_parameter(t: Tensor) -> Tensor:
    # This flag makes isinstance(t, nn.Parameter) true for tensors of other classes.
    t._is_param = True
    return t
