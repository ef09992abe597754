"""Losses of ``torch.nn.functional`` and the modules over them, on batches: values and gradients of the whole."""

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from everygpu.parallel.sharded.batch import ShardedBatch
from tests.parallel.batches import Rows, assert_same_call, attempt, lay_out, numbers, row_counts

PROPERTY = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
C = 4
REDUCTIONS = ("none", "mean", "sum")


def signs(*shape: int) -> Tensor:
    return (numbers(*shape, seed=7) > 0.5).double() * 2 - 1


def classes(n: int, *rest: int) -> Tensor:
    return torch.arange(torch.Size([n, *rest]).numel()).reshape(n, *rest) % C


def rows(x: Tensor) -> Rows:
    return Rows(x, 0)


ELEMENTWISE: dict[str, Any] = {
    "binary_cross_entropy": lambda n: (rows(numbers(n, C)), numbers(n, C, seed=1)),
    "binary_cross_entropy_with_logits": lambda n: (rows(numbers(n, C)), numbers(n, C, seed=1)),
    "cosine_embedding_loss": lambda n: (rows(numbers(n, C)), rows(numbers(n, C, seed=1)), signs(n)),
    "gaussian_nll_loss": lambda n: (rows(numbers(n, C)), numbers(n, C, seed=1), rows(numbers(n, C, seed=2))),
    "hinge_embedding_loss": lambda n: (rows(numbers(n, C)), signs(n, C)),
    "huber_loss": lambda n: (rows(numbers(n, C)), numbers(n, C, seed=1)),
    "kl_div": lambda n: (rows(numbers(n, C).log()), numbers(n, C, seed=1)),
    "l1_loss": lambda n: (rows(numbers(n, C)), numbers(n, C, seed=1)),
    "margin_ranking_loss": lambda n: (rows(numbers(n)), rows(numbers(n, seed=1)), signs(n)),
    "mse_loss": lambda n: (rows(numbers(n, C)), numbers(n, C, seed=1)),
    "multi_margin_loss": lambda n: (rows(numbers(n, C)), classes(n)),
    "multilabel_margin_loss": lambda n: (rows(numbers(n, C)), classes(n, C) - 1),
    "multilabel_soft_margin_loss": lambda n: (rows(numbers(n, C)), (signs(n, C) + 1) / 2),
    "poisson_nll_loss": lambda n: (rows(numbers(n, C)), numbers(n, C, seed=1)),
    "smooth_l1_loss": lambda n: (rows(numbers(n, C)), numbers(n, C, seed=1)),
    "soft_margin_loss": lambda n: (rows(numbers(n, C)), signs(n, C)),
    "triplet_margin_loss": lambda n: tuple(rows(numbers(n, C, seed=s)) for s in range(3)),
    "triplet_margin_with_distance_loss": lambda n: tuple(rows(numbers(n, C, seed=s)) for s in range(3)),
    "nll_loss": lambda n: (rows(numbers(n, C).log()), classes(n)),
    "cross_entropy": lambda n: (rows(numbers(n, C)), classes(n)),
}
OTHER = ("ctc_loss",)
JOINING = ("hinge_embedding_loss", "multi_margin_loss", "multilabel_margin_loss")
KL_DIV_WARNS = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")


def test_every_loss_of_torch_is_here() -> None:
    there = {name for name in vars(F) if name.endswith(("_loss", "_div", "entropy", "_logits")) and name[0] != "_"}
    tried = {*ELEMENTWISE, *OTHER, "gumbel_softmax", "linear_cross_entropy"}
    assert {n for n in there if "reduction" in inspect.signature(getattr(F, n)).parameters} <= tried


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
class TestLosses:
    @KL_DIV_WARNS
    @PROPERTY
    @given(sizes=row_counts(), reduction=st.sampled_from(REDUCTIONS))
    def test_equal_the_loss_of_the_whole(self, name: str, sizes: list[int], reduction: str) -> None:
        loss = getattr(F, name)
        assert_same_call(
            lambda *args: loss(*args, reduction=reduction), ELEMENTWISE[name](sum(sizes)), sizes, twice=True
        )

    @pytest.mark.filterwarnings("ignore:size_average and reduce")
    def test_reductions_asked_for_the_old_way(self, name: str) -> None:
        loss = getattr(F, name)
        for old in ({"size_average": False}, {"size_average": True}, {"reduce": False}):
            if set(old) <= set(inspect.signature(loss).parameters):
                assert_same_call(partial(loss, **old), ELEMENTWISE[name](7), [4, 0, 3])

    @KL_DIV_WARNS
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_other_dtypes(self, name: str, dtype: torch.dtype) -> None:
        def call(reduction: str, *args: Tensor) -> Tensor:
            lower = [a.to(dtype) if a.is_floating_point() else a for a in args]
            return getattr(F, name)(*lower, reduction=reduction)

        args = ELEMENTWISE[name](7)
        whole = [a if isinstance(a, Tensor) else a.value for a in args]
        batches = [a if isinstance(a, Tensor) else lay_out(a.value, [3, 4]) for a in args]
        for reduction in REDUCTIONS:
            expected, refusal = attempt(partial(call, reduction), *whole)
            actual, ours = attempt(partial(call, reduction), *batches)
            assert ours is refusal
            if refusal is None:
                assert actual.dtype == expected.dtype
                torch.testing.assert_close(actual + 0, expected, rtol=2e-2, atol=2e-2)

    @KL_DIV_WARNS
    def test_the_joined_batch_is_never_made(self, name: str) -> None:
        leaves = [a.value.requires_grad_() if isinstance(a, Rows) else a for a in ELEMENTWISE[name](7)]
        operands = [lay_out(x, [3, 0, 4]) if x.requires_grad else x for x in leaves]
        getattr(F, name)(*operands).backward()
        batches = [x for x in operands if isinstance(x, ShardedBatch)]
        assert all((b._joined.tensor is None) == (name not in JOINING) for b in batches)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("rest", [(), (2,), (2, 3)], ids=["rows", "sequence", "image"])
class TestClasses:
    @PROPERTY
    @given(
        sizes=row_counts(),
        weighted=st.booleans(),
        ignored=st.sampled_from([-100, 0, 2]),
        smoothing=st.sampled_from([0.0, 0.3]),
        as_batch=st.booleans(),
    )
    def test_cross_entropy(
        self,
        reduction: str,
        rest: tuple[int, ...],
        sizes: list[int],
        weighted: bool,
        ignored: int,
        smoothing: float,
        as_batch: bool,
    ) -> None:
        n = sum(sizes)
        options = {"ignore_index": ignored, "label_smoothing": smoothing, "reduction": reduction}
        weight = numbers(C) if weighted else None
        target = Rows(classes(n, *rest), 0, as_batch=as_batch)
        assert_same_call(
            lambda x, y: F.cross_entropy(x, y, weight, **options),
            (rows(numbers(n, C, *rest)), target),
            sizes,
            twice=True,
        )

    @PROPERTY
    @given(sizes=row_counts(), smoothing=st.sampled_from([0.0, 0.3]), weighted=st.booleans())
    def test_class_probabilities(
        self, reduction: str, rest: tuple[int, ...], sizes: list[int], smoothing: float, weighted: bool
    ) -> None:
        n = sum(sizes)
        loss = nn.CrossEntropyLoss(numbers(C) if weighted else None, reduction=reduction, label_smoothing=smoothing)
        target = numbers(n, C, *rest, seed=1).softmax(1)
        assert_same_call(loss, (rows(numbers(n, C, *rest)), target), sizes, twice=True)

    def test_a_shard_without_any_label(self, reduction: str, rest: tuple[int, ...]) -> None:
        target = classes(6, *rest)
        target[2:4] = -100
        assert_same_call(nn.CrossEntropyLoss(reduction=reduction), (rows(numbers(6, C, *rest)), target), [2, 2, 2])


@pytest.mark.parametrize("target", [torch.arange(6), torch.tensor([0, 1]), torch.zeros(4, 2), torch.zeros(5, C)])
def test_a_wrong_target_is_torchs_own_error(target: Tensor) -> None:
    assert_same_call(F.cross_entropy, (rows(numbers(4, C)), target), [3, 1])


def test_a_sum_in_half_precision_overflows_only_where_the_whole_does() -> None:
    x = torch.cat([torch.full((4, 1), 120.0), torch.full((4, 1), -120.0)]).half()
    assert torch.equal(lay_out(x, [4, 4]).sum(), x.sum())
    y = torch.full((64, 1), 2000.0, dtype=torch.float16)
    assert torch.equal(lay_out(y, [40, 24]).mean(), y.mean())
    assert_same_call(
        lambda v: (v.half().sum(), v.bfloat16().sum(0), v.half().mean()), (rows(numbers(40, 2) * 3e3),), [33, 7]
    )


@pytest.mark.parametrize("loss", [F.mse_loss, F.binary_cross_entropy_with_logits, F.l1_loss, F.cross_entropy])
def test_losses_under_autocast(loss: Any) -> None:
    def call(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(x.float() @ torch.ones(C, C), y)

    target = classes(7) if loss is F.cross_entropy else numbers(7, C, seed=1).float()
    whole, batch = numbers(7, C), lay_out(numbers(7, C), [3, 4])
    expected, actual = call(whole, target), call(batch, target)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
    assert batch._joined.tensor is None
