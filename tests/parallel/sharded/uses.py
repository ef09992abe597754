"""Tests that any use of a batch equals the same use of the joined tensor; subclasses name the uses."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from tests.parallel.batches import Rows, assert_same_call, numbers, row_counts

PROPERTY = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
C = 5


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def labels(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0]) % C


class Use:
    """Mark a subclass with ``parametrize("use", ...)``: functions of a tensor of shape (rows, 5) that is not a leaf."""

    @PROPERTY
    @given(sizes=row_counts(12))
    def test_like_the_joined_tensor(self, use: Callable[[Tensor], Any], sizes: list[int]) -> None:
        def both(x: Tensor) -> Any:
            return use(x), x  # what became of the operand

        assert_same_call(both, (Rows(numbers(sum(sizes), C), 0),), sizes)

    def test_on_the_other_dimension(self, use: Callable[[Tensor], Any]) -> None:
        assert_same_call(lambda x: use(x), (Rows(numbers(5, 5), 1),), [2, 0, 3])

    def test_after_the_batch_was_joined(self, use: Callable[[Tensor], Any]) -> None:
        def joined(x: Tensor) -> Any:
            x[0]  # a view of rows: the joined tensor is made and handed out
            return use(x)

        assert_same_call(joined, (Rows(numbers(6, C), 0),), [4, 2])
