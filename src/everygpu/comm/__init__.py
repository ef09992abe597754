"""Move tensors between devices: one interface, the fastest transfer that works.

Every function is ordered after the work already queued on the devices' current streams. Between GPUs whose
direct copies don't arrive, everything goes through host memory; else buffers go by NCCL among three GPUs or
more, and by plain copies elsewhere. A buffer's chunks are as many equal parts of it as there are devices; the
j-th is device j's own.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from everygpu.comm import copies, nccl, staged
from everygpu.devices.p2p import reach_each_other, trusted_peers
from everygpu.torch_private.core import has_triton as has_triton
from everygpu.torch_private.core import without_torch_function


def copy(x: Tensor, device: torch.device, *, fresh: bool = False) -> Tensor:
    """Copy a tensor of any layout to a device, by autograd; without waiting, unless that is the CPU.

    A tensor that is there already is returned itself, unless a fresh copy is asked for.
    """
    if trusted_peers((x.device, device)):
        return copies.copy(x, device, fresh=fresh)
    return staged.copy(x, device)


def as_plain(x: Tensor) -> Tensor:
    """Show a subclass that is a plain tensor in C++ as that tensor; one with a dispatch of its own stays.

    ``torch.nn.DataParallel`` also cuts, copies and joins in C++: methods of the class, such as a ``to`` that needs the
    attributes of a whole object, aren't called.
    """
    if type(x) in (Tensor, nn.Parameter) or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return x
    with without_torch_function():
        return Tensor.as_subclass(x, Tensor)


def copy_to_each(x: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
    """Copy a tensor to several devices, as by ``copy``; at once in a CUDA graph."""
    if trusted_peers((x.device, *devices)):
        return copies.copy_to_each(x, devices)
    return [copy(x, d) for d in devices]


with_own_node = copies.with_own_node
"""Return a view whose backward runs on the leaf's own device."""


def copy_from_each(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors from several devices to one, as by ``copy``; at once in a CUDA graph, and no gradients flow back."""
    if trusted_peers((device, *(t.device for t in tensors))):
        return copies.copy_from_each(tensors, device)
    return [copy(t, device) for t in tensors]


def connect(devices: Sequence[torch.device]) -> None:
    """Enable peer access between GPUs, as torch does at the first copy between two.

    CUDA graphs need it before a capture, which forbids it, and forbids loading the kernel of small copies. Kernels that
    read other GPUs' memory need it as well. https://github.com/pytorch/pytorch/issues/133984
    """
    for source, target in itertools.permutations(dict.fromkeys(d for d in devices if d.type == "cuda"), 2):
        copy(torch.zeros(1, device=source), target)
        if has_triton() and reach_each_other((source, target)):
            copies.link(source, target)


def fill(target: Tensor, source: Tensor) -> None:
    """Copy a tensor into another of the same shape and dtype, of any strides, on any device."""
    backend = copies if trusted_peers((target.device, source.device)) else staged
    backend.fill(target, source)


def broadcast(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Broadcast one buffer, of shape (numel,), into others."""
    if not trusted_peers(t.device for t in (source, *targets)):
        staged.broadcast(source, targets)
    elif _takes_nccl([source, *targets]):
        nccl.broadcast(source, targets)
    else:
        copies.broadcast(source, targets)


def reduce(sources: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum buffers on one device, in the order given or in NCCL's own; the first may be overwritten."""
    here = torch.empty(0, device=device)
    if not trusted_peers([device, *(s.device for s in sources)]):
        return staged.reduce(sources, device)
    if _takes_nccl([here, *sources]):
        return nccl.reduce(sources, device)
    return copies.reduce(sources, device)


def reduce_scatter(buffers: Sequence[Tensor]) -> None:
    """Reduce-scatter buffers, one per device: each gets the sum of its own chunk; its other chunks are undefined."""
    if _takes_nccl(buffers):
        nccl.reduce_scatter(buffers)
        return
    for own, column in enumerate(_columns(buffers)):
        total = copy(column[0], column[own].device, fresh=own > 0)
        for chunk in column[1:]:
            total.add_(copy(chunk, total.device))
        if own > 0:
            column[own].copy_(total)


def tree_sum(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    """Add tensors up by a binary tree over their places, by autograd: the same bits, whichever device each is on.

    Neighbours are added where the first of them is. What is missing counts nothing; None where all are.
    """
    found = _sum_tree(tensors)
    return None if found is None else copy(found, device)


def _sum_tree(tensors: Sequence[Tensor | None]) -> Tensor | None:
    if len(tensors) < 2:
        return tensors[0] if tensors else None
    half = first_half(len(tensors))
    return add_pair(_sum_tree(tensors[:half]), _sum_tree(tensors[half:]))


def first_half(num: int) -> int:
    """Return how many of several places are in the first half of ``tree_sum``'s tree: a power of two."""
    return 1 << ((num - 1).bit_length() - 1)


def add_pair(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Add two neighbours of ``tree_sum`` up, where the first is."""
    if a is None or b is None:
        return b if a is None else a
    b = copy(b, a.device)
    # Dense + sparse is defined, sparse + dense is not.
    return b + a if a.layout is not torch.strided and b.layout is torch.strided else a + b


def tree_reduce_scatter(buffers: Sequence[Tensor]) -> None:
    """Add the j-th chunks of all buffers up in the j-th buffer, by ``tree_sum``."""
    for own, column in enumerate(_columns(buffers)):
        total = tree_sum(column, column[own].device)
        if total is not None:
            column[own].copy_(total)


def all_gather(buffers: Sequence[Tensor]) -> None:
    """All-gather buffers: copy each device's own chunk into the other buffers, which are equal afterwards."""
    if _takes_nccl(buffers):
        nccl.all_gather(buffers)
        return
    for own, column in enumerate(_columns(buffers)):
        broadcast(column[own], (*column[:own], *column[own + 1 :]))


def _takes_nccl(buffers: Sequence[Tensor]) -> bool:
    """Whether to use NCCL: between two GPUs, a copy is as fast."""
    return len(buffers) > 2 and nccl.can_serve(buffers) and trusted_peers(b.device for b in buffers)


def _columns(buffers: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(b.chunk(len(buffers)) for b in buffers)))
