"""A stock optimizer's work and state, spread over the devices.

Each device holds a chunk of every bucket. What a chunk holds of a parameter is a parameter to an optimizer of the
stock one's own class, so each element is updated by torch's own code, by exactly one device.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everygpu import comm
from everygpu.comm.streams import queueing_on
from everygpu.parallel.buckets.plan import BucketPlan, Piece, Slot
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

_PER_PARAMETER = frozenset({"step", "mu_product", "eta", "mu"})
"""Their states that are one number for the whole parameter."""

State = dict[str, Any]


def can_shard(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer's work can be spread: exactly torch's own, as a subclass may do anything."""
    return type(optimizer) in ELEMENTWISE and not any(g.get("differentiable") for g in optimizer.param_groups)


def all_params(optimizer: Optimizer) -> Iterator[Any]:
    """List the parameters of all groups."""
    return itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A piece of a parameter, in the memory of the device that updates it."""

    bucket: int
    """Which bucket it is a piece of."""
    piece: Piece
    slot: Slot
    """The whole parameter's, whose memory the piece is cut from: the parameter may be laid out anew."""
    param: nn.Parameter
    """Shape (numel,); a view of the values' memory."""
    grad: Tensor
    """Shape (numel,); a view of the gradients' memory."""


class Shards:
    """The optimizers of all devices.

    Args:
        optimizer: The stock one. Its groups' options are read at every step; its state moves here.
        params: Its parameters, in order.
        plans: Their buckets.
        values: For each bucket, one chunk per device of shape (chunk_numel,), holding the parameters.
        grads: Likewise, for the gradients.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[Tensor],
        plans: Sequence[BucketPlan],
        values: Sequence[Sequence[Tensor]],
        grads: Sequence[Sequence[Tensor]],
    ) -> None:
        self.params = list(params)
        self.grads = grads
        self.devices = [chunk.device for chunk in values[0]] if values else []
        self.fragments = [_cut(plans, values, grads, j) for j in range(len(self.devices))]
        self.optimizers = [_make_optimizer(optimizer, self.params, fragments) for fragments in self.fragments]

    def step(self, options: Sequence[Mapping[str, Any]], touched: set[int], found_inf: Tensor | None = None) -> None:
        """Update every element once, from the gradients in their memory.

        Args:
            options: The stock optimizer's groups as they are now.
            touched: Parameters that have a gradient; the others are left alone, as torch does.
            found_inf: Shape (); where it is not 0, fused optimizers leave everything as it was.
        """
        for device, fragments, optimizer in zip(self.devices, self.fragments, self.optimizers):
            if optimizer is None:
                continue
            _follow(optimizer, options, device)
            for f in fragments:
                f.param.grad = f.grad if f.piece.index in touched else None
            # Where fused optimizers look for it.
            optimizer.found_inf = None if found_inf is None else comm.copy(found_inf, device)  # type: ignore[attr-defined]
            with queueing_on(device):
                optimizer.step()

    def skip_on_devices(self, touched: set[int]) -> bool:
        """Tell whether every optimizer can leave a step of some parameters out on its device."""
        return all(
            optimizer is None or skips_on_device(optimizer, [f.param for f in fragments if f.piece.index in touched])
            for fragments, optimizer in zip(self.fragments, self.optimizers)
        )

    def collect_state(self, home: torch.device) -> dict[Tensor, State]:
        """Put the state together as the stock optimizer would have it.

        Args:
            home: Where joined tensors go.
        Returns:
            From each parameter that has a state to it.
        """
        found: dict[int, list[tuple[Fragment, State]]] = defaultdict(list)
        for fragments, optimizer in zip(self.fragments, self.optimizers):
            for f in fragments:
                if optimizer is not None and optimizer.state.get(f.param):
                    found[f.piece.index].append((f, optimizer.state[f.param]))
        return {self.params[i]: _join_state(found[i], home) for i in sorted(found)}

    def take_state(self, state: Mapping[Tensor, State]) -> None:
        """Give each device its part of a state as the stock optimizer has it; parameters left out have none."""
        for fragments, optimizer in zip(self.fragments, self.optimizers):
            for f in fragments:
                whole = state.get(self.params[f.piece.index])
                if optimizer is not None and whole:
                    optimizer.state[f.param] = {name: _cut_value(name, value, f) for name, value in whole.items()}

    def forget_state(self) -> None:
        """Drop all state, before another is loaded."""
        for optimizer in self.optimizers:
            if optimizer is not None:
                optimizer.state.clear()

    def state_bytes(self) -> list[int]:
        """Count the bytes of state on each device."""
        tensors = [_tensors(o) for o in self.optimizers]
        return [sum(t.nbytes for t in found) for found in tensors]


def _tensors(optimizer: Optimizer | None) -> Iterator[Tensor]:
    states = optimizer.state.values() if optimizer is not None else ()
    yield from (v for state in states for v in state.values() if isinstance(v, Tensor))


def _cut(
    plans: Sequence[BucketPlan], values: Sequence[Sequence[Tensor]], grads: Sequence[Sequence[Tensor]], chunk: int
) -> list[Fragment]:
    slots = {slot.index: slot for plan in plans for slot in plan.slots}
    return [
        Fragment(
            bucket=b,
            piece=piece,
            slot=slots[piece.index],
            param=nn.Parameter(value[chunk].narrow(0, piece.start, piece.numel)),
            grad=grad[chunk].narrow(0, piece.start, piece.numel),
        )
        for b, (plan, value, grad) in enumerate(zip(plans, values, grads))
        for piece in plan.pieces(chunk)
    ]


def _make_optimizer(stock: Optimizer, params: Sequence[Tensor], fragments: Sequence[Fragment]) -> Optimizer | None:
    owner = {id(p): k for k, group in enumerate(stock.param_groups) for p in group["params"]}
    members: list[list[nn.Parameter]] = [[] for _ in stock.param_groups]
    for f in fragments:
        members[owner[id(params[f.piece.index])]].append(f.param)
    if not fragments:
        return None
    kept = ("params", "param_names")
    groups = [
        {"params": mine, **{k: v for k, v in group.items() if k not in kept}}
        for mine, group in zip(members, stock.param_groups)
    ]
    kind: Any = type(stock)
    made: Optimizer = kind(groups)
    return made


def _follow(optimizer: Optimizer, options: Sequence[Mapping[str, Any]], device: torch.device) -> None:
    """Take on the learning rate and all else that schedulers and users may have changed."""
    for mine, group in zip(optimizer.param_groups, options):
        for name, value in group.items():
            if name in ("params", "param_names"):
                continue
            mine[name] = comm.copy(value, device) if isinstance(value, Tensor) and value.device.type != "cpu" else value


def _join_state(parts: list[tuple[Fragment, State]], home: torch.device) -> State:
    parts = sorted(parts, key=lambda part: part[0].piece.offset)
    slot, first = parts[0][0].slot, parts[0][1]
    joined: State = {}
    for name, value in first.items():
        if isinstance(value, Tensor) and name not in _PER_PARAMETER:
            whole = torch.empty_strided(slot.shape, slot.strides, dtype=value.dtype, device=home)
            memory = whole.as_strided((whole.numel(),), (1,))
            for f, state in parts:
                comm.fill(memory.narrow(0, f.piece.offset, f.piece.numel), state[name])
            joined[name] = whole
        else:
            joined[name] = _copy_number(value, home)
    return joined


def _copy_number(value: Any, device: torch.device) -> Any:
    """Copy what is one number for a parameter; one on the CPU stays there, where torch's optimizers look for it."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if value.device.type == "cpu" else comm.copy(value, device, fresh=True)


def _cut_value(name: str, value: Any, f: Fragment) -> Any:
    if not isinstance(value, Tensor):
        return value
    if name in _PER_PARAMETER or value.shape != f.slot.shape:
        return _copy_number(value, f.param.device)
    # In the order of the parameter's memory, whatever the state's own is.
    laid = torch.empty_strided(f.slot.shape, f.slot.strides, dtype=value.dtype, device=value.device).copy_(value)
    memory = laid.as_strided((laid.numel(),), (1,))
    return comm.copy(memory.narrow(0, f.piece.offset, f.piece.numel), f.param.device, fresh=True)
