"""A stock optimizer's work and state, spread over the devices.

Each device holds a chunk of every bucket. Neighbours in a chunk with equal options are one parameter to an
optimizer of the stock one's own class: each element is updated by torch's own code, by one device, in few launches.
"""

import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everygpu import comm, tree
from everygpu.comm.streams import queueing_on
from everygpu.errors import OptimizerError
from everygpu.parallel.buckets import BucketPlan, Piece
from everygpu.step.update import skips_on_device

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Optimizers that update each element by itself, so that it doesn't matter where a parameter is cut."""

WHOLE: tuple[type[Optimizer], ...] = (torch.optim.Adafactor, torch.optim.Muon)
"""Optimizers that update each parameter by itself, but as a whole: one device does."""

FUSED: tuple[type[Optimizer], ...] = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Those with fused kernels on CUDA, which leave a step out, and take the learning rate, on the device."""

FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_PER_PARAMETER = frozenset({"step", "mu_product", "eta", "mu"})
"""Their states that are one number for the whole parameter."""

_NO_OPTIONS = ("params", "param_names")

State = dict[str, Any]


def can_shard(optimizer: Optimizer) -> bool:
    """Whether an optimizer's work can be spread: exactly torch's own, as a subclass may do anything."""
    is_known = type(optimizer) in (*ELEMENTWISE, *WHOLE)
    return is_known and not any(g.get("differentiable") for g in optimizer.param_groups)


def can_fuse(optimizer: Optimizer, params: Sequence[Tensor]) -> bool:
    """Whether torch's fused kernels serve some of an optimizer's parameters."""
    return has_fused(optimizer, params) and all(p.is_cuda for p in params)


def has_fused(optimizer: Optimizer, params: Sequence[Tensor]) -> bool:
    """Whether torch has fused kernels for parameters as these; a learning rate on the device is in float32."""
    return type(optimizer) in FUSED and all(p.dtype in FUSED_DTYPES for p in params)


def all_params(optimizer: Optimizer) -> Iterator[Any]:
    """List the parameters of all groups."""
    return itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fragment:
    """Neighbours in a chunk, in the memory of the device that updates them: one parameter to its optimizer."""

    bucket: int
    group: int
    """The index of their group in the optimizer."""
    pieces: tuple[Piece, ...]
    start: int
    """Where the first begins in the chunk."""
    param: nn.Parameter
    """A flat view of the values' memory, with the gaps between the pieces; or one parameter, with its own shape."""
    grad: Tensor
    """Likewise of the gradients'."""

    def part(self, flat: Tensor, piece: Piece) -> Tensor:
        """Return a piece's place in memory that is as long as ``param``."""
        return flat.narrow(0, piece.start - self.start, piece.numel)

    def split(self, kinds: Sequence[int]) -> "list[Fragment]":
        """Cut where parameters of different kinds meet; a fragment of one kind stays itself."""
        runs = [list(run) for _, run in itertools.groupby(self.pieces, lambda piece: kinds[piece.index])]
        if len(runs) == 1:
            return [self]
        return [_make_fragment(self.bucket, self.group, run, self.param.data, self.grad, self.start) for run in runs]


class Shards:
    """The optimizers of all devices: the stock one's options are read at every step, and its state moves here.

    ``values`` and ``grads`` are chunks, one per device for each bucket; ``fuses`` has torch's fused kernels used where
    they can serve. ``whole``: chunks have whole parameters, and the optimizer gets each by itself.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[Tensor],
        plans: Sequence[BucketPlan],
        values: Sequence[Sequence[Tensor]],
        grads: Sequence[Sequence[Tensor]],
        *,
        fuses: bool = False,
        whole: bool = False,
    ) -> None:
        self.params = list(params)
        self.devices = [chunk.device for chunk in values[0]] if values else []
        self.version = 0
        """Changes with the memory of the states."""
        self._stock = optimizer
        self._whole = whole
        self._values, self._grads, self._plans = values, grads, plans
        self._slots = {slot.index: slot for plan in plans for slot in plan.slots}
        owner = {id(p): k for k, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._group_of = [owner[id(p)] for p in self.params]
        self._updated: frozenset[int] = frozenset()
        self._kinds = [0] * len(self.params)
        """Parameters have equal numbers as long as they were always updated together: others are in no fragment."""
        self._may_fuse = fuses and can_fuse(optimizer, params)
        self.take_state({})

    def take_state(self, state: Mapping[Tensor, State]) -> None:
        """Scatter a stock optimizer's state; absent parameters start without one."""
        wholes = [state.get(p) or {} for p in self.params]
        kinds = [() if self._whole else _kind_of(whole, p) for whole, p in zip(wholes, self.params)]
        self.version += 1
        self._known: set[int] = set()
        """Parameters that were updated since, so that they have a state, if any have."""
        # torch's fused kernels fail where a momentum has kept its precision, after ``model.bfloat16()``.
        self.fuses = self._may_fuse and not any(map(_is_wide, wholes, self.params))
        self.fragments = [self._cut(chunk, kinds) for chunk in range(len(self.devices))]
        self.optimizers = [self._make_optimizer(fragments) for fragments in self.fragments]
        self._rates = [
            [torch.zeros((), dtype=torch.float32, device=d) for _ in self._stock.param_groups] for d in self.devices
        ]
        self._sent: list[list[Any]] = [[None] * len(self._stock.param_groups) for _ in self.devices]
        for fragments, optimizer in zip(self.fragments, self.optimizers):
            for f in fragments:
                parts = [wholes[piece.index] for piece in f.pieces]
                if parts[0]:
                    optimizer.state[f.param] = {name: self._join_parts(name, parts, f) for name in parts[0]}
        self.follow(self._stock.param_groups)

    def prepare(self, options: Sequence[Mapping[str, Any]], touched: Collection[int]) -> bool:
        """Take on what schedulers and users may have changed in the groups, before a step of the parameters that have a
        gradient; return whether that can be skipped on the devices: see ``found_inf``.
        """
        self._separate(frozenset(touched))
        self._known |= frozenset(touched)
        self.follow(options)
        return all(
            skips_on_device(optimizer, [f.param for f in fragments if f.pieces[0].index in touched])
            for fragments, optimizer in zip(self.fragments, self.optimizers)
        )

    def step(
        self,
        touched: Collection[int],
        found_inf: Sequence[Tensor] | None = None,
        *,
        bucket: int | None = None,
        grads: Mapping[int, Tensor] | None = None,
        grad_scales: Sequence[Tensor] | None = None,
    ) -> None:
        """Update every element once, from the gradients in their memory.

        Args:
            touched: As for ``prepare``; other parameters are left alone, as torch does.
            found_inf: For each device, shape (): where it is 1, and not 0, fused kernels leave everything as it was.
            bucket: The one to update; all when left out.
            grads: On one device, where each parameter's gradient is, flat; in the shards' memory when left out.
            grad_scales: For each device, shape (): what fused kernels divide the gradients by.
        """
        for rank, (device, fragments, optimizer) in enumerate(zip(self.devices, self.fragments, self.optimizers)):
            for f in fragments:
                is_updated = f.pieces[0].index in touched and bucket in (None, f.bucket)
                grad = f.grad if grads is None else grads.get(f.pieces[0].index)
                f.param.grad = grad if is_updated else None
            # Where fused optimizers look for them.
            optimizer.found_inf = None if found_inf is None else found_inf[rank]
            optimizer.grad_scale = None if grad_scales is None else grad_scales[rank]
            with queueing_on(device), _own_default(device):
                optimizer.step()
            for f in fragments if grads is not None else ():
                f.param.grad = None  # or a capture's memory would be held

    def follow(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Take on all options as they are now."""
        for rank, (device, optimizer) in enumerate(zip(self.devices, self.optimizers)):
            for k, (mine, group) in enumerate(zip(optimizer.param_groups, options)):
                for name, value in group.items():
                    if name == "lr" and self.fuses:
                        self._send_rate(rank, k, value)
                    elif name not in _NO_OPTIONS:
                        is_away = isinstance(value, Tensor) and value.device.type != "cpu"
                        mine[name] = comm.copy(value, device) if is_away else value
                if self.fuses:
                    mine.update(lr=self._rates[rank][k], foreach=None, fused=True)
                    if "capturable" in mine:
                        mine["capturable"] = device.type == "cuda"

    def may_capture(self, touched: Collection[int]) -> bool:
        """Whether a step of some parameters makes nothing new, neither fragments nor states."""
        return self._known.issuperset(touched) and all(
            len({piece.index in touched for piece in f.pieces}) == 1 for fragments in self.fragments for f in fragments
        )

    def _separate(self, touched: frozenset[int]) -> None:
        """Split fragments in which only some parameters have a gradient."""
        if touched == self._updated:
            return
        self._updated = touched
        numbers: dict[tuple[int, bool], int] = {}
        self._kinds = [numbers.setdefault((kind, i in touched), len(numbers)) for i, kind in enumerate(self._kinds)]
        for fragments, optimizer in zip(self.fragments, self.optimizers):
            pairs = [(f, f.split(self._kinds)) for f in fragments]
            if all(len(parts) == 1 for _, parts in pairs):
                continue
            self.version += 1
            for f, parts in pairs:
                state = optimizer.state.pop(f.param, None) or {}
                for part in parts if state else ():
                    optimizer.state[part.param] = {k: _part_of(k, v, f, part) for k, v in state.items()}
            fragments[:] = [part for _, parts in pairs for part in parts]
            for params, group in zip(self._params_of(fragments), optimizer.param_groups):
                group["params"] = params

    def fixed_options(self, options: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]] | None:
        """Return all that captured kernels can't take from the device, as they can the learning rate; None where an
        option is a tensor, which may change unnoticed.
        """
        names = [name for name in self._stock.defaults if name != "lr"]
        found = [tuple(map(group.get, names)) for group in options]
        values = [
            v for row in found for value in row for v in (value if isinstance(value, (tuple, list)) else (value,))
        ]
        return None if [v for v in values if isinstance(v, Tensor)] else found  # no generator: it runs in every step

    def collect_state(self, home: torch.device) -> dict[Tensor, State]:
        """Put the state of each parameter that has one together as the stock optimizer would have it, on ``home``."""
        found: dict[int, State] = {}
        for fragments, optimizer in zip(self.fragments, self.optimizers):
            for f in fragments:
                state = optimizer.state.get(f.param) or {}
                for piece in f.pieces if state else ():
                    whole = found.setdefault(piece.index, {})
                    for name, value in state.items():
                        self._put(whole, name, value, f, piece, home)
        return {self.params[i]: found[i] for i in sorted(found)}

    def forget_state(self) -> None:
        """Drop all state, before another is loaded."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def state_bytes(self) -> list[int]:
        """Count the bytes of state on each device."""
        states = [optimizer.state.values() for optimizer in self.optimizers]
        return [sum(v.nbytes for s in found for v in s.values() if isinstance(v, Tensor)) for found in states]

    def _cut(self, chunk: int, kinds: Sequence[Hashable]) -> list[Fragment]:
        """Make the fragments of a device: as few as there can be."""

        def key(piece: Piece) -> Hashable:
            i = piece.index
            # One without elements lies in another's place. On one device torch's kernels are quicker with many tensors.
            alone = i if piece.numel == 0 or len(self.devices) == 1 or self._whole else None
            return self._group_of[i], kinds[i], alone, self._kinds[i]

        fragments = []
        for b, plan in enumerate(self._plans):
            # In the order of memory: weights that share a storage, as cuDNN's, may lie there in another than theirs.
            for _, run in itertools.groupby(sorted(plan.pieces(chunk), key=lambda piece: piece.start), key):
                pieces = list(run)
                group = self._group_of[pieces[0].index]
                fragment = _make_fragment(b, group, pieces, self._values[b][chunk], self._grads[b][chunk])
                fragments.append(self._shaped(fragment) if self._whole else fragment)
        return fragments

    def _shaped(self, f: Fragment) -> Fragment:
        """Give a fragment that is one parameter its shape."""
        slot = self._slots[f.pieces[0].index]
        param, grad = (t.as_strided(slot.shape, slot.strides) for t in (f.param.data, f.grad))
        return replace(f, param=nn.Parameter(param), grad=grad)

    def _make_optimizer(self, fragments: Sequence[Fragment]) -> Any:
        groups = [
            {**{name: v for name, v in group.items() if name not in _NO_OPTIONS}, "params": params}
            for params, group in zip(self._params_of(fragments), self._stock.param_groups)
        ]
        kind: Any = type(self._stock)
        try:
            return kind(groups)
        except TypeError as error:
            raise OptimizerError(
                f"ShardedOptimizer: makes a {kind.__name__} for each device from param_groups that have all options, "
                f"which its constructor doesn't take ({error}). Give its other arguments defaults."
            ) from error

    def _params_of(self, fragments: Sequence[Fragment]) -> list[list[Tensor]]:
        """Return each group's parameters."""
        return [[f.param for f in fragments if f.group == k] for k in range(len(self._stock.param_groups))]

    def _send_rate(self, rank: int, k: int, value: Any) -> None:
        """Put a group's learning rate where kernels find it; a number only where it has changed."""
        rate = self._rates[rank][k]
        with queueing_on(rate.device):
            if isinstance(value, Tensor):
                rate.copy_(comm.copy(value, rate.device))
                self._sent[rank][k] = None
            elif value != self._sent[rank][k]:
                rate.fill_(value)
                self._sent[rank][k] = value

    def _join_parts(self, name: str, wholes: Sequence[State], f: Fragment) -> Any:
        """Return a fragment's part of a state that the stock optimizer has."""
        value = wholes[0][name]
        if self._whole:
            return _copy_whole(name, value, f.param.device)
        if _is_number(name, value, self.params[f.pieces[0].index]):
            device = f.param.device
            on_device = self.fuses and name == "step"
            return value.to(device, torch.float32, copy=True) if on_device else _copy_number(value, device)
        joined = torch.zeros(f.param.numel(), dtype=value.dtype, device=f.param.device)
        for piece, whole in zip(f.pieces, wholes):
            # In the order of the parameter's memory, whatever the state's own is.
            slot, part = self._slots[piece.index], whole[name]
            laid = torch.empty_strided(slot.shape, slot.strides, dtype=part.dtype, device=part.device).copy_(part)
            memory = laid.as_strided((laid.numel(),), (1,))
            comm.fill(f.part(joined, piece), memory.narrow(0, piece.offset, piece.numel))
        return joined

    def _put(self, whole: State, name: str, value: Any, f: Fragment, piece: Piece, home: torch.device) -> None:
        """Put a piece's part of a fragment's state into that of the whole parameter."""
        slot = self._slots[piece.index]
        if self._whole:
            whole[name] = _copy_whole(name, value, home)
            return
        if _is_number(name, value, f.param):
            group = self._stock.param_groups[f.group]
            on_host = self.fuses and not (group.get("fused") or group.get("capturable"))
            copied = isinstance(value, Tensor) and on_host
            whole[name] = value.to("cpu", copy=True) if copied else _copy_number(value, home)
            return
        if name not in whole:
            whole[name] = torch.empty_strided(slot.shape, slot.strides, dtype=value.dtype, device=home)
        memory = whole[name].as_strided((slot.numel,), (1,))
        comm.fill(memory.narrow(0, piece.offset, piece.numel), f.part(value, piece))


def _own_default(device: torch.device) -> AbstractContextManager[Any]:
    """Make torch's optimizers create numbers on their parameter's device, not on the caller's default GPU."""
    return nullcontext() if torch.get_default_device().type == "cpu" else device


def _make_fragment(
    bucket: int, group: int, pieces: Sequence[Piece], values: Tensor, grads: Tensor, start: int = 0
) -> Fragment:
    """Make neighbours one parameter, in memory that begins at an element of their chunk."""
    begin, numel = pieces[0].start, pieces[-1].start + pieces[-1].numel - pieces[0].start
    param, grad = (flat.narrow(0, begin - start, numel) for flat in (values, grads))
    return Fragment(bucket=bucket, group=group, pieces=tuple(pieces), start=begin, param=nn.Parameter(param), grad=grad)


def _is_number(name: str, value: Any, param: Tensor) -> bool:
    """Whether a state is one number for the whole parameter, rather than one for each element."""
    return not isinstance(value, Tensor) or name in _PER_PARAMETER or value.numel() != param.numel()


def _is_wide(state: State, param: Tensor) -> bool:
    """Whether a state has another dtype than its parameter."""
    return any(not _is_number(name, v, param) and v.dtype is not param.dtype for name, v in state.items())


def _kind_of(state: State, param: Tensor) -> Hashable:
    """Return what states have in common that are kept side by side: names, dtypes, and numbers."""

    def kind(name: str, value: Any) -> Hashable:
        if _is_number(name, value, param):
            return str(value.tolist() if isinstance(value, Tensor) else value)
        return value.dtype  # type: ignore[no-any-return]

    return tuple((name, kind(name, value)) for name, value in state.items())


def _part_of(name: str, value: Any, f: Fragment, part: Fragment) -> Any:
    """Return what a part of a fragment has of its state."""
    if part is f:
        return value
    if _is_number(name, value, f.param):
        return value.clone() if isinstance(value, Tensor) else value
    return value.narrow(0, part.start - f.start, part.param.numel())


def _copy_whole(name: str, value: Any, device: torch.device) -> Any:
    """Copy a whole parameter's state, of any shape, or a container of tensors."""
    if name in _PER_PARAMETER:
        return _copy_number(value, device)
    return tree.map_leaves(lambda x: comm.copy(x, device, fresh=True) if isinstance(x, Tensor) else x, value)


def _copy_number(value: Any, device: torch.device) -> Any:
    """Copy what is one number for a parameter; one on the CPU stays there, where torch's optimizers look for it."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if value.device.type == "cpu" else comm.copy(value, device, fresh=True)
