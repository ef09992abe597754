"""Kernels that add up all devices' gradients, update one device's share, and hand the new values to all.

Each device runs them on its own chunk of a bucket, reading and writing the other devices' memory directly: every
gradient crosses the wire once, every parameter once, and nothing is kept in between. Whatever is in memory, sums and
updates are worked out in float32, and rounded once.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from everygpu.comm.kernels import KINDS, at, num_programs, sum_blocks
from everygpu.parallel.flat import BLOCK_NUMEL

ADAM_COLUMNS = ("sign", "decay", "l2", "beta1", "rest1", "beta2", "rest2", "eps", "step_size", "inverse_root2")
"""Of a row of the table of options; ``rest`` is one minus beta, ``inverse_root2`` 1 / sqrt(1 - beta2 ** step)."""

SGD_COLUMNS = ("sign", "l2", "momentum", "fresh", "nesterov", "lr")
"""Likewise; ``fresh`` is how much of the gradient goes into the momentum."""


@triton.jit
def _scaled_sum(
    grads,
    lengths,
    block,
    num_blocks,
    me,
    factor,
    options,
    SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
):
    """Add one block of gradients up; multiplied by the factor, and by the sign that begins each row of options."""
    total = sum_blocks(grads, lengths, block, num_blocks, me, SOURCES, BLOCK, KIND, tl.float32)
    return total * tl.load(factor) * tl.load(options)


@triton.jit
def _hand_out(values, begin, offsets, new, me, DEVICES: tl.constexpr, KIND: tl.constexpr) -> None:
    """Write one block of new values to all devices, each beginning with another one."""
    for step in tl.static_range(DEVICES):
        tl.store(at(values, (me + step) % DEVICES, KIND) + begin + offsets, new.to(KIND))


@triton.jit(do_not_specialize=["num_blocks", "me"])
def _reduce(
    grads,
    target,
    squares,
    rows,
    lengths,
    num_blocks,
    me,
    SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        square = 0.0
        if tl.load(rows + block) >= 0:
            total = sum_blocks(grads, lengths, block, num_blocks, me, SOURCES, BLOCK, KIND, tl.float32)
            tl.store(target + tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK), total.to(KIND))
            square = tl.sum(total * total, axis=0)
        tl.store(squares + block, square)


@triton.jit(do_not_specialize=["num_blocks", "me"])
def _adam(
    grads,
    values,
    mean_of,
    square_of,
    rows,
    lengths,
    table,
    factor,
    begin,
    num_blocks,
    me,
    SOURCES: tl.constexpr,
    DEVICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        row = tl.load(rows + block)
        if row >= 0:
            offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            options = table + row * COLUMNS
            # What is here arrives while the gradients are on their way.
            value = tl.load(at(values, me, KIND) + begin + offsets).to(tl.float32)
            mean = tl.load(mean_of + offsets).to(tl.float32)
            square = tl.load(square_of + offsets).to(tl.float32)
            grad = _scaled_sum(grads, lengths, block, num_blocks, me, factor, options, SOURCES, BLOCK, KIND)
            grad += tl.load(options + 2) * value
            mean += tl.load(options + 4) * (grad - mean)
            square = tl.load(options + 5) * square + tl.load(options + 6) * grad * grad
            tl.store(mean_of + offsets, mean.to(KIND))
            tl.store(square_of + offsets, square.to(KIND))
            value *= tl.load(options + 1)
            value -= tl.load(options + 8) * mean / (tl.sqrt(square) * tl.load(options + 9) + tl.load(options + 7))
            _hand_out(values, begin, offsets, value, me, DEVICES, KIND)


@triton.jit(do_not_specialize=["num_blocks", "me"])
def _sgd(
    grads,
    values,
    momentum_of,
    rows,
    lengths,
    table,
    factor,
    begin,
    num_blocks,
    me,
    SOURCES: tl.constexpr,
    DEVICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        row = tl.load(rows + block)
        if row >= 0:
            offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            options = table + row * COLUMNS
            value = tl.load(at(values, me, KIND) + begin + offsets).to(tl.float32)
            grad = _scaled_sum(grads, lengths, block, num_blocks, me, factor, options, SOURCES, BLOCK, KIND)
            grad += tl.load(options + 1) * value
            momentum = tl.load(options + 2)
            if momentum != 0:
                kept = momentum * tl.load(momentum_of + offsets).to(tl.float32) + tl.load(options + 3) * grad
                tl.store(momentum_of + offsets, kept.to(KIND))
                nesterov = tl.load(options + 4)
                grad = nesterov * (grad + momentum * kept) + (1 - nesterov) * kept
            _hand_out(values, begin, offsets, value - tl.load(options + 5) * grad, me, DEVICES, KIND)


def run_reduce(
    grads: Tensor,
    target: Tensor,
    squares: Tensor,
    rows: Tensor,
    lengths: Tensor,
    *,
    me: int,
) -> None:
    """Add the gradients of one chunk up, on the current stream of its device; others as for ``run_adam``.

    Args:
        target: Where the sum goes, shape (numel,), of the gradients' dtype.
        squares: Where the sum of each block's squares goes, shape (blocks,), float32.
    """
    num_blocks = rows.numel()
    _reduce[(num_programs(lengths, grads.shape[0] - 1),)](
        grads, target, squares, rows, lengths, num_blocks, me,
        SOURCES=grads.shape[0], BLOCK=BLOCK_NUMEL, KIND=KINDS[target.dtype][0],
    )  # fmt: skip


def run_adam(
    grads: Tensor,
    values: Tensor,
    states: Sequence[Tensor],
    rows: Tensor,
    lengths: Tensor,
    table: Tensor,
    *,
    factor: Tensor,
    begin: int,
    me: int,
) -> None:
    """Update one chunk by Adam or AdamW, on the current stream of its device.

    Args:
        grads: Addresses of the gradients of each block, to be added up, aligned to 16 bytes; shape (sources, blocks),
            int64, on the device.
        values: Addresses of all devices' buckets of parameters; shape (devices,).
        states: The chunk's running mean and running mean of squares, shape (numel,), of the dtype that parameters and
            gradients have: float32 or bfloat16.
        rows: For each block of the chunk its row in the table, int32; -1 for one to leave alone.
        lengths: For each block how many elements of a parameter are in it, int32.
        table: Options, shape (rows, len(ADAM_COLUMNS)), float32.
        factor: What the sum of the gradients is multiplied by; shape (), float32.
        begin: Where the chunk begins in its bucket.
        me: This device's place in ``values``.
    Source:
        ``torch.optim.AdamW``; Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """
    num_blocks, columns = rows.numel(), table.shape[1]
    _adam[(num_programs(lengths, grads.shape[0] - 1),)](
        grads, values, *states, rows, lengths, table, factor, begin, num_blocks, me,
        SOURCES=grads.shape[0], DEVICES=values.numel(), COLUMNS=columns, BLOCK=BLOCK_NUMEL,
        KIND=KINDS[states[0].dtype][0],
    )  # fmt: skip


def run_sgd(
    grads: Tensor,
    values: Tensor,
    states: Sequence[Tensor],
    rows: Tensor,
    lengths: Tensor,
    table: Tensor,
    *,
    factor: Tensor,
    begin: int,
    me: int,
) -> None:
    """Update one chunk by SGD; see ``run_adam``.

    Args:
        states: The chunk's momentum, shape (numel,); untouched where the options have none.
        table: Options, shape (rows, len(SGD_COLUMNS)), float32.
    Source:
        ``torch.optim.SGD``.
    """
    num_blocks, columns = rows.numel(), table.shape[1]
    _sgd[(num_programs(lengths, grads.shape[0] - 1),)](
        grads, values, *states, rows, lengths, table, factor, begin, num_blocks, me,
        SOURCES=grads.shape[0], DEVICES=values.numel(), COLUMNS=columns, BLOCK=BLOCK_NUMEL,
        KIND=KINDS[states[0].dtype][0],
    )  # fmt: skip
