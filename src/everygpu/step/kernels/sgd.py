"""SGD; the momentum is untouched where the options have none.

Source:
    ``torch.optim.SGD``.
"""

from functools import partial

import triton
import triton.language as tl

from everygpu.comm.kernels import at
from everygpu.step.kernels.blocks import note_sources, run_update, scaled_sum, store_on_all


@triton.jit(do_not_specialize=["first", "end", "stride", "rank"])
def _sgd(
    grads, values, states, rows, lengths, table, found, factor, first, end, stride, rank,
    SOURCES: tl.constexpr, DEVICES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
) -> None:  # fmt: skip
    inside = tl.arange(0, BLOCK)
    bad = tl.zeros((BLOCK,), tl.float32)
    for block in range(first + tl.program_id(0), end, tl.num_programs(0)):
        row = tl.load(rows + block)
        if row >= 0:
            options = table + row * COLUMNS
            value = tl.load(at(values, rank * stride + block, KIND) + inside).to(tl.float32)
            grad = scaled_sum(grads, lengths, block, stride, rank, factor, options, SOURCES, BLOCK, KIND)
            bad += grad * 0.0
            is_kept = grad * 0.0 != 0.0
            grad += tl.load(options + 1) * value
            momentum = tl.load(options + 2)
            if momentum != 0:
                momentum_at = at(states, block, KIND) + inside
                before = tl.load(momentum_at).to(tl.float32)
                moved = momentum * before + tl.load(options + 3) * grad
                tl.store(momentum_at, tl.where(is_kept, before, moved).to(KIND))
                nesterov = tl.load(options + 4)
                grad = nesterov * (grad + momentum * moved) + (1 - nesterov) * moved
            value = tl.where(is_kept, value, value - tl.load(options + 5) * grad)
            store_on_all(values, block, stride, inside, value, rank, DEVICES, KIND)
    note_sources(bad, found, grads, rows, lengths, first, end, stride, SOURCES, BLOCK, KIND)


run = partial(run_update, _sgd)
