"""Flat memory: filled, compared, and counted by its uses."""

import operator
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from everygpu.torch_private.tensors import foreach_copy_

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
