"""Gradients found where backward left them."""

import torch

from everygpu.parallel.buckets.grad_tables import GradTables
from everygpu.parallel.buckets.plan import BLOCK_NUMEL, plan_buckets

CPU = torch.device("cpu")


def test_tables_have_the_address_of_each_block() -> None:
    params = [torch.zeros(BLOCK_NUMEL + 1), torch.zeros(3, dtype=torch.float64)]
    plans = plan_buckets(params, 2)
    assert [[slot.index for slot in plan.slots] for plan in plans] == [[1], [0]]
    sources = GradTables(plans, [CPU] * 2, [CPU] * 3)
    grads = [torch.zeros(BLOCK_NUMEL + 1) for _ in range(3)]
    assert not any(sources.take(1, replica, {0: grad}) for replica, grad in enumerate(grads))
    assert sources.take(0, 1, {1: None})  # zeros
    assert all(not table.any() for table in sources.tables)
    sources.write()
    first, second = sources.tables
    assert first[:, 1].tolist() == [g.data_ptr() for g in grads]
    assert second[:, 1].tolist() == [g.data_ptr() + 4 * BLOCK_NUMEL for g in grads]
    assert first[0, 0] == first[2, 0] == 0 != first[1, 0]


def test_tables_are_written_once() -> None:
    plans = plan_buckets([torch.zeros(3)], 1)
    sources = GradTables(plans, [CPU], [CPU], missing=[64])
    sources.write()
    assert sources.tables[0].tolist() == [[64]]
    sources.tables[0].zero_()
    sources.write()
    assert sources.tables[0].tolist() == [[0]]


def test_a_gradient_in_another_layout_is_laid_out_anew() -> None:
    weight = torch.randn(4, 3)
    (plan,) = plan_buckets([weight], 1)
    sources = GradTables([plan], [CPU], [CPU])
    assert sources.take(0, 0, {0: weight.t().contiguous().t()})
    sources.write()
    assert sources.tables[0].item() not in (0, weight.data_ptr())
