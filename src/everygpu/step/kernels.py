"""Kernels that add up all devices' gradients, update one device's share, and hand the new values to all.

Each device runs them on its own chunks, reading and writing the other devices' memory directly: every gradient crosses
the wire once, every parameter once, and nothing is kept in between. Whatever is in memory, sums and updates are worked
out in float32, and rounded once.

All memory is found block by block, in tables of addresses that have a column for each block of the device's chunks: so
one launch serves a bucket as well as all of them.
"""

import triton
import triton.language as tl
from torch import Tensor

from everygpu.comm.kernels import KINDS, at, num_programs, sum_blocks
from everygpu.parallel.buckets.plan import BLOCK_NUMEL, BlockRange

ADAM_COLUMNS = ("sign", "decay", "l2", "beta1", "rest1", "beta2", "rest2", "eps", "step_size", "inverse_root2")
"""Of a row of the table of options; ``rest`` is one minus beta, ``inverse_root2`` 1 / sqrt(1 - beta2 ** step)."""

SGD_COLUMNS = ("sign", "l2", "momentum", "fresh", "nesterov", "lr")
"""Likewise; ``fresh`` is how much of the gradient goes into the momentum."""


@triton.jit
def _scaled_sum(
    grads, lengths, block, stride, rank, factor, options, SOURCES: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr
):
    """Add one block of gradients up; multiplied by the factor, and by the sign that begins each row of options."""
    total = sum_blocks(grads, lengths, block, stride, rank, SOURCES, BLOCK, KIND, tl.float32)
    return total * tl.load(factor) * tl.load(options)


@triton.jit
def _hand_out(values, block, stride, inside, new, rank, DEVICES: tl.constexpr, KIND: tl.constexpr) -> None:
    """Write one block of new values to all devices, each beginning with another one."""
    for step in tl.static_range(DEVICES):
        tl.store(at(values, (rank + step) % DEVICES * stride + block, KIND) + inside, new.to(KIND))


@triton.jit(do_not_specialize=["first", "end", "stride", "rank"])
def _reduce(
    grads,
    targets,
    squares,
    rows,
    lengths,
    first,
    end,
    stride,
    rank,
    SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    for block in range(first + tl.program_id(0), end, tl.num_programs(0)):
        square = 0.0
        if tl.load(rows + block) >= 0:
            total = sum_blocks(grads, lengths, block, stride, rank, SOURCES, BLOCK, KIND, tl.float32)
            tl.store(at(targets, block, KIND) + tl.arange(0, BLOCK), total.to(KIND))
            square = tl.sum(total * total, axis=0)
        tl.store(squares + block, square)


@triton.jit(do_not_specialize=["first", "end", "stride", "rank"])
def _adam(
    grads,
    values,
    states,
    rows,
    lengths,
    table,
    factor,
    first,
    end,
    stride,
    rank,
    SOURCES: tl.constexpr,
    DEVICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    inside = tl.arange(0, BLOCK)
    for block in range(first + tl.program_id(0), end, tl.num_programs(0)):
        row = tl.load(rows + block)
        if row >= 0:
            options = table + row * COLUMNS
            mean_at = at(states, block, KIND) + inside
            square_at = at(states, stride + block, KIND) + inside
            # What is here arrives while the gradients are on their way.
            value = tl.load(at(values, rank * stride + block, KIND) + inside).to(tl.float32)
            mean = tl.load(mean_at).to(tl.float32)
            square = tl.load(square_at).to(tl.float32)
            grad = _scaled_sum(grads, lengths, block, stride, rank, factor, options, SOURCES, BLOCK, KIND)
            grad += tl.load(options + 2) * value
            mean += tl.load(options + 4) * (grad - mean)
            square = tl.load(options + 5) * square + tl.load(options + 6) * grad * grad
            tl.store(mean_at, mean.to(KIND))
            tl.store(square_at, square.to(KIND))
            value *= tl.load(options + 1)
            value -= tl.load(options + 8) * mean / (tl.sqrt(square) * tl.load(options + 9) + tl.load(options + 7))
            _hand_out(values, block, stride, inside, value, rank, DEVICES, KIND)


@triton.jit(do_not_specialize=["first", "end", "stride", "rank"])
def _sgd(
    grads,
    values,
    states,
    rows,
    lengths,
    table,
    factor,
    first,
    end,
    stride,
    rank,
    SOURCES: tl.constexpr,
    DEVICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    inside = tl.arange(0, BLOCK)
    for block in range(first + tl.program_id(0), end, tl.num_programs(0)):
        row = tl.load(rows + block)
        if row >= 0:
            options = table + row * COLUMNS
            value = tl.load(at(values, rank * stride + block, KIND) + inside).to(tl.float32)
            grad = _scaled_sum(grads, lengths, block, stride, rank, factor, options, SOURCES, BLOCK, KIND)
            grad += tl.load(options + 1) * value
            momentum = tl.load(options + 2)
            if momentum != 0:
                momentum_at = at(states, block, KIND) + inside
                kept = momentum * tl.load(momentum_at).to(tl.float32) + tl.load(options + 3) * grad
                tl.store(momentum_at, kept.to(KIND))
                nesterov = tl.load(options + 4)
                grad = nesterov * (grad + momentum * kept) + (1 - nesterov) * kept
            _hand_out(values, block, stride, inside, value - tl.load(options + 5) * grad, rank, DEVICES, KIND)


def run_reduce(
    grads: Tensor, targets: Tensor, squares: Tensor, rows: Tensor, lengths: Tensor, *, span: BlockRange, rank: int
) -> None:
    """Add gradients up, on the current stream of their device; others as for ``run_adam``.

    Args:
        targets: Addresses of where the sums go, in the gradients' dtype; shape (1, blocks), int64.
        squares: Where the sum of each block's squares goes, shape (blocks,), float32.
    """
    _reduce[_grid(grads, span)](
        grads, targets, squares, rows, lengths, *_numbers(grads, span), rank,
        SOURCES=grads.shape[0], BLOCK=BLOCK_NUMEL, KIND=KINDS[span.dtype][0],
    )  # fmt: skip


def run_adam(
    grads: Tensor,
    values: Tensor,
    states: Tensor,
    rows: Tensor,
    lengths: Tensor,
    table: Tensor,
    *,
    factor: Tensor,
    span: BlockRange,
    rank: int,
) -> None:
    """Update blocks by Adam or AdamW, on the current stream of their device.

    Args:
        grads: Addresses of the gradients of each block, to be added up, aligned to 16 bytes; shape (sources, blocks),
            int64, on the device.
        values: Addresses of the parameters on all devices, likewise; shape (devices, blocks).
        states: Addresses of the running means, and of the running means of squares; shape (2, blocks). Parameters,
            gradients and states have one dtype, float32 or bfloat16.
        rows: For each block its row in the table, int32; -1 for one to leave alone.
        lengths: For each block how many elements of a parameter are in it, int32.
        table: Options, shape (rows, len(ADAM_COLUMNS)), float32.
        factor: What the sum of the gradients is multiplied by; shape (), float32.
        span: Which blocks.
        me: This device's place in ``values``.
    Source:
        ``torch.optim.AdamW``; Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """
    _adam[_grid(grads, span)](
        grads, values, states, rows, lengths, table, factor, *_numbers(grads, span), rank,
        SOURCES=grads.shape[0], DEVICES=values.shape[0], COLUMNS=table.shape[1], BLOCK=BLOCK_NUMEL,
        KIND=KINDS[span.dtype][0],
    )  # fmt: skip


def run_sgd(
    grads: Tensor,
    values: Tensor,
    states: Tensor,
    rows: Tensor,
    lengths: Tensor,
    table: Tensor,
    *,
    factor: Tensor,
    span: BlockRange,
    rank: int,
) -> None:
    """Update blocks by SGD; see ``run_adam``.

    Args:
        states: Addresses of the momentum, shape (1, blocks); untouched where the options have none.
        table: Options, shape (rows, len(SGD_COLUMNS)), float32.
    Source:
        ``torch.optim.SGD``.
    """
    _sgd[_grid(grads, span)](
        grads, values, states, rows, lengths, table, factor, *_numbers(grads, span), rank,
        SOURCES=grads.shape[0], DEVICES=values.shape[0], COLUMNS=table.shape[1], BLOCK=BLOCK_NUMEL,
        KIND=KINDS[span.dtype][0],
    )  # fmt: skip


def _grid(grads: Tensor, span: BlockRange) -> tuple[int]:
    return (num_programs(span.num_blocks, grads.device, grads.shape[0] - 1),)


def _numbers(grads: Tensor, span: BlockRange) -> tuple[int, int, int]:
    """Return the first block, the one after the last, and how many there are in the tables."""
    return span.first, span.first + span.num_blocks, grads.shape[1]
