"""Which tensors travel together."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def keeps_storage(tensors: Sequence[Tensor]) -> bool:
    """Tell whether tensors lie side by side in one storage, as the weights cuDNN wants for a recurrent layer."""
    if len(tensors) < 2 or len({t.untyped_storage().data_ptr() for t in tensors}) > 1:
        return False
    spans = sorted((t.storage_offset(), t.storage_offset() + t.numel()) for t in tensors)
    apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    # A few views of a large table are not worth copying the table for.
    used = sum(t.nbytes for t in tensors)
    return apart and all(t.is_contiguous() for t in tensors) and 2 * used >= tensors[0].untyped_storage().nbytes()


def storage_offsets(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return where tensors begin in the one storage they share, and where it ends, in elements."""
    size = tensors[0].untyped_storage().nbytes() // tensors[0].element_size()
    return [int(t.storage_offset()) for t in tensors], size


def aligned_offsets(tensors: Sequence[Tensor], unit: int) -> tuple[list[int], int]:
    """Return where tensors begin in flat memory, at multiples of ``unit`` elements, and where it ends."""
    offsets, end = [], 0
    for t in tensors:
        offsets.append(end)
        end += -(-t.numel() // unit) * unit
    return offsets, end


def dense_strides(t: Tensor) -> tuple[int, ...]:
    """Strides of a copy: those of the tensor if it fills its memory, as channels_last does, else contiguous."""
    return torch.empty_like(t, device="meta").stride()


def group_tensors(tensors: Sequence[Tensor], key: Callable[[Tensor], Any], limit_bytes: int) -> list[list[int]]:
    """Put tensors with equal keys together, in order, up to a size per group.

    Returns:
        Indices into ``tensors``; each group holds at least one.
    """
    groups: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    for index, t in enumerate(tensors):
        members, size = filling.get(key(t), ([], 0))
        if not members or size + t.nbytes > limit_bytes:
            members, size = [], 0
            groups.append(members)
        members.append(index)
        filling[key(t)] = (members, size + t.nbytes)
    return groups


def group_by_storage(
    tensors: Sequence[Tensor], which: Sequence[int], limit_bytes: int
) -> Iterator[tuple[list[int], bool]]:
    """Put tensors together that can travel together.

    Args:
        tensors: Strided.
        which: Those to group, in order, as indices.
        limit_bytes: Size at which a group is closed.
    Yields:
        The indices of each group, and whether its members lie in one storage that is to be kept.
    """
    owners: dict[tuple[int, torch.dtype, bool], list[int]] = {}
    for i in which:
        t = tensors[i]
        owners.setdefault((t.untyped_storage().data_ptr(), t.dtype, t.requires_grad), []).append(i)
    together = [members for members in owners.values() if keeps_storage([tensors[i] for i in members])]
    yield from ((members, True) for members in together)
    taken = {i for members in together for i in members}
    rest = [i for i in which if i not in taken]
    for members in group_tensors([tensors[i] for i in rest], lambda t: (t.dtype, t.requires_grad), limit_bytes):
        yield [rest[k] for k in members], False
