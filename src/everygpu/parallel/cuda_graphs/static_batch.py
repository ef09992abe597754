"""A batch at fixed addresses, for work that is captured once and run on many batches."""

import itertools
from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everygpu import comm, tree
from everygpu.comm import upload
from everygpu.parallel.cuda_graphs.reached_state import PLAIN, bits_of
from everygpu.parallel.replicas.module_tree import is_dense
from everygpu.parallel.scatter.batch_types import batch_type
from everygpu.parallel.scatter.row_count import find_rows, has_entry_per_device, name_arguments
from everygpu.parallel.scatter.split import Replicated, ScatterSpec, SplitPlan, plan_split
from everygpu.parallel.sharded.batch import ShardedBatch, has_shards, shard_batch
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
    """Return what must be equal in two batches for the same memory to hold either.

    Raises:
        NotStatic: a tensor takes a gradient, is not dense, or is laid out over the devices in another way; a value is
            neither a tensor nor a plain number or string.
        SplitError: tensors disagree on the number of rows.
    """
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
        self._slots = {i: self._make_slot(leaves[i][1]) for i in dict.fromkeys(self._places)}

    @torch.no_grad()
    def write(self, batch: Batch, found: BatchLeaves | None = None) -> None:
        """Copy a batch here, on the current streams; from the host on streams of their own, which these wait for."""
        leaves = leaves_of(batch) if found is None else found
        arriving: list[tuple[Tensor, Tensor]] = []
        for i, slot in self._slots.items():
            for target, source in zip(slot.tensors, slot.sources(leaves[i][1])):
                if source.device.type == "cpu" and target.device.type == "cuda":
                    arriving.append((target, upload.upload(source, target.device)))
                else:
                    comm.fill(target, source)
        upload.receive([source for _, source in arriving], upload.mark([t.device for t, _ in arriving]))
        for target, source in arriving:
            target.copy_(source)

    def tensors(self) -> list[Tensor]:
        """List the memory."""
        return [t for slot in self._slots.values() for t in slot.tensors]

    def versions(self) -> list[int]:
        """Return how often torch has counted a write to each tensor."""
        return [t._version for t in self.tensors()]

    def read(self) -> Batch:
        """Return the batch in this memory, for use on the current streams."""
        values = {i: slot.read() for i, slot in self._slots.items()}
        places = iter(self._places)
        made: Batch = tree.map_leaves(lambda _: values[next(places)], self._structure)
        return made

    def _make_slot(self, leaf: Any) -> "_Slot":
        home = self._route.devices[0]
        if isinstance(leaf, Replicated):
            return self._make_copies(leaf)
        if not isinstance(leaf, Tensor):
            return _Slot(tensors=[], sources=lambda _: [], read=lambda: leaf)
        shares = None if self._plan is None else _shares(leaf, self._plan, self._route)
        if shares is not None:
            return self._make_parts(leaf, shares)
        whole = torch.empty_like(leaf.detach(), device=home)
        return _Slot(tensors=[whole], sources=lambda x: [x.detach()], read=whole.detach)

    def _make_parts(self, leaf: Tensor, shares: "_Shares") -> "_Slot":
        dim = self._route.dim

        def cut(x: Any) -> Sequence[Tensor]:
            if isinstance(x, ShardedBatch):
                return x._parts  # without the graph that ``shards`` is connected to
            starts = itertools.accumulate(shares.sizes, initial=0)
            return [x.detach().narrow(dim, start, size) for start, size in zip(starts, shares.sizes)]

        devices = shares.devices
        parts = [torch.empty_like(part, device=d) for part, d in zip(cut(leaf), devices)]
        home = self._route.devices[0]
        return _Slot(
            tensors=parts, sources=cut, read=lambda: shard_batch([p.detach() for p in parts], home, dim)
        )  # fmt: skip

    def _make_copies(self, leaf: Replicated) -> "_Slot":
        devices = self._route.devices

        def copies_of(marked: Replicated) -> list[Any]:
            return marked.copies_on(devices, range(len(devices))) or [marked.value] * len(devices)

        def sources(marked: Replicated) -> Sequence[Tensor]:
            return [x.detach() for value in copies_of(marked) for _, x in tree.leaves(value, "") if _is_tensor(x)]

        copies = [
            tree.map_leaves(lambda x, d=d: torch.empty_like(x.detach(), device=d) if _is_tensor(x) else x, value)  # type: ignore[misc]
            for d, value in zip(devices, copies_of(leaf))
        ]
        tensors = [x for value in copies for _, x in tree.leaves(value, "") if _is_tensor(x)]
        return _Slot(tensors=tensors, sources=sources, read=lambda: Replicated(copies[0], copies=copies))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """Memory for one leaf of a batch."""

    tensors: list[Tensor]
    sources: Callable[[Any], Sequence[Tensor]]
    """From the leaf of another batch to what goes into each tensor."""
    read: Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    """How a tensor is spread."""

    sizes: tuple[int, ...]
    devices: tuple[torch.device, ...]


def _places(leaves: BatchLeaves) -> tuple[int, ...]:
    """Return for each leaf where it comes first: compiled code knows inputs and labels that are one tensor."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(x), i) if isinstance(x, Tensor) else i for i, (_, x) in enumerate(leaves))


def _containers(value: Any) -> Any:
    """Return what containers are besides their leaves, of which those that are empty have none.

    Raises:
        NotStatic: one has an attribute that is no plain number or string, or something of its own besides its children.
    """
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
    if len(route.devices) == 1:
        return None
    args, kwargs, _ = batch
    rows = find_rows(name_arguments(args, kwargs), route.dim, len(route.devices))
    return None if rows is None else plan_split(rows, len(route.devices), route.split)


def _describe(path: str, leaf: Any, plan: SplitPlan | None, route: ScatterSpec) -> Any:
    if isinstance(leaf, Replicated):
        return "replicated", *((p, _describe(p, x, None, route)) for p, x in tree.leaves(leaf.value, path))
    if not isinstance(leaf, Tensor):
        return _describe_plain(path, leaf)
    if leaf.requires_grad:
        raise NotStatic(f"{path} takes a gradient")
    if isinstance(leaf, ShardedBatch):
        return _describe_shards(path, leaf, plan, route)
    if type(leaf) is not Tensor or not is_dense(leaf):
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


def _describe_shards(path: str, leaf: ShardedBatch, plan: SplitPlan | None, route: ScatterSpec) -> Any:
    shares = None if plan is None else _shares(leaf, plan, route)
    is_fit = (
        shares is not None
        and has_shards(leaf)
        and leaf.shard_dim == route.dim % leaf.ndim
        and leaf._layout.sizes == shares.sizes
        and leaf._layout.devices == shares.devices
    )
    if not is_fit:
        raise NotStatic(f"{path} is laid out over the devices in another way than the model's inputs")
    return leaf.shape, leaf.dtype, leaf.stride()


def _shares(leaf: Tensor, plan: SplitPlan, route: ScatterSpec) -> _Shares | None:
    """Return how a tensor with rows, or with an entry per device, is spread; None for one that stays whole."""
    is_deep = leaf.ndim > 0 and -leaf.ndim <= route.dim < leaf.ndim
    if not is_deep or len(plan.active) == 1:
        return None
    if leaf.shape[route.dim] == plan.num_rows:
        sizes, devices = [plan.rows[i] for i in plan.active], [route.devices[i] for i in plan.active]
        return _Shares(sizes=tuple(sizes), devices=tuple(devices))
    if has_entry_per_device(leaf, plan.num_rows, len(route.devices), route.dim):
        return _Shares(sizes=(1,) * len(route.devices), devices=route.devices)
    return None


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)
