"""Gradients added up before an update that has to know their norm."""

import triton
import triton.language as tl
from torch import Tensor

from everygpu.comm.kernels import KINDS, at, sum_blocks
from everygpu.parallel.buckets.plan import BLOCK_NUMEL
from everygpu.step.device_tables import BlockRange
from everygpu.step.kernels.blocks import grid, note_sources, numbers


@triton.jit(do_not_specialize=["first", "end", "stride", "rank"])
def _reduce(
    grads,
    targets,
    squares,
    rows,
    lengths,
    found,
    first,
    end,
    stride,
    rank,
    SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    bad = tl.zeros((BLOCK,), tl.float32)
    for block in range(first + tl.program_id(0), end, tl.num_programs(0)):
        square = 0.0
        if tl.load(rows + block) >= 0:
            total = sum_blocks(grads, lengths, block, stride, rank, SOURCES, BLOCK, KIND, tl.float32)
            tl.store(at(targets, block, KIND) + tl.arange(0, BLOCK), total.to(KIND))
            square = tl.sum(total * total, axis=0)
            bad += total * 0.0
        tl.store(squares + block, square)
    note_sources(bad, found, grads, rows, lengths, first, end, stride, SOURCES, BLOCK, KIND)


def run(
    grads: Tensor,
    targets: Tensor,
    squares: Tensor,
    rows: Tensor,
    lengths: Tensor,
    found: Tensor,
    *,
    span: BlockRange,
    rank: int,
) -> None:
    """Add gradients up, on the current stream of their device; others as for ``blocks.run_update``.

    Args:
        targets: Addresses of where the sums go, in the gradients' dtype; shape (1, blocks), int64.
        squares: Where the sum of each block's squares goes, shape (blocks,), float32.
    """
    _reduce[grid(grads, span)](
        grads, targets, squares, rows, lengths, found, *numbers(grads, span), rank,
        SOURCES=grads.shape[0], BLOCK=BLOCK_NUMEL, KIND=KINDS[span.dtype][0],
    )  # fmt: skip
