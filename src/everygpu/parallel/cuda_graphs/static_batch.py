"""A batch at fixed addresses, for work that is captured once and run on many batches."""

from collections import UserDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from everygpu import comm, tree
from everygpu.comm import upload
from everygpu.parallel.cuda_graphs.reached_state import PLAIN, bits_of
from everygpu.parallel.replicas.module_tree import is_dense
from everygpu.parallel.scatter.batch_types import batch_type
from everygpu.parallel.scatter.row_count import name_arguments, plan_batch, shares_of
from everygpu.parallel.scatter.split import Replicated, ScatterSpec, SplitPlan
from everygpu.parallel.sharded.batch import ShardedBatch, is_split_as, shard_batch
from everygpu.torch_private.core import SUPPORTED_NODES, without_torch_function

Batch = tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]
"""The model's positional and keyword arguments, and what the loss takes after the output."""


BatchLeaves = list[tuple[str, Any]]
"""Of a batch, with their paths: found once for each step."""


class NotStatic(Exception):  # noqa: N818 - no error: such a batch runs eagerly
    """A batch holds something that can't be kept at a fixed address."""


def leaves_of(batch: Batch) -> BatchLeaves:
    """List a batch's leaves, each with its path."""
    return list(tree.leaves(batch, "batch"))


def describe_batch(batch: Batch, route: ScatterSpec, found: BatchLeaves | None = None) -> tuple[Any, ...]:
    """Return what must be equal in two batches for the same memory to hold either; ``NotStatic`` says why none may."""
    with without_torch_function():  # a batch that is spread says its shape at once
        plan = _plan(batch, route)
        found = leaves_of(batch) if found is None else found
        leaves = [(p, _describe(p, x, plan, route)) for p, x in found]
        return (None if plan is None else plan.rows, _containers(batch), *leaves, _places(found))


class StaticBatch:
    """Memory on all devices for batches with equal descriptions."""

    def __init__(self, batch: Batch, route: ScatterSpec) -> None:
        self._route = route
        self._plan = _plan(batch, route)
        # Each leaf is one of its own: attributes that show an item are known by its identity.
        self._structure = tree.map_leaves(lambda _: object(), batch)
        leaves = leaves_of(batch)
        self._places = _places(leaves)
        self._memory: dict[int, list[Tensor]] = {}
        """For each leaf that comes first."""
        self._shares: dict[int, list[tuple[int, torch.device]] | None] = {}
        self._read: dict[int, Callable[[], Any]] = {}
        for i in dict.fromkeys(self._places):
            leaf = leaves[i][1]
            # Once: of a tensor with an entry per device the values are read, for which the host waits.
            self._shares[i] = shares_of(leaf, self._plan, route) if isinstance(leaf, Tensor) else None
            self._memory[i] = [torch.empty_like(t, device=d) for t, d in self._sources(i, leaf)]
            self._read[i] = self._reader(i, leaf)

    @torch.no_grad()
    def write(self, batch: Batch, found: BatchLeaves | None = None) -> None:
        """Copy a batch here, on the current streams; from the host on streams of their own, which these wait for."""
        leaves = leaves_of(batch) if found is None else found
        arriving: list[tuple[Tensor, Tensor]] = []
        for i, memory in self._memory.items():
            for target, (source, _) in zip(memory, self._sources(i, leaves[i][1])):
                if source.device.type == "cpu" and target.device.type == "cuda":
                    arriving.append((target, upload.upload(source, target.device)))
                else:
                    comm.fill(target, source)
        upload.receive([source for _, source in arriving], upload.mark([t.device for t, _ in arriving]))
        for target, source in arriving:
            target.copy_(source)

    def tensors(self) -> list[Tensor]:
        """List the memory."""
        return [t for memory in self._memory.values() for t in memory]

    def versions(self) -> list[int]:
        """Return how often torch has counted a write to each tensor."""
        return [t._version for t in self.tensors()]

    def read(self) -> Batch:
        """Return the batch in this memory, for use on the current streams."""
        values = {i: read() for i, read in self._read.items()}
        places = iter(self._places)
        made: Batch = tree.map_leaves(lambda _: values[next(places)], self._structure)
        return made

    def _sources(self, i: int, leaf: Any) -> list[tuple[Tensor, torch.device]]:
        """List a leaf's tensors, each with the device it goes to."""
        route = self._route
        if isinstance(leaf, Replicated):
            copies = zip(self._copies_of(leaf), route.devices)
            return [(x.detach(), d) for copy, d in copies for _, x in tree.leaves(copy, "") if isinstance(x, Tensor)]
        if not isinstance(leaf, Tensor):
            return []
        if (shares := self._shares[i]) is None:
            return [(leaf.detach(), route.devices[0])]
        sizes, devices = zip(*shares)
        if isinstance(leaf, ShardedBatch):
            return list(zip(leaf._parts, devices))  # without the graph that ``shards`` is connected to
        return list(zip(leaf.detach().split_with_sizes(sizes, route.dim), devices))

    def _reader(self, i: int, leaf: Any) -> Callable[[], Any]:
        """Return what makes a leaf of the values in its memory."""
        memory = self._memory[i]
        if isinstance(leaf, Replicated):
            each = iter(memory)
            copies = [
                tree.map_leaves(lambda x: next(each) if isinstance(x, Tensor) else x, copy)
                for copy in self._copies_of(leaf)
            ]
            return lambda: Replicated(copies[0], copies=copies)
        if not isinstance(leaf, Tensor):
            return lambda: leaf
        if self._shares[i] is None:
            return memory[0].detach
        return lambda: shard_batch([t.detach() for t in memory], self._route.devices[0], self._route.dim)

    def _copies_of(self, marked: Replicated) -> list[Any]:
        devices = self._route.devices
        return marked.copies_on(devices, range(len(devices))) or [marked.value] * len(devices)


def _places(leaves: BatchLeaves) -> tuple[int, ...]:
    """Return for each leaf where it comes first: compiled code knows inputs and labels that are one tensor."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(x), i) if isinstance(x, Tensor) else i for i, (_, x) in enumerate(leaves))


def _containers(value: Any) -> Any:
    """Return what containers are besides their leaves, of which those that are empty have none."""
    opened = tree.open_container(value)
    if batch_type(value) is not None:
        raise NotStatic(f"the batch holds a {type(value).__qualname__} with rows of its own kind")
    if opened is None:
        return None
    own = () if type(value) in (list, tuple, dict) else _own_state(value, opened)
    return (type(value), opened.accessors, own, *map(_containers, opened.children))


def _own_state(value: Any, opened: tree.Container) -> tuple[Any, ...]:
    """Return a container's attributes that aren't its children, and what torch's pytree keeps of it."""
    children = {id(child) for child in opened.children}
    state = {k: v for k, v in getattr(value, "__dict__", {}).items() if id(v) not in children}
    if isinstance(value, UserDict):
        state.pop("data")
    elif type(value) in SUPPORTED_NODES and not isinstance(value, (dict, list, tuple)):
        return (_frozen(SUPPORTED_NODES[type(value)].flatten_fn(value)[1]),)
    found = [leaf for name, v in state.items() for leaf in tree.leaves(v, f"{type(value).__qualname__}.{name}")]
    return tuple((path, _describe_plain(path, x)) for path, x in found)


def _plan(batch: Batch, route: ScatterSpec) -> SplitPlan | None:
    args, kwargs, _ = batch
    return plan_batch(name_arguments(args, kwargs), route)


def _describe(path: str, leaf: Any, plan: SplitPlan | None, route: ScatterSpec) -> Any:
    if isinstance(leaf, Replicated):
        return "replicated", *((p, _describe(p, x, None, route)) for p, x in tree.leaves(leaf.value, path))
    if not isinstance(leaf, Tensor):
        return _describe_plain(path, leaf)
    if leaf.requires_grad:
        raise NotStatic(f"{path} takes a gradient")
    if isinstance(leaf, ShardedBatch):
        shares = shares_of(leaf, plan, route)
        if shares is None or not is_split_as(leaf, [n for n, _ in shares], [d for _, d in shares], route.dim):
            raise NotStatic(f"{path} is laid out over the devices in another way than the model's inputs")
    elif type(leaf) is not Tensor or not is_dense(leaf):
        raise NotStatic(f"{path} is no plain dense tensor")
    return leaf.shape, leaf.dtype, leaf.stride()  # with the plan, they say how it is distributed


def _frozen(context: Any) -> Any:
    if isinstance(context, (list, tuple)):
        return tuple(map(_frozen, context))
    if type(context) in PLAIN:
        return type(context), bits_of(context)
    try:
        hash(context)
    except TypeError as reason:
        raise NotStatic(f"a container in the batch holds a {type(context).__qualname__}") from reason
    return context


def _describe_plain(path: str, value: Any) -> Any:
    if type(value) not in PLAIN:
        raise NotStatic(f"{path} is a {type(value).__qualname__}")
    return type(value), bits_of(value)
