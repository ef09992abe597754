"""Flat memory: filled, compared, its writes counted, and tensors that stand in for others on it."""

import operator
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from everygpu.torch_private.core import foreach_copy_, make_subclass

Grads = Sequence[Tensor | None]

_version = operator.attrgetter("_version")


class Use:
    """Whether a graph still needs values; that ends with its backward, or with the graph."""

    is_over = False


def fill_views(views: Sequence[Tensor], tensors: Grads) -> None:
    """Copy tensors of one dtype into views of flat memory, at once; where there is none, the memory stays as it is."""
    pairs = [(view, t) for view, t in zip(views, tensors) if t is not None]
    if pairs:
        with torch.no_grad():
            foreach_copy_([view for view, _ in pairs], [t for _, t in pairs])


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Tell whether memory is the same bit by bit, nan and the sign of zero included."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def version_of(t: Tensor) -> int:
    """Return how often torch has counted a write; tensors made in inference mode aren't counted."""
    return 0 if t.is_inference() else t._version


def versions_of(tensors: Collection[Tensor]) -> list[int]:
    """Return ``version_of`` each tensor; it runs in every step."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # one was made in inference mode
        return list(map(version_of, tensors))


def stand_ins(originals: Sequence[Tensor], rows: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Return what replicas see in place of tensors, for each row of slots: their classes and attributes, on these."""
    are_parameters = [isinstance(t, nn.Parameter) for t in originals]
    kinds = [type(t) if is_parameter else Tensor for t, is_parameter in zip(originals, are_parameters)]
    seen = [list(map(make_subclass, kinds, row)) for row in rows]
    for k, attributes in enumerate(map(vars, originals)):
        if attributes or (are_parameters[k] and kinds[k] is Tensor):
            for row in seen:
                vars(row[k]).update(attributes)
                if are_parameters[k] and kinds[k] is Tensor:  # which counts as a parameter by this mark alone
                    row[k]._is_param = True
    return seen


def make_twins(originals: Sequence[Tensor], slots: Sequence[Tensor]) -> list[Tensor]:
    """Return leaf twins of parameters, in slots that have version counters of their own."""
    (twins,) = stand_ins(originals, [slots])
    return [t.requires_grad_() for t in twins]


def put_back(tensors: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
    """Have tensors be in their slots again, without a copy, where ``t.data = …`` has moved them."""
    now, then = list(map(Tensor.data_ptr, tensors)), list(map(Tensor.data_ptr, slots))
    for t, slot, address, place in zip(tensors, slots, now, then) if now != then else ():
        if address != place:
            t.data = slot
