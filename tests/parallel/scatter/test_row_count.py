"""The number of rows of a batch, and tensors with an entry per device."""

import pytest
import torch
from torch import nn

from everygpu import DataParallel, Feeder, Replicated, Rows
from everygpu.errors import SplitError
from everygpu.parallel import scatter
from everygpu.parallel.cuda_graphs.static_batch import StaticBatch, describe_batch
from everygpu.parallel.scatter.row_count import find_rows
from everygpu.parallel.scatter.split import ScatterSpec
from everygpu.parallel.sharded.batch import shard_batch


class TestAgreement:
    @pytest.mark.parametrize(
        "value",
        [None, 3, "text", torch.tensor(4.0), [], {}, Replicated(torch.ones(3)), {"a": Replicated([torch.ones(2)])}],
        ids=repr,
    )
    def test_no_tensor_to_split(self, value):
        assert find_rows([("args[0]", value)], 0) is None

    @pytest.mark.parametrize(
        ("named", "says"),
        [
            ([("args[0]", torch.ones(2)), ("args[1]", [torch.ones(3)])], True),
            ([("args[0]", torch.ones(2)), ("args[1]", torch.ones(3))], False),
            ([("batch[0]", torch.ones(2)), ("batch[1]", {"a": torch.ones(3)})], False),
        ],
        ids=["in a list", "an argument", "in a dict"],
    )
    def test_tensors_in_lists_may_be_rows(self, named, says):
        with pytest.raises(SplitError) as caught:
            find_rows(named, 0)
        assert ("everygpu.Rows" in str(caught.value)) == says


class Weighted(nn.Module):
    """Returns a loss as transformers' models do: the sum over a replica's rows by a number of the caller's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x, num_items):
        return {"loss": self.linear(x).sum() / num_items, "rows": x[:, 0]}


class TestEntryPerDevice:
    """Equal integers, one for each device, as ``transformers`` passes ``num_items_in_batch``."""

    @pytest.mark.parametrize("shape", [(3,), (3, 1)])
    @pytest.mark.parametrize("make", [torch.Tensor.clone, torch.Tensor.numpy], ids=["tensor", "array"])
    def test_each_device_gets_its_own(self, devices, shape, make):
        used = devices(3)
        numbers = make(torch.full((len(used), *shape[1:]), 8))
        shards = scatter((torch.ones(7, 2), numbers), used)
        assert [s[1].shape for s in shards] == [(1, *shape[1:])] * len(used)
        assert [s[1].item() for s in shards] == [8] * len(used)

    def test_a_column_of_whole_floats(self):
        """As newer versions of ``transformers`` pass it, divided by the size of a group."""
        shards = scatter((torch.ones(7, 2), torch.tensor(24).unsqueeze(0).expand(3, -1) / 1), ["cpu"] * 3)
        assert [s[1].tolist() for s in shards] == [[[24.0]]] * 3

    @pytest.mark.parametrize(("dim", "shape"), [(1, (1, 3)), (-1, (3,)), (-2, (3, 1))])
    def test_along_the_dim_of_the_rows(self, dim, shape):
        shards = scatter((torch.ones(7, 7), torch.tensor(6).expand(shape)), ["cpu"] * 3, dim)
        assert [s[1].item() for s in shards] == [6] * 3

    def test_replicas_without_rows_get_none(self):
        numbers = torch.tensor([5] * 4)
        assert [s[1].tolist() for s in scatter((torch.ones(2), numbers), ["cpu"] * 4)] == [[5]] * 2
        spread = shard_batch(list(numbers.split(1)), torch.device("cpu"), 0)
        shards = scatter((torch.ones(3), spread), ["cpu"] * 4, split=[1, 0, 0, 2])
        assert [(len(s[0]), s[1].tolist()) for s in shards] == [(1, [5]), (2, [5])]
        assert shards[1][1].data_ptr() == numbers[3].data_ptr()

    @pytest.mark.parametrize(
        "inputs",
        [
            (torch.ones(9), torch.ones(8), torch.tensor([2, 2])),
            (torch.ones(9), torch.ones(3)),
            (torch.ones(9), torch.ones(2)),
            (torch.ones(9), torch.full((2, 1), 0.5)),
            (torch.ones(9), torch.tensor([[2.0], [3.0]])),
            (torch.ones(9), torch.tensor([2, 3])),
            (torch.ones(9), torch.tensor([True, True])),
            (torch.ones(9), torch.ones(2, 2)),
            (torch.ones(9), Rows(["a", "b"])),
        ],
        ids=[
            "the others differ",
            "another number",
            "floats",
            "parts",
            "unequal floats",
            "unequal",
            "flags",
            "more than one each",
            "rows",
        ],
    )
    def test_others_are_refused(self, inputs):
        with pytest.raises(SplitError, match=r"the same number of rows.*needs whole in everygpu.Replicated"):
            scatter(inputs, ["cpu"] * 2)

    def test_a_rank_with_one_device(self):
        assert find_rows([("args[0]", torch.ones(5, 2)), ("args[1]", torch.ones(1))], 0, 1) == 5

    def test_as_many_rows_as_devices_are_rows(self):
        first, second = scatter((torch.ones(2, 3), torch.arange(2)), ["cpu"] * 2)
        assert (first[1].tolist(), second[1].tolist()) == ([0], [1])
        assert scatter(torch.arange(2), ["cpu"] * 2)[1].tolist() == [1]

    @pytest.mark.parametrize("gather", ["sharded", "joined"])
    @pytest.mark.parametrize("num_rows", [6, 5, 2])
    def test_results_are_not_weighed_by_rows(self, devices, num_rows, gather):
        """The mean over replicas of sums by the same number is that of the whole batch, whatever their rows are."""
        used = devices(2)
        module, x = Weighted().to(used[0]), torch.randn(num_rows, 3, device=used[0])
        total = torch.tensor([[num_rows + 1]], device=used[0])
        expected = module(x, total)["loss"] / 2
        found = DataParallel(module, used, gather=gather)(x, total.expand(2, -1))
        assert found["rows"].shape == (num_rows,)
        torch.testing.assert_close(found["loss"].mean(), expected.squeeze())

    @pytest.mark.parametrize("num_rows", [5, 1])
    def test_the_feeder_sends_each_device_its_own(self, devices, num_rows):
        used = devices(3)
        batch = {"x": torch.ones(num_rows, 3), "num_items": torch.full((len(used),), 7)}
        (sent,) = list(Feeder([batch], used))
        assert sent["num_items"].tolist() == batch["num_items"].tolist()
        shards = scatter(sent, used)
        assert [s["num_items"].tolist() for s in shards] == [[7]] * len(shards)
        assert [s["num_items"].device for s in shards] == used[: len(shards)]
        if num_rows > 1:
            assert [p.device for p in sent["num_items"].shards] == used

    @pytest.mark.parametrize("num_rows", [5, 1])
    def test_a_capture_has_a_place_for_each(self, devices, num_rows):
        used = devices(3)
        route = ScatterSpec(devices=tuple(used), dim=0, split="chunk")
        batch = ((torch.ones(num_rows, 3),), {"num_items": torch.full((len(used),), 7)}, ())
        held = StaticBatch(batch, route)
        assert len(held.tensors()) == (2 if num_rows == 1 else 2 * len(used))
        other = ((torch.zeros(num_rows, 3),), {"num_items": torch.full((len(used),), 8)}, ())
        assert describe_batch(batch, route) == describe_batch(other, route)
        held.write(other)
        args, kwargs, _ = held.read()
        shards = scatter((args, kwargs), used)
        assert [s[1]["num_items"].tolist() for s in shards] == [[8]] * len(shards)
        assert describe_batch(held.read(), route) == describe_batch(batch, route)
