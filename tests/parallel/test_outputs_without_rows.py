"""Outputs that aren't rows of the batch, lists with an item per row, and inputs with rows on another dimension."""

import logging
import sys

import pytest
import torch
from torch import nn

from everygpu import DataParallel, Rows, gather
from everygpu.errors import GatherError, SplitError
from everygpu.parallel.scatter.row_count import find_rows
from tests.parallel.oracle import Returning


@pytest.fixture(autouse=True)
def said(caplog):
    """Give what is said, from the beginning of the test on."""
    sys.modules["everygpu.parallel.gather"]._warn_of_no_rows.cache_clear()
    caplog.set_level(logging.WARNING, logger="everygpu")
    return caplog


def run(function, num_rows=8, num_replicas=2, **options):
    """Run on rows 0, 1, 2, …"""
    model = DataParallel(Returning(function), ["cpu"] * num_replicas, engine="threads", **options)
    return model(torch.arange(float(num_rows)))


class TestNoRows:
    def test_a_load_per_expert_is_warned_of_once(self, said):
        for _ in range(2):
            out, load = run(lambda x: (x, torch.ones(4)), 9, 3)
            assert (len(out), len(load)) == (9, 12)
        (message,) = said.messages
        assert message.startswith("gather: out[1] has shape (4,) in each of 3 replicas, which are no rows on dim 0")

    def test_the_state_of_an_lstm(self, said):
        torch.manual_seed(0)
        model = DataParallel(nn.LSTM(8, 4, 2, batch_first=True), ["cpu"] * 3, engine="threads")
        out, (h, _) = model(torch.randn(12, 5, 8))
        assert (out.shape, h.shape) == ((12, 5, 4), (6, 4, 4))  # one device gives (2, 12, 4)
        (message,) = said.messages
        assert "out[1][0] has shape (2, 4, 4)" in message
        assert "nn.LSTM with its rows permuted" in message
        with pytest.raises(
            GatherError, match=r"\(2, 3, 4\), .*\(2, 1, 4\) .* If its rows are on dim 1, permute it inside"
        ):
            model(torch.randn(7, 5, 8))

    def test_with_rows_on_dim_1_everywhere_the_state_is_that_of_one_device(self, said):
        net = nn.LSTM(8, 4, 2)
        model, x = DataParallel(net, ["cpu"] * 3, engine="threads", dim=1), torch.randn(5, 7, 8)
        one, many = net(x), model(x)
        one, many = net(x, one[1]), model(x, many[1])
        torch.testing.assert_close(gather(many[0]), one[0])
        torch.testing.assert_close(gather(many[1][0]), one[1][0])
        assert said.messages == []

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: (x, x.new_ones(12, 4, 4)),  # three entries for each row
            lambda x: (x, x.new_ones(1)),
            lambda x: (x, x.sum()),
            lambda x: x.new_ones(3, 4, 2),  # no other output tells where the rows are
            lambda x: (x, x.new_ones(3 if x[0] else 5, 4)),  # boxes of several rows
        ],
    )
    def test_others_are_not_warned_of(self, function, said):
        run(function)
        assert said.messages == []


def detections(x):
    """As many boxes in row i as i + 1."""
    return [{"boxes": torch.full((int(i) + 1, 4), float(i)), "id": int(i)} for i in x]


class TestItemsPerRow:
    @pytest.mark.parametrize("how", ["sharded", "joined"])
    @pytest.mark.parametrize("num_rows", [4, 3, 2])
    def test_detections_are_joined_end_to_end(self, num_rows, how):
        for found in (
            run(detections, num_rows, gather=how),
            run(lambda x: {"found": detections(x)}, num_rows)["found"],
        ):
            assert [d["id"] for d in found] == list(range(num_rows))
            assert [d["boxes"].shape for d in found] == [(i + 1, 4) for i in range(num_rows)]
            assert all((d["boxes"] == d["id"]).all() for d in found)

    def test_gradients_flow(self):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(()))

            def forward(self, x):
                return [{"boxes": torch.ones(int(i) + 3) * self.weight} for i in x]

        scaled = Scaled()
        out = DataParallel(scaled, ["cpu"] * 2)(torch.arange(4.0))
        sum(d["boxes"].sum() for d in out).backward()
        assert scaled.weight.grad.item() == 3 + 4 + 5 + 6

    @pytest.mark.parametrize("num_rows", [4, 3])
    def test_texts_that_differ(self, num_rows):
        assert run(lambda x: [f"row {int(i)}" for i in x], num_rows) == [f"row {i}" for i in range(num_rows)]

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: [{"logits": x[:, None], "loss": x.mean()} for _ in range(2)],
            lambda x: [{"loss": x.sum().view(1)} for _ in range(2)],
            lambda x: [{"loss": x.sum()} for _ in range(2)],
            lambda x: tuple(detections(x)),
            lambda x: [x, x.sum().view(1)],
            lambda x: [torch.ones(3, 4), torch.ones(5, 4)],
            lambda x: ["loss", "accuracy"],
            lambda x: [int(i) for i in x],
        ],
    )
    def test_items_per_output_are_joined_item_by_item(self, function):
        """As auxiliary outputs, with two layers and two rows for each replica."""
        assert len(run(function, 4)) == 2

    def test_rows_say_so(self):
        assert len(run(lambda x: Rows({"logits": torch.ones(2)} for _ in x), 4)) == 4

    def test_one_replica(self):
        assert run(lambda x: ["a"] * len(x), 4, 1) == ["a"] * 4

    def test_lists_of_tensors_per_row_are_an_error_that_names_rows(self):
        with pytest.raises(GatherError, match=r"list of 2 .*list of 1 .*Return everygpu.Rows\(...\)"):
            run(lambda x: [torch.ones(int(i)) for i in x], 3)

    def test_gather_knows_no_rows(self):
        assert len(gather([detections(torch.arange(2.0)), detections(torch.arange(2.0, 4.0))], "cpu")) == 2


@pytest.mark.parametrize("first", [True, False])
def test_a_state_that_is_passed_back_names_its_dim(first):
    named = [("args[0]", torch.ones(12, 5, 8)), ("args[1][0]", torch.ones(2, 12, 4))]
    with pytest.raises(SplitError, match=r"If the rows of args\[1\]\[0\] are on dim 1, .* permute it .* pass dim=1"):
        find_rows(named if first else named[::-1], 0, 3)


def test_bags_with_offsets_name_the_ways_out():
    with pytest.raises(
        SplitError, match=r"got 6 in args\[0\] and 3 in .* nn.EmbeddingBag, pass everygpu.Rows .*padding_idx"
    ):
        DataParallel(nn.EmbeddingBag(9, 4), ["cpu"] * 2)(torch.arange(6), torch.tensor([0, 2, 4]))


def test_a_matrix_with_as_many_rows_as_the_batch_is_offered_whole():
    class Masked(nn.Module):
        def forward(self, x, mask):
            return x @ mask

    with pytest.raises(RuntimeError) as caught:
        DataParallel(Masked(), ["cpu"] * 2)(torch.ones(12, 12), torch.ones(12, 12))
    assert "everygpu.Replicated(...)" in str(caught.value.__cause__)
