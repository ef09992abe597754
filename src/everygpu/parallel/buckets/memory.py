"""Flat memory: filled, compared, its writes counted, and tensors that stand in for others on it."""

import operator
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from everygpu.torch_private.tensors import foreach_copy_, make_subclass

Grads = Sequence[Tensor | None]

_version = operator.attrgetter("_version")


class Use:
    """Whether a graph still needs values; that ends with its backward, or with the graph."""

    is_over = False


def fill_views(views: Sequence[Tensor], tensors: Grads) -> None:
    """Copy tensors of one dtype into views of flat memory, at once; where there is none, the memory stays as it is."""
    pairs = [(view, t) for view, t in zip(views, tensors) if t is not None]
    if pairs:
        foreach_copy_([view for view, _ in pairs], [t.detach() for _, t in pairs])


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


def stand_in(original: Tensor, slot: Tensor) -> Tensor:
    """Return what replicas see in place of a tensor: its class and attributes, on a slot's memory."""
    is_parameter = isinstance(original, nn.Parameter)
    kind = type(original) if is_parameter else Tensor
    seen = make_subclass(kind, slot)
    attributes = vars(original)
    if attributes:
        vars(seen).update(attributes)
    if is_parameter and kind is Tensor:  # a plain tensor may count as a parameter by this mark alone
        seen._is_param = True
    return seen


def make_twins(originals: Iterable[Tensor], slots: Iterable[Tensor]) -> list[Tensor]:
    """Return leaf twins of parameters, in slots that have version counters of their own."""
    return [stand_in(t, slot).requires_grad_() for t, slot in zip(originals, slots)]


def put_back(tensors: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
    """Have tensors be in their slots again, without a copy, where ``t.data = …`` has moved them."""
    now, then = list(map(Tensor.data_ptr, tensors)), list(map(Tensor.data_ptr, slots))
    for t, slot, address, place in zip(tensors, slots, now, then) if now != then else ():
        if address != place:
            t.data = slot
