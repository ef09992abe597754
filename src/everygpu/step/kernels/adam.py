"""Adam and AdamW.

Source:
    ``torch.optim.AdamW``; Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
"""

from functools import partial

import triton
import triton.language as tl

from everygpu.comm.kernels import at
from everygpu.step.kernels.blocks import note_sources, run_update, scaled_sum, store_on_all


@triton.jit(do_not_specialize=["first", "end", "stride", "rank"])
def _adam(
    grads, values, states, rows, lengths, table, found, factor, first, end, stride, rank,
    SOURCES: tl.constexpr, DEVICES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
) -> None:  # fmt: skip
    inside = tl.arange(0, BLOCK)
    bad = tl.zeros((BLOCK,), tl.float32)
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
            grad = scaled_sum(grads, lengths, block, stride, rank, factor, options, SOURCES, BLOCK, KIND)
            bad += grad * 0.0
            is_kept = grad * 0.0 != 0.0
            grad += tl.load(options + 2) * value
            mean = tl.where(is_kept, mean, mean + tl.load(options + 4) * (grad - mean))
            moved = tl.load(options + 5) * square + tl.load(options + 6) * grad * grad
            square = tl.where(is_kept, square, moved)
            tl.store(mean_at, mean.to(KIND))
            tl.store(square_at, square.to(KIND))
            way = tl.load(options + 8) * mean / (tl.sqrt(square) * tl.load(options + 9) + tl.load(options + 7))
            value = tl.where(is_kept, value, value * tl.load(options + 1) - way)
            store_on_all(values, block, stride, inside, value, rank, DEVICES, KIND)
    note_sources(bad, found, grads, rows, lengths, first, end, stride, SOURCES, BLOCK, KIND)


run = partial(run_update, _adam)
