"""Random programs on a batch of shards equal the same programs on the joined tensor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tests.parallel.batches import Rows, assert_same_call, attempt, numbers, row_counts
from tests.parallel.sharded.uses import ones


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad * 2)
    return x


STEPS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda x, y: x + y,
    lambda x, y: x * y.sigmoid(),
    lambda x, y: x - y.mean(0),
    lambda x, y: x.t(),
    lambda x, y: x.view(-1, 2, 3),
    lambda x, y: x.reshape(-1, 6),
    lambda x, y: x.flatten(1),
    lambda x, y: x[:, 1:],
    lambda x, y: x[:, 0],
    lambda x, y: x.unsqueeze(1),
    lambda x, y: x.squeeze(),
    lambda x, y: x.softmax(-1),
    lambda x, y: x.sort(-1)[0],
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: x.max(-1)[0],
    lambda x, y: x.sum(0, keepdim=True),
    lambda x, y: x.detach(),
    lambda x, y: x.clone(),
    lambda x, y: x @ ones(x.shape[-1], 6),
    lambda x, y: torch.cat([x, y], -1),
    lambda x, y: torch.stack([x, y], 1),
    lambda x, y: x[:2],
    lambda x, y: x.mul_(2),
    lambda x, y: x.add_(y),
    lambda x, y: x.clamp_(-1, 1),
    lambda x, y: x[:, 0].mul_(0.5),
    lambda x, y: x[0].zero_(),
    lambda x, y: x.detach().mul_(1.5),
    lambda x, y: x.copy_(y),
    lambda x, y: x.data.mul_(0.9),
    lambda x, y: x.expand(2, *x.shape),
    lambda x, y: x.unbind(-1)[0],
    lambda x, y: x.mean(),
    lambda x, y: x.float().double(),
    lambda x, y: hooked(x * 1),
    lambda x, y: x.numpy(force=True) is not None and x * 1,
    lambda x, y: x[0].sum().item() and x,
    lambda x, y: [v.sum().item() for v in x.detach()] and x,
    lambda x, y: x[...],
    lambda x, y: torch.std_mean(x),
    lambda x, y: F.mse_loss(x, y),
    lambda x, y: torch.cat([x, y]),
    lambda x, y: F.one_hot(x.argmax(-1), 4).double(),
    lambda x, y: F.one_hot((x * 9).long(), num_classes=-1),
    lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    lambda x, y: x[x > y],
    lambda x, y: x.gather(-1, y.argsort(-1)),
    lambda x, y: x.masked_fill_(y > 0.5, 0.5),
    lambda x, y: x.cumsum(0),
    lambda x, y: x.roll(1, 0),
    lambda x, y: torch.einsum("bi,ci->bc", x, y),
    lambda x, y: torch.zeros_like(x).index_add(0, torch.arange(len(x)), y),
    lambda x, y: torch.zeros(3, *x.shape[1:], dtype=x.dtype).index_add(0, torch.arange(len(x)) % 3, x),
    lambda x, y: F.cross_entropy(x, y.argmax(1), ignore_index=0),
    lambda x, y: F.batch_norm(x, None, None, training=True),
    lambda x, y: x.__setitem__((slice(None), 0), y[:, -1]) or x,
    lambda x, y: x.__setitem__(slice(1, None), y[:-1]) or x,
    lambda x, y: x.masked_scatter_(x > 0.5, y),
    lambda x, y: x.repeat_interleave(2, 0),
    lambda x, y: torch.cdist(x, y),
    lambda x, y: sum(x.unbind()),
]


def walk(starts: list[Tensor], steps: list[tuple[int, int, int]]) -> list[Any]:
    """Take steps, each from two of the tensors found so far; keep what fails as the error's type."""
    found: list[Any] = list(starts)
    for step, one, other in steps:
        tensors = [t for t in found if isinstance(t, Tensor)]
        result, error = attempt(STEPS[step], tensors[one % len(tensors)], tensors[other % len(tensors)])
        found.append(result if error is None else error.__name__)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_chains", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_random_chains(num_chains: int) -> None:
    @settings(max_examples=num_chains, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        sizes=row_counts(9),
        steps=st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9), st.integers(0, 9)), max_size=12),
    )
    def check(sizes: list[int], steps: list[tuple[int, int, int]]) -> None:
        n = sum(sizes)
        args = (Rows(numbers(n, 6), 0), Rows(numbers(n, 6, seed=1), 0), numbers(n, 6, seed=2))
        assert_same_call(lambda *starts: walk(list(starts), steps), args, sizes, twice=True)

    check()
