"""Adagrad.

Source:
    ``torch.optim.Adagrad``; Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization", 2011.
"""

from functools import partial

import triton
import triton.language as tl

from everygpu.comm.kernels import at
from everygpu.step.kernels.blocks import note_sources, run_update, scaled_sum, store_on_all


@triton.jit(do_not_specialize=["first", "end", "stride", "rank"])
def _adagrad(
    grads, values, states, rows, lengths, table, found, factor, first, end, stride, rank,
    SOURCES: tl.constexpr, DEVICES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
) -> None:  # fmt: skip
    inside = tl.arange(0, BLOCK)
    bad = tl.zeros((BLOCK,), tl.float32)
    for block in range(first + tl.program_id(0), end, tl.num_programs(0)):
        row = tl.load(rows + block)
        if row >= 0:
            options = table + row * COLUMNS
            sum_at = at(states, block, KIND) + inside
            # What is here arrives while the gradients are on their way.
            value = tl.load(at(values, rank * stride + block, KIND) + inside).to(tl.float32)
            total = tl.load(sum_at).to(tl.float32)
            grad = scaled_sum(grads, lengths, block, stride, rank, factor, options, SOURCES, BLOCK, KIND)
            bad += grad * 0.0
            is_kept = grad * 0.0 != 0.0
            grad += tl.load(options + 1) * value
            total = tl.where(is_kept, total, total + grad * grad)
            tl.store(sum_at, total.to(KIND))
            way = tl.load(options + 2) * grad / (tl.sqrt(total) + tl.load(options + 3))
            store_on_all(values, block, stride, inside, tl.where(is_kept, value, value - way), rank, DEVICES, KIND)
    note_sources(bad, found, grads, rows, lengths, first, end, stride, SOURCES, BLOCK, KIND)


run = partial(run_update, _adagrad)
