"""What the kernels of all optimizers share: sums over devices, a look at them, writes to devices, and the launch."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from everygpu.comm.kernels import KINDS, at, num_programs, sum_blocks
from everygpu.parallel.buckets.plan import BLOCK_NUMEL
from everygpu.step.device_tables import BlockRange


@triton.jit
def scaled_sum(
    grads, lengths, block, stride, rank, factor, options, SOURCES: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr
):
    """Add one block of gradients up; multiplied by the factor, and by the sign that begins each row of options."""
    total = sum_blocks(grads, lengths, block, stride, rank, SOURCES, BLOCK, KIND, tl.float32)
    return total * tl.load(factor) * tl.load(options)


@triton.jit
def note_sources(
    bad, found, grads, rows, lengths, first, end, stride, SOURCES: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr
) -> None:
    """Write down which devices' gradients are not finite, once a program is through with its blocks.

    Looked at block by block, as they come, this would hold up the blocks behind: a sum over a block waits for all of
    its threads.

    Args:
        bad: 0 where all gradients so far were finite, else nan; shape (BLOCK,).
    """
    if tl.sum(bad, axis=0) != 0.0:
        inside = tl.arange(0, BLOCK)
        for block in range(first + tl.program_id(0), end, tl.num_programs(0)):
            if tl.load(rows + block) >= 0:
                filled = inside < tl.load(lengths + block)
                for source in tl.static_range(SOURCES):
                    place = at(grads, source * stride + block, KIND) + inside
                    grad = tl.load(place, mask=filled, other=0.0).to(tl.float32)
                    if tl.sum(grad * 0.0, axis=0) != 0.0:
                        tl.store(at(found, 0, tl.float32) + source, 1.0)


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
