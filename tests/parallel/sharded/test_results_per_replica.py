"""A batch with one result per replica weighs each by the rows behind it."""

import copy
import functools
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from everygpu.errors import LossError
from everygpu.parallel.sharded.batch import ShardedBatch, join, shard_batch
from tests.parallel.batches import CPU, lay_out, numbers
from tests.parallel.sharded.uses import PROPERTY, ones

KEEPING: list[Callable[[Tensor], Any]] = [
    lambda x: x.reshape(-1)[0].item() and x,
    lambda x: x.detach().numpy() is not None and x,
    lambda x: [float(v.sum()) for v in x.detach()] and x,
    lambda x: x * 2,
    lambda x: x + x.detach().sin(),
    lambda x: x.exp().log1p(),
    lambda x: torch.special.expit(x),
    lambda x: (x * 1).mul_(0.5),
    lambda x: x.view(-1),
    lambda x: x.reshape(-1, 1),
    lambda x: x[:],
    lambda x: x[None],
    lambda x: x.clone().detach_().add_(1) * x,
    lambda x: torch.where(x > 0.5, x, x.float().double() * 3),
    lambda x: torch.stack([x.reshape(-1)] * 2).sum(0),
    lambda x: torch.stack([x.reshape(-1)] * 2, 1)[:, 0],
    lambda x: x * torch.full_like(x, 2.0),
    lambda x: x.float_power(2).sqrt() + x.data,
    lambda x: copy.deepcopy(x.detach()) * x,
    lambda x: x.cpu().to("cpu").div(0.5),
    lambda x: torch.zeros_like(x).copy_(x),
    lambda x: str(x) and x,
    lambda x: join(x).sum().item() and x if isinstance(x, ShardedBatch) else x,
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [[3, 2], [5, 1, 2]])
def test_programs_on_results_weigh_as_if_each_row_had_its_replicas_result(rows: list[int]) -> None:
    draw = random.Random(0)
    for _ in range(60):
        steps = [draw.choice(KEEPING) for _ in range(draw.randint(1, 7))]
        leaves = numbers(len(rows)).requires_grad_(), numbers(len(rows)).requires_grad_()
        batch = shard_batch([x * 1 for x in torch.split(leaves[0], 1)], CPU, 0, rows)
        means = []
        for x in (batch, leaves[1].repeat_interleave(torch.tensor(rows))):
            y = functools.reduce(lambda y, step: step(y), steps, x)
            means += [y.mean(), F.mse_loss(y, torch.zeros_like(y))]
        torch.testing.assert_close(means[:2], means[2:])
        grads = [torch.autograd.grad(m, leaf, allow_unused=True)[0] for m, leaf in zip((means[0], means[2]), leaves)]
        torch.testing.assert_close(*grads)


LOOKS: list[Callable[[Tensor], Any]] = [
    lambda x: None,
    lambda x: x[0].item(),
    lambda x: [float(v) for v in x.detach()],
    lambda x: bool(x[0] > 1),
    lambda x: (x.detach().numpy(), x.tolist(), str(x)),
    lambda x: (join(x), x[1:]),
]


class TestResultsPerReplica:
    def batch(self, values: list[float], rows: list[int]) -> tuple[ShardedBatch, list[Tensor]]:
        entries = [torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in values]
        return shard_batch(entries, CPU, 0, rows), entries

    @PROPERTY
    @given(data=st.data(), rows=st.lists(st.integers(1, 9), min_size=1, max_size=5))
    def test_the_mean_weighs_by_rows(self, data: Any, rows: list[int]) -> None:
        values = data.draw(st.lists(st.floats(-5, 5), min_size=len(rows), max_size=len(rows)))
        expected = sum(v * n for v, n in zip(values, rows)) / sum(rows)
        for mean in (
            Tensor.mean,
            torch.mean,
            lambda x: x.mean(0),
            lambda x: x.mean(dim=-1),
            lambda x: torch.mean(x, [0]),
        ):
            x, entries = self.batch(values, rows)
            result = mean(x)
            result.backward()
            torch.testing.assert_close(result.item(), expected)
            torch.testing.assert_close([e.grad.item() for e in entries], [n / sum(rows) for n in rows])

    @pytest.mark.parametrize("look", LOOKS)
    def test_means_that_weigh(self, look: Callable[[Tensor], Any]) -> None:
        x, _ = self.batch([1.0, 2.0, 4.0], [3, 2, 1])
        look(x)
        zeros = torch.zeros(3, dtype=torch.float64)
        out = torch.mean(x.detach(), dim=0, out=zeros.new_empty(()))
        means = [out, F.l1_loss(x, zeros), F.l1_loss(x, zeros, reduction="none").mean()]
        torch.testing.assert_close([m.item() for m in means], [11 / 6] * 3)
        squares = [F.mse_loss(x, zeros), F.smooth_l1_loss(x + 0.5, zeros) * 2, F.huber_loss(x + 0.5, zeros) * 2]
        torch.testing.assert_close([s.item() for s in squares], [27 / 6, 22 / 6, 22 / 6])

    @pytest.mark.parametrize("mean", [torch.nanmean, Tensor.nanmean, torch.var_mean, torch.std_mean])
    def test_means_that_would_not_weigh_are_refused(self, mean: Callable[[Tensor], Any]) -> None:
        x, _ = self.batch([1.0, 2.0, 4.0], [3, 2, 1])
        with pytest.raises(LossError, match=r"loss\.mean"):
            mean(x)
        assert torch.isfinite(torch.stack(torch.var_mean(lay_out(numbers(4, 2), [3, 1])))).all()

    @pytest.mark.parametrize("loss", [F.mse_loss, F.huber_loss, F.smooth_l1_loss])
    def test_a_loss_of_results_weighs_as_the_mean_of_its_terms(self, loss: Callable[..., Tensor]) -> None:
        gradients = []
        for take in (loss, lambda x, y: loss(x, y, reduction="none").mean()):
            x, entries = self.batch([0.5, 2.0, float("nan")], [3, 1, 0])
            take(x, torch.zeros(3, dtype=torch.float64)).backward()
            gradients.append([e.grad.item() for e in entries[:2]])
        torch.testing.assert_close(gradients[0], gradients[1])

    def test_weights_move_to_another_device(self) -> None:
        x, _ = self.batch([1.0, 2.0], [3, 1])
        assert x.to("meta").shard_rows == (3, 1)
        assert {s.device.type for s in x.detach().to("meta").shards} == {"meta"}

    @pytest.mark.parametrize(
        "use",
        [
            join,
            lambda x: x[1],
            lambda x: x[1:],
            lambda x: x[x > 0],
            lambda x: x[[0, 1]],
            lambda x: x.flip(0),
            lambda x: x.sort()[0],
            lambda x: torch.stack([*x]),
            lambda x: torch.cat([x, ones(1)]),
            lambda x: torch.cat([x, x]),
            lambda x: pickle.loads(pickle.dumps(x.detach())),
            lambda x: x.as_subclass(Tensor),
        ],
    )
    def test_what_picks_entries_is_plain(self, use: Callable[[Tensor], Tensor]) -> None:
        x, _ = self.batch([1.0, 2.0], [3, 1])
        assert type(use(x)) is Tensor

    def test_a_replica_without_rows_counts_for_nothing(self) -> None:
        x, entries = self.batch([1.0, float("nan")], [3, 0])
        x.mean().backward()
        assert x.mean().item() == 1
        assert [e.grad.item() for e in entries] == [1, 0]

    def test_in_half_precision(self) -> None:
        x = shard_batch([torch.tensor([60000.0]).half(), torch.tensor([60000.0]).half()], CPU, 0, [5, 3])
        assert x.mean().item() == torch.tensor(60000.0).half().item()
        assert x.mean().dtype == torch.float16
