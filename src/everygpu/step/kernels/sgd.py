"""SGD; the momentum is untouched where the options have none.

Source:
    ``torch.optim.SGD``.
"""

from functools import partial

import triton
import triton.language as tl

from everygpu.comm.kernels import at
from everygpu.step.kernels.blocks import run_update, scaled_sum, store_on_all


@triton.jit(do_not_specialize=["first", "end", "stride", "rank"])
def _sgd(
    grads,
    values,
    states,
    rows,
    lengths,
    table,
    found,
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
            grad, kept = scaled_sum(grads, lengths, block, stride, rank, factor, options, found, SOURCES, BLOCK, KIND)
            if kept:
                grad += tl.load(options + 1) * value
                momentum = tl.load(options + 2)
                if momentum != 0:
                    momentum_at = at(states, block, KIND) + inside
                    kept = momentum * tl.load(momentum_at).to(tl.float32) + tl.load(options + 3) * grad
                    tl.store(momentum_at, kept.to(KIND))
                    nesterov = tl.load(options + 4)
                    grad = nesterov * (grad + momentum * kept) + (1 - nesterov) * kept
                store_on_all(values, block, stride, inside, value - tl.load(options + 5) * grad, rank, DEVICES, KIND)


run = partial(run_update, _sgd)
