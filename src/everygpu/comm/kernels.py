"""Kernels that read and write other GPUs' memory: they broadcast parameters, reduce gradients and copy small tensors.

They find memory by addresses, block by block, so that nothing has to be put side by side first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

KINDS = {
    torch.float32: (tl.float32, tl.float32),
    torch.bfloat16: (tl.bfloat16, tl.float32),
    torch.float16: (tl.float16, tl.float32),
    torch.float64: (tl.float64, tl.float64),
}
"""For each dtype its name in the kernels, and the dtype of the accumulator."""


def num_programs(num_blocks: int, device: torch.device, num_away: int) -> int:
    """Return how many programs move blocks while the model computes; each moves one block after another.

    Two blocks on their way for each multiprocessor keep the links busy. More programs would wait for the links in
    places where backward's kernels could compute: with as many as there are blocks, GPT-2's step takes 2% longer on
    four H200. A device that reads only its own memory is quicker with all.

    Args:
        num_blocks: How many there are.
        device: Where the programs run.
        num_away: Of how many other devices each program asks for a block at a time.
    """
    if num_away == 0 or device.type != "cuda":  # or Triton's interpreter
        return num_blocks
    num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(num_blocks, num_multiprocessors * (2 if num_away == 1 else 1))


@triton.jit
def at(addresses, index, KIND: tl.constexpr):
    """Find memory by its address; it is aligned, so that a thread loads 16 bytes at a time."""
    # Said of the pointer: what is said of the number doesn't survive the cast.
    return tl.multiple_of(tl.load(addresses + index).to(tl.pointer_type(KIND)), 16)


@triton.jit
def sum_tree(
    sources,
    stride,
    inside,
    kept,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    SPAN: tl.constexpr,
    KIND: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Sum a block of the sources from one to before another, rounded at each sum as ``comm.tree_sum`` does."""
    if LAST - FIRST == 1:
        return tl.load(at(sources, FIRST * stride, KIND) + inside, mask=kept)
    elif LAST - FIRST <= SPAN // 2:  # noqa: RET505 - else Triton would go on after the return
        return sum_tree(sources, stride, inside, kept, FIRST, LAST, SPAN // 2, KIND, WIDE)
    else:
        a = sum_tree(sources, stride, inside, kept, FIRST, FIRST + SPAN // 2, SPAN // 2, KIND, WIDE)
        b = sum_tree(sources, stride, inside, kept, FIRST + SPAN // 2, LAST, SPAN // 2, KIND, WIDE)
        return (a.to(WIDE) + b.to(WIDE)).to(KIND)


@triton.jit
def sum_blocks(
    sources,
    lengths,
    block,
    num_blocks,
    rank,
    SOURCES: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Sum one block over all devices. Each device begins with its own block, so that no link serves all at once; but
    with ``SPAN``, the power of two from ``SOURCES`` on, blocks are summed by a tree over their places.
    """
    inside = tl.arange(0, BLOCK)
    length = tl.load(lengths + block)
    total = tl.zeros((BLOCK,), WIDE)
    if SPAN:
        if length == BLOCK:
            total = sum_tree(sources + block, num_blocks, inside, None, 0, SOURCES, SPAN, KIND, WIDE).to(WIDE)
        else:
            kept = inside < length
            total = sum_tree(sources + block, num_blocks, inside, kept, 0, SOURCES, SPAN, KIND, WIDE).to(WIDE)
    elif length == BLOCK:  # asked once, so that the loads of all devices are on their way together
        for step in tl.static_range(SOURCES):
            source = at(sources, (rank + step) % SOURCES * num_blocks + block, KIND)
            total += tl.load(source + inside).to(WIDE)
    else:
        for step in tl.static_range(SOURCES):
            source = at(sources, (rank + step) % SOURCES * num_blocks + block, KIND)
            total += tl.load(source + inside, mask=inside < length, other=0.0).to(WIDE)
    return total


@triton.jit(do_not_specialize=["begin", "num_blocks", "rank"])
def _send(
    sources, lengths, targets, begin, num_blocks, rank, TARGETS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr
) -> None:
    inside = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        length = tl.load(lengths + block)
        source = at(sources, block, KIND) + inside
        start = tl.multiple_of(begin + tl.cast(block, tl.int64) * BLOCK, BLOCK)
        if length == BLOCK:
            values = tl.load(source)
            for step in tl.static_range(TARGETS):
                tl.store(at(targets, (rank + step) % TARGETS, KIND) + start + inside, values)
        elif length > 0:
            kept = inside < length
            values = tl.load(source, mask=kept)
            for step in tl.static_range(TARGETS):
                tl.store(at(targets, (rank + step) % TARGETS, KIND) + start + inside, values, mask=kept)


@triton.jit(do_not_specialize=["begin", "index", "num_blocks", "rank"])
def _add(
    sources,
    lengths,
    targets,
    begin,
    index,
    num_blocks,
    rank,
    squares,
    status,
    found,
    SOURCES: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    WIDE: tl.constexpr,
    MARK: tl.constexpr,
) -> None:
    inside = tl.arange(0, BLOCK)
    bad = tl.zeros((BLOCK,), WIDE)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        length = tl.load(lengths + block)
        if length > 0:
            total = sum_blocks(sources, lengths, block, num_blocks, rank, SOURCES, SPAN, BLOCK, KIND, WIDE)
            start = tl.multiple_of(begin + tl.cast(block, tl.int64) * BLOCK, BLOCK)
            target = at(targets, index, KIND) + start + inside
            if length == BLOCK:
                tl.store(target, total.to(KIND))
            else:
                tl.store(target, total.to(KIND), mask=inside < length)
            if squares is not None:
                tl.store(squares + block, tl.sum(total * total, axis=0))
            bad += total * 0.0
    if found is not None:  # noqa: SIM102 - None is known when compiling
        # Looked at block by block, this would hold up those behind: a sum over a block waits for all of its threads.
        if tl.sum(bad, axis=0) != 0.0:  # noqa: SIM102 - not to be loaded by all
            if tl.load(found + index) == 0.0:  # else the status says already that nothing is updated
                tl.store(found + index, 1.0)
                tl.store(at(status, 0, tl.float32), MARK)


@triton.jit(do_not_specialize=["source", "target", "num_words"])
def _copy(source, target, num_words, BLOCK: tl.constexpr) -> None:
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = inside < num_words
    words = tl.load(source.to(tl.pointer_type(tl.int32)) + inside, mask=kept)
    tl.store(target.to(tl.pointer_type(tl.int32)) + inside, words, mask=kept)


def run_copy(target: Tensor, source: Tensor, *, block: int = 1024) -> None:
    """Copy bytes from one GPU to another, on the current stream of either.

    Args:
        target: As many bytes as ``source``; both contiguous, whole words of 4 bytes, at addresses that are multiples.
        source: Less than 2 GiB.
        block: Words for each program.
    """
    num_words = source.nbytes // 4
    _copy[(triton.cdiv(num_words, block),)](source.data_ptr(), target.data_ptr(), num_words, BLOCK=block)


def run_send(
    sources: Tensor, lengths: Tensor, targets: Tensor, *, dtype: torch.dtype, block: int, begin: int, rank: int
) -> None:
    """Copy blocks to several devices, on the current stream of one of them.

    Args:
        sources: Address of each block, aligned to 16 bytes, shape (blocks,), int64, on the device.
        lengths: How many elements are in each, int32.
        targets: Addresses of flat memory on all devices that get the blocks, shape (devices,), int64.
        dtype: One of ``KINDS``.
        block: Elements from the beginning of one block to that of the next.
        begin: Where the first block goes in ``targets``, a multiple of ``block``.
        rank: This device's place in ``targets``.
    """
    num_blocks = lengths.numel()
    _send[(num_programs(num_blocks, lengths.device, 1),)](
        sources, lengths, targets, begin, num_blocks, rank, TARGETS=targets.numel(), BLOCK=block, KIND=KINDS[dtype][0]
    )  # fmt: skip


def run_add(
    sources: Tensor,
    lengths: Tensor,
    targets: Tensor,
    *,
    dtype: torch.dtype,
    block: int,
    begin: int,
    index: int,
    rank: int,
    squares: Tensor | None = None,
    status: Tensor | None = None,
    found: Tensor | None = None,
    mark: float = 0.0,
    by_tree: bool = False,
) -> None:
    """Sum the blocks of several devices, on the current stream of one of them; other arguments as for ``run_send``.

    Args:
        sources: Addresses of the blocks on each device, shape (devices, blocks).
        targets: A table in which ``index`` is the address of the flat memory, on any device, that gets the sums.
        begin: Where the first goes.
        rank: This device's place in ``sources``.
        squares: Where the sum of the squares of each block's sums goes, shape (blocks,), float32.
        status: Address of a number, shape (1,), that becomes ``mark`` where ``found`` was 0 and a sum isn't finite.
        found: A table in which ``index`` becomes 1 where a sum isn't finite; with ``status``.
        mark: See ``status``.
        by_tree: Sum by ``comm.tree_sum``'s tree over the places in ``sources``, whichever device does.
    """
    kind, wide = KINDS[dtype]
    num_blocks, num = lengths.numel(), sources.shape[0]
    _add[(num_programs(num_blocks, lengths.device, num - 1),)](
        sources, lengths, targets, begin, index, num_blocks, rank, squares, status, found,
        SOURCES=num, SPAN=1 << (num - 1).bit_length() if by_tree else 0, BLOCK=block, KIND=kind, WIDE=wide, MARK=mark,
    )  # fmt: skip
