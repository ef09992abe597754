"""Lists that may have an item per row: a warning tells how they are taken."""

import logging

import pytest
import torch

from everygpu import DataParallel, Feeder, Replicated, Rows, scatter
from everygpu.parallel.scatter import row_count

CPUS = ["cpu"] * 2


@pytest.fixture(autouse=True)
def said(caplog):
    """Give what is said, from the beginning of the test on."""
    row_count._warn_of_list.cache_clear()
    caplog.set_level(logging.WARNING, logger="everygpu")
    return caplog


class Meta:
    pass


class TestOfObjects:
    @pytest.mark.parametrize(
        "items",
        [["a"] * 4, ("a",) * 4, [{"id": i} for i in range(4)], [Meta() for _ in range(4)], [(3, 4)] * 4, [{}] * 4],
        ids=["strings", "tuple", "dicts", "objects", "tuples", "empty dicts"],
    )
    def test_as_many_as_rows_go_whole_with_a_word(self, said, items):
        for _ in range(2):
            shards = scatter({"x": torch.ones(4, 2), "meta": items}, CPUS)
        assert all(len(s["meta"]) == 4 for s in shards)
        (message,) = said.messages
        assert message.startswith('scatter: args[0]["meta"] is a ')
        assert "everygpu.Rows(...)" in message
        assert "everygpu.Replicated(...)" in message

    @pytest.mark.parametrize(
        "items",
        [["a"] * 3, [1, 2, 3, 4], [None] * 4, [True] * 4, [torch.ones(4)] * 4, Rows("abcd"), Replicated(["a"] * 4),
         [{"y": torch.ones(4)}] * 4, "abcd", dict.fromkeys("abcd")],
        ids=["another number", "numbers", "Nones", "flags", "tensors", "rows", "replicated", "dicts with tensors",
             "a string", "a dict"],
    )  # fmt: skip
    def test_others_without(self, said, items):
        scatter({"x": torch.ones(4, 2), "meta": items}, CPUS)
        assert said.messages == []

    def test_one_device_needs_no_word(self, said):
        scatter((torch.ones(4), ["a"] * 4), ["cpu"])
        DataParallel(torch.nn.Identity(), ["cpu"])((torch.ones(4), ["a"] * 4))
        assert said.messages == []

    def test_arguments_of_a_call_are_no_list(self, said):
        class Model(torch.nn.Module):
            def forward(self, x, mode, *, kind):
                return x

        DataParallel(Model(), CPUS)(torch.ones(2), "mode", kind="x")
        assert said.messages == []


class TestOfTensors:
    @pytest.mark.parametrize("kind", [list, tuple])
    def test_images_of_several_sizes_are_cut_with_a_word(self, said, kind):
        for _ in range(2):
            scatter((kind([torch.ones(3, 4, 5), torch.ones(3, 6, 5)]), "mode"), CPUS)
        (message,) = said.messages
        assert "args[0] is a " in message
        assert "(3, 4, 5), (3, 6, 5)" in message
        assert "everygpu.Rows(...)" in message
        assert "everygpu.Replicated(...)" in message

    @pytest.mark.parametrize(
        "inputs",
        [
            ([torch.ones(3, 4, 5), torch.ones(3, 6, 5)], torch.ones(3)),
            [torch.ones(3, 4, 5), torch.ones(3, 4, 5)],
            [torch.ones(3, 4, 5), torch.ones(3, 4)],
            {"a": torch.ones(3, 4, 5), "b": torch.ones(3, 6, 5)},
            Rows([torch.ones(3, 4, 5), torch.ones(3, 6, 5)]),
            [torch.ones(3, 4)],
            [torch.ones(3, 4), "text"],
        ],
        ids=["others agree", "one shape", "of another depth", "a dict", "rows", "one", "one tensor"],
    )
    def test_others_without(self, said, inputs):
        scatter(inputs, CPUS)
        assert said.messages == []

    def test_what_a_loader_gives_is_no_list_of_rows(self, said):
        x, y = torch.ones(4, 2), torch.ones(4, 3)
        for a, b, names in Feeder([[x, y, ["a", "b", "c", "d"]]], CPUS):
            assert (len(a), len(b), len(names)) == (4, 4, 4)
            DataParallel(torch.nn.Bilinear(2, 3, 1), CPUS)(a, b)
        scatter((x, y), CPUS)
        assert said.messages == []
        scatter(next(iter(Feeder([[x, y]], CPUS))), CPUS)
        assert len(said.messages) == 1
