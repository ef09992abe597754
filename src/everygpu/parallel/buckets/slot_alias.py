"""Tensors that stand in for others, on other memory."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from everygpu.torch_private.tensors import make_subclass


class SlotAlias:
    """What replicas see in place of a tensor: its class and attributes, on a slot's memory."""

    __slots__ = ("attributes", "kind", "mark")

    def __init__(self, original: Tensor) -> None:
        is_parameter = isinstance(original, nn.Parameter)
        self.kind = type(original) if is_parameter else Tensor
        self.attributes = dict(vars(original))
        # A plain tensor may count as a parameter by this mark alone.
        self.mark = is_parameter and self.kind is Tensor

    def on(self, slot: Tensor) -> Tensor:
        """Return a tensor like the original on other memory."""
        seen = make_subclass(self.kind, slot)
        if self.attributes:
            vars(seen).update(self.attributes)
        if self.mark:
            seen._is_param = True
        return seen


def make_twins(originals: Iterable[Tensor], slots: Iterable[Tensor]) -> list[Tensor]:
    """Return leaf twins of parameters.

    Args:
        originals: The parameters.
        slots: The twins' memory, each with a version counter of its own.
    """
    return [SlotAlias(t).on(slot).requires_grad_() for t, slot in zip(originals, slots)]


def put_back(tensors: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
    """Have tensors be in their slots again, without a copy, where ``t.data = …`` has moved them."""
    now, then = list(map(Tensor.data_ptr, tensors)), list(map(Tensor.data_ptr, slots))
    for t, slot, address, place in zip(tensors, slots, now, then) if now != then else ():
        if address != place:
            t.data = slot
