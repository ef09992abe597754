"""Sharded inputs: used where they are when they fit, joined and cut again when not, and never wrong."""

import pytest
import torch
from torch import nn

from everygpu import DataParallel, TrainStep
from everygpu.parallel import ShardedBatch, gather, scatter
from everygpu.parallel.sharded.batch import shard_batch
from tests.parallel.batches import lay_out, numbers
from tests.parallel.oracle import TOLERANCE, Mlp, pair, score

CPU = torch.device("cpu")


class Seen(nn.Module):
    """Remembers where its input's memory is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.pointers = []

    def forward(self, x):
        self.pointers.append(x.data_ptr())
        return x * self.weight


class WritesInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 2.0))

    def forward(self, x):
        return x.add_(1) * self.weight


class Listing(DataParallel):
    def scatter(self, inputs, kwargs, device_ids):
        args, more = super().scatter(inputs, kwargs, device_ids)
        return list(args), list(more)


def on(devices, x, sizes, dim=0):
    """Make a batch as the Feeder does: every shard with memory of its own."""
    parts = [p.clone().to(d) for p, d in zip(torch.split(x, sizes, dim), devices)]
    return shard_batch(parts, devices[0], dim)


def pointers(shards):
    return [s.data_ptr() for s in shards]


class TestInPlace:
    def test_shards_that_fit_are_not_copied(self, devices):
        used = devices(3)
        x = on(used, numbers(7, 2), [len(s) for s in scatter(numbers(7, 2), used)])
        assert pointers(scatter(x, used)) == pointers(x._parts)
        assert [s.device for s in scatter(x, used)] == used

    def test_the_other_inputs_of_the_call_are_cut_alike(self, devices):
        used = devices(3)
        x = on(used, numbers(7, 2), [3, 3, 1]) if len(used) == 3 else on(used, numbers(7, 2), [4, 3])
        shards = scatter((x, torch.arange(7)), used)
        assert [len(a) for a, _ in shards] == [len(b) for _, b in shards]
        assert gather([b for _, b in shards], used[0]).tolist() == list(range(7))

    def test_replicas_see_the_shards(self, devices):
        used = devices(2)
        model = DataParallel(Seen(), used)
        x = on(used, torch.ones(4, 2), [2, 2])
        out = model(x)
        assert isinstance(out, ShardedBatch)
        assert model.module.pointers == [x._parts[0].data_ptr()]
        assert gather(out).cpu().equal(torch.ones(4, 2))

    def test_outputs_of_one_model_feed_another_without_a_join(self):
        first, second = DataParallel(Seen(), ["cpu"] * 2), DataParallel(Seen(), ["cpu"] * 2)
        x = first(torch.ones(4, 2))
        out = second(x)
        assert x._joined.tensor is None
        out.sum().backward()
        assert first.weight.grad == second.weight.grad == 8


class TestOtherPlans:
    @pytest.mark.parametrize("sizes", [[1, 5], [6, 0], [2, 2, 2], [6]])
    def test_rows_are_joined_and_cut_again(self, sizes):
        data = numbers(6, 2)
        shards = scatter(lay_out(data, sizes), ["cpu"] * 2)
        assert [len(s) for s in shards] == [3, 3]
        assert torch.cat(shards).equal(data)

    def test_shards_of_a_joined_batch_are_old(self):
        data = numbers(4, 2)
        x = lay_out(data.clone(), [2, 2])
        x[0] = 7  # a row: written in the joined tensor
        assert gather(scatter(x, ["cpu"] * 2), "cpu")[0].tolist() == [7, 7]

    @pytest.mark.parametrize("sizes", [[3, 3], [1, 5]])
    def test_gradients_are_those_of_one_device(self, sizes):
        model, bare = pair(Mlp, [CPU] * 2)
        grads = []
        for module, sharded in ((model, True), (bare, False)):
            leaf = numbers(6, 3).requires_grad_()
            x = lay_out(leaf * 2, sizes) if sharded else leaf * 2
            score(module(x)).backward()
            grads.append([leaf.grad, *(p.grad for p in module.parameters())])
        torch.testing.assert_close(*grads, **TOLERANCE)


class TestWriting:
    """A replica may write into what it sees."""

    def test_into_a_batch_without_a_graph_as_on_one_device(self):
        model = DataParallel(WritesInput(), ["cpu"] * 2)
        x = on([CPU] * 2, torch.zeros(4), [2, 2])
        assert gather(model(x)).tolist() == [2] * 4
        assert gather(model(x)).tolist() == [4] * 4
        assert gather(x).tolist() == [2] * 4

    def test_into_a_batch_with_a_graph(self):
        leaf = torch.ones(4, requires_grad=True)
        x = lay_out(leaf * 1, [2, 2])
        squares = x * x  # saves x for backward
        out = DataParallel(WritesInput(), ["cpu"] * 2)(x)
        (squares.sum() + out.sum()).backward()
        assert leaf.grad.tolist() == [4] * 4

    def test_into_a_batch_whose_joined_tensor_was_looked_at(self):
        x = on([CPU] * 2, torch.zeros(4), [2, 2])
        assert "0., 0." in repr(x)
        model = DataParallel(WritesInput(), ["cpu"] * 2)
        assert gather(model(x)).tolist() == [2] * 4
        assert (x * 1).sum() == 0  # of the shards
        assert gather(x).tolist() == [0] * 4

    def test_into_a_view(self):
        x = on([CPU] * 2, torch.zeros(4, 3), [2, 2])
        view = x[:, :2]
        model = DataParallel(WritesInput(), ["cpu"] * 2)
        assert gather(model(view)).tolist() == [[2, 2]] * 4
        assert gather(x).sum() == 0
        assert gather(view).sum() == 0

    @pytest.mark.parametrize("kind", [DataParallel, Listing])
    def test_into_a_batch_that_a_graph_has_saved_is_torchs_error(self, kind):
        x = on([CPU] * 2, torch.zeros(4), [2, 2])
        weight = torch.ones((), requires_grad=True)
        product = x * weight  # needs x in backward
        kind(WritesInput(), ["cpu"] * 2)(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()

    def test_requires_grad_set_in_forward_stays_there(self):
        class Penalty(Seen):
            def forward(self, x):
                x.requires_grad_()
                return torch.autograd.grad((x * self.weight).sum(), x, create_graph=True)[0]

        x = on([CPU] * 2, torch.zeros(4), [2, 2])
        out = DataParallel(Penalty(), ["cpu"] * 2)(x)
        assert gather(out).tolist() == [1] * 4
        assert not x.requires_grad
        assert not any(p.requires_grad for p in x._parts)

    def test_a_module_that_returns_its_input_does_not_hand_out_the_shards(self):
        model = DataParallel(nn.Identity(), ["cpu"] * 2)
        x = on([CPU] * 2, torch.zeros(4), [2, 2])
        out = model(x)
        x.add_(1)
        assert gather(out).tolist() == [0] * 4


class Masking(nn.Module):
    """Writes into its first input, which it returns something of as well."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)

    def forward(self, x, mask, y=None):
        x.masked_fill_(mask, 0.5).mul_(self.lin.weight[0])
        return self.lin(x) if y is None else self.lin(x) + y.sum(-1, keepdim=True)


class TestWritingIntoPlainTensors:
    """What replicas write into their inputs is written to the caller's tensor, with its gradient, as on one device."""

    @pytest.mark.parametrize("takes_gradient", [True, False])
    @pytest.mark.parametrize("is_twice", [True, False])
    @pytest.mark.parametrize(("dim", "num_rows"), [(0, 7), (1, 7), (0, 2)])
    def test_outputs_inputs_and_gradients_equal_one_device(self, devices, dim, num_rows, is_twice, takes_gradient):
        used = devices(3)
        model, bare = pair(Masking, used, dim=dim)
        shape, results = ((num_rows, 3, 4), (3, num_rows, 4))[dim], []
        for module in (model, bare):
            leaf = numbers(*shape).to(used[0]).requires_grad_(takes_gradient)
            mask = numbers(*shape, seed=1).to(used[0]) > 0.5
            x = leaf * 1
            out = module(x, mask, *([x] if is_twice else []))
            (score(out) + score(x * x) + (x.sum(-1) * out.sum(-1)).mean()).backward()
            grads = [p.grad for p in module.parameters()]
            results.append([gather(out), x, *grads, *([leaf.grad] if takes_gradient else [])])
        torch.testing.assert_close(*results, **TOLERANCE)

    def test_without_gradients(self, devices):
        class Filling(nn.Module):
            def forward(self, x, y):
                return x.fill_(len(x)), y + x

        used = devices(2)
        x, y = torch.zeros(3, device=used[0]), torch.zeros(3)
        with torch.no_grad():
            DataParallel(Filling(), used)(x, y.to(used[0]))
        assert x.tolist() == [2, 2, 1]
        assert y.tolist() == [0, 0, 0]

    @pytest.mark.parametrize("dim", [0, 1])
    def test_a_graph_that_has_saved_the_tensor_raises_torchs_error(self, devices, dim):
        used = devices(2)
        x = torch.zeros(4, 4, 4, device=used[0])
        product = x * torch.ones((), requires_grad=True, device=used[0])
        DataParallel(Masking().to(used[0]), used, dim=dim)(x, x > 0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()

    def test_a_step_trains_as_on_one_device(self):
        x, losses = numbers(6, 4), []
        for count in (1, 2, 3):
            model = DataParallel(pair(Masking, [CPU])[1], [CPU] * count)
            step = TrainStep(
                model, lambda out, y: (out.sum(1) * y.sum(1)).mean(), torch.optim.SGD(model.parameters(), 1)
            )
            batches = [x.clone(), x.clone()]
            losses.append([step((given, given > 0.4), given).item() for given in batches])
        assert losses[1:] == [pytest.approx(losses[0])] * 2
