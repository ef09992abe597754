"""Lists that replicas return: with an item per row, or with an item per output."""

import logging

import pytest
import torch
from torch import nn

from everygpu import DataParallel, Rows, gather
from everygpu.errors import GatherError
from everygpu.parallel import listed_rows
from tests.parallel.models import Returning


@pytest.fixture(autouse=True)
def said(caplog):
    """Give what is said, from the beginning of the test on."""
    listed_rows._say.cache_clear()
    caplog.set_level(logging.WARNING, logger="everygpu")
    return caplog


def run(function, num_rows=4, num_replicas=2, **options):
    """Run on rows 0, 1, 2, …"""
    return DataParallel(Returning(function), ["cpu"] * num_replicas, engine="threads", **options)(
        torch.arange(float(num_rows))
    )


def detections(x):
    """As many boxes in row i as i + 1."""
    return [{"boxes": torch.full((int(i) + 1, 4), float(i)), "id": int(i)} for i in x]


def expect_detections(found, num_rows):
    assert [d["id"] for d in found] == list(range(num_rows))
    assert [d["boxes"].shape for d in found] == [(i + 1, 4) for i in range(num_rows)]
    assert all((d["boxes"] == d["id"]).all() for d in found)


class TestItemsPerRow:
    @pytest.mark.parametrize("how", ["sharded", "joined"])
    @pytest.mark.parametrize("num_rows", [4, 3, 2])
    def test_detections_are_joined_end_to_end(self, said, num_rows, how):
        for _ in range(2):
            expect_detections(run(detections, num_rows, gather=how), num_rows)
        if num_rows == 3:  # lists of different lengths have no other meaning
            assert said.messages == []
        else:
            (message,) = said.messages
            assert "the list out as it has rows: they are joined end to end. Return everygpu.Rows(...)" in message

    def test_deeper_in_the_output(self):
        out = run(lambda x: {"mean": x, "found": detections(x)})
        assert out["mean"].shape == (4,)
        expect_detections(out["found"], 4)

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

    def test_fixed_numbers_and_none_at_all(self):
        for size in (0, 100):
            out = run(lambda x, size=size: [{"boxes": torch.ones(size, 4)} for _ in x])
            assert [d["boxes"].shape for d in out] == [(size, 4)] * 4

    @pytest.mark.parametrize("num_rows", [4, 3])
    def test_strings_that_differ(self, said, num_rows):
        assert run(lambda x: [f"row {int(i)}" for i in x], num_rows) == [f"row {i}" for i in range(num_rows)]
        assert run(lambda x: [{"name": str(i.item())} for i in x], 3) == [{"name": f"{i}.0"} for i in range(3)]
        assert said.messages == []


class TestItemsPerOutput:
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: [{"logits": x[:, None], "loss": x.mean()} for _ in range(2)],
            lambda x: [{"loss": x.sum().view(1)} for _ in range(2)],
            lambda x: [{"loss": x.sum()} for _ in range(2)],
        ],
        ids=["rows", "losses of shape (1,)", "losses"],
    )
    def test_dicts_are_joined_item_by_item_with_a_word(self, said, function):
        """As auxiliary outputs, with two layers and two rows for each replica."""
        for _ in range(2):
            out = run(function)
        assert len(out) == 2
        assert all(len(v) == (4 if k == "logits" else 2) for d in out for k, v in d.items())
        (message,) = said.messages
        assert "they are joined item by item" in message

    @pytest.mark.parametrize("num_layers", [1, 3])
    def test_another_number_of_dicts(self, said, num_layers):
        out = run(lambda x: [{"logits": x[:, None], "hist": torch.ones(7)} for _ in range(num_layers)])
        assert [(d["logits"].shape, d["hist"].shape) for d in out] == [((4, 1), (14,))] * num_layers
        assert said.messages == []

    def test_tuples_are_outputs(self, said):
        out = run(lambda x: tuple(detections(x)))
        assert [d["boxes"].shape for d in out] == [(1 + 3, 4), (2 + 4, 4)]
        assert said.messages == []

    def test_lists_of_tensors(self, said):
        assert [t.shape for t in run(lambda x: [x, x.sum().view(1)])] == [(4,), (2,)]
        assert said.messages == []
        assert [t.shape for t in run(lambda x: [torch.ones(3, 4), torch.ones(5, 4)])] == [(6, 4), (10, 4)]
        assert len(said.messages) == 1

    def test_numbers(self):
        assert run(lambda x: [int(i) for i in x]) == [[0, 2], [1, 3]]

    def test_equal_strings(self, said):
        assert run(lambda x: ["loss", "accuracy"]) == ["loss", "accuracy"]
        assert len(said.messages) == 1

    def test_rows_say_so(self, said):
        assert len(run(lambda x: Rows({"logits": torch.ones(2)} for _ in x))) == 4
        assert said.messages == []

    def test_one_replica(self, said):
        assert run(lambda x: ["a"] * len(x), num_replicas=1) == ["a"] * 4
        assert run(lambda x: ["a"] * len(x), num_rows=1) == ["a"]
        assert said.messages == []

    def test_lists_of_tensors_per_row_are_an_error_that_names_rows(self):
        with pytest.raises(GatherError, match=r"list of 2 .*list of 1 .*Return everygpu.Rows\(...\)"):
            run(lambda x: [torch.ones(int(i)) for i in x], 3)

    def test_gather_knows_no_rows(self, said):
        lists = [detections(torch.arange(2.0)), detections(torch.arange(2.0, 4.0))]
        assert len(gather(lists, "cpu")) == 2
        assert said.messages == []
