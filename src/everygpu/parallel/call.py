"""One call of a module by its replicas: what each gets, and what is known of the results."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from everygpu.errors import CallError
from everygpu.torch_private.compiler import left_to_run
from everygpu.torch_private.core import are_transforms_active, is_transforming

if TYPE_CHECKING:
    from everygpu.parallel.replicas.replica_set import ReplicaSet
    from everygpu.parallel.scatter.denominator import LabelCheck
    from everygpu.parallel.scatter.scatter import Lent


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """A call's arguments, cut by rows, with an entry for each replica that runs, in their order."""

    positions: tuple[int, ...]
    """Of the replicas among all devices."""
    args: tuple[tuple[Any, ...], ...]
    kwargs: tuple[dict[str, Any], ...]
    rows: tuple[int, ...] | None
    """Of the batch; None when the call has no tensor to cut, or somebody else has cut it."""
    weights: Sequence[float] | None
    """The weight of a result for all of a replica's rows, relative to other replicas'; None if unknown.

    ``RowWeights`` where the result itself may say otherwise; equal where the caller normalizes them, as the call came
    with an entry per device.
    """
    label_check: "LabelCheck | None" = None
    """What warns of results that may count otherwise."""
    lent: Sequence["Lent"] = ()
    """Tensors whose shares are the replicas' inputs, which may write to them."""
    modules: tuple[nn.Module, ...] = ()
    """The replicas, whose parameters and buffers are written by later forwards."""
    method: str | None = None
    """Of the replicas, where they aren't called themselves."""
    pad_value: float | None = None
    """Value that pads outputs whose sizes differ in dimensions other than the rows; None to refuse them."""


class ScatteredArgs(tuple[Any, ...]):
    """The positional arguments of each replica, and their call."""

    call: Call

    def __new__(cls, args: Iterable[Any], call: Call) -> "ScatteredArgs":
        self = super().__new__(cls, args)
        self.call = call
        return self


class PerReplica(list[Any]):
    """What each replica returned, and its call; or the replicas themselves, and what keeps them."""

    def __init__(self, items: Iterable[Any], call: Call | None = None, replicas: "ReplicaSet | None" = None) -> None:
        super().__init__(items)
        self.call, self.replicas = call, replicas


def check_transforms() -> None:
    """Refuse a forward on several devices within a transform of ``torch.func``, in forward mode, or in a trace."""
    found = _find_transform()
    if found is not None:
        what, example = found
        raise CallError(
            f"DataParallel: {what} needs a module on one device, got a DataParallel of several replicas. Pass "
            f"the module itself, as in {example}."
        )


@left_to_run  # torch.compile before torch 2.13 takes is_exporting() for true
def _find_transform() -> tuple[str, str] | None:
    if are_transforms_active():
        return "a transform of torch.func, such as vmap or grad,", "torch.func.vmap(model.module)(x)"
    if is_transforming():
        return "forward-mode differentiation", "torch.func.jvp(model.module, (x,), (v,))"
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return "torch.jit.trace", "torch.jit.trace(model.module, x)"
    if torch.compiler.is_exporting():
        return "torch.export", "torch.export.export(model.module, (x,))"
    return None
