"""What the kernels of all optimizers share: sums over devices, a look at them, writes to devices, and the launch."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from everygpu.comm.kernels import KINDS, at, num_programs, sum_blocks
from everygpu.parallel.buckets.plan import BLOCK_NUMEL, BlockRange


@triton.jit
def is_finite(block):
    """Tell whether all values of a block are finite: zero times any other is not zero."""
    return tl.sum(block * 0.0, axis=0) == 0.0


@triton.jit
def note_sources(
    found, grads, lengths, block, stride, rank, SOURCES: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr
) -> None:
    """Write down which devices' gradients of a block are not finite."""
    inside = tl.arange(0, BLOCK)
    inside_length = inside < tl.load(lengths + block)
    for step in tl.static_range(SOURCES):
        source = (rank + step) % SOURCES
        grad = tl.load(at(grads, source * stride + block, KIND) + inside, mask=inside_length, other=0.0).to(tl.float32)
        if not is_finite(grad):
            tl.store(at(found, 0, tl.float32) + source, 1.0)


@triton.jit
def scaled_sum(
    grads,
    lengths,
    block,
    stride,
    rank,
    factor,
    options,
    found,
    SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
):
    """Add one block of gradients up; multiplied by the factor, and by the sign that begins each row of options.

    Returns:
        The sum, and whether all of it is finite.
    """
    total = sum_blocks(grads, lengths, block, stride, rank, SOURCES, BLOCK, KIND, tl.float32)
    grad = total * tl.load(factor) * tl.load(options)
    kept = is_finite(grad)
    if not kept:
        note_sources(found, grads, lengths, block, stride, rank, SOURCES, BLOCK, KIND)
    return grad, kept


@triton.jit
def store_on_all(values, block, stride, inside, new, rank, DEVICES: tl.constexpr, KIND: tl.constexpr) -> None:
    """Write one block of new values to all devices, each beginning with another one."""
    for step in tl.static_range(DEVICES):
        tl.store(at(values, (rank + step) % DEVICES * stride + block, KIND) + inside, new.to(KIND))


def run_update(
    kernel: Any,
    grads: Tensor,
    values: Tensor,
    states: Tensor,
    rows: Tensor,
    lengths: Tensor,
    table: Tensor,
    found: Tensor,
    *,
    factor: Tensor,
    span: BlockRange,
    rank: int,
) -> None:
    """Update blocks by an optimizer's kernel, on the current stream of their device.

    Args:
        kernel: The optimizer's.
        grads: Addresses of the gradients of each block, to be added up, aligned to 16 bytes; shape (sources, blocks),
            int64, on the device.
        values: Addresses of the parameters on all devices, likewise; shape (devices, blocks).
        states: Addresses of the states, shape (names, blocks), in the order of ``UpdateRule.states``. Parameters,
            gradients and states have one dtype, float32 or bfloat16.
        rows: For each block its row in the table, int32; -1 for one to leave alone.
        lengths: For each block how many elements of a parameter are in it, int32.
        table: Hyperparameters, shape (rows, columns), float32; see ``UpdateRule.columns``.
        factor: What the sum of the gradients is multiplied by; shape (), float32.
        span: Which blocks.
        found: Address of a number for each device, shape (1,): 1 where its gradients are not finite.
        rank: This device's place in ``values``.
    """
    kernel[grid(grads, span)](
        grads, values, states, rows, lengths, table, found, factor, *numbers(grads, span), rank,
        SOURCES=grads.shape[0], DEVICES=values.shape[0], COLUMNS=table.shape[1], BLOCK=BLOCK_NUMEL,
        KIND=KINDS[span.dtype][0],
    )  # fmt: skip


def grid(grads: Tensor, span: BlockRange) -> tuple[int]:
    """Return how many programs serve some blocks."""
    return (num_programs(span.num_blocks, grads.device, grads.shape[0] - 1),)


def numbers(grads: Tensor, span: BlockRange) -> tuple[int, int, int]:
    """Return the first block, the one after the last, and how many there are in the tables."""
    return span.first, span.first + span.num_blocks, grads.shape[1]
