"""The number of rows of a batch, and tensors with an entry per device."""

import pytest
import torch

from everygpu import Replicated
from everygpu.errors import SplitError
from everygpu.parallel.scatter.row_count import find_rows


class TestAgreement:
    def test_tensors_anywhere_agree(self):
        named = [("args[0]", {"a": [torch.ones(5, 2)]}), ("args[1]", 7), ('kwargs["y"]', torch.ones(5))]
        assert find_rows(named, 0) == 5

    def test_any_dim(self):
        assert find_rows([("x", torch.ones(2, 5)), ("y", torch.ones(3, 5, 4))], 1) == 5
        assert find_rows([("x", torch.ones(2, 5)), ("y", torch.ones(5))], -1) == 5

    @pytest.mark.parametrize(
        "value",
        [None, 3, "text", torch.tensor(4.0), [], {}, Replicated(torch.ones(3)), {"a": Replicated([torch.ones(2)])}],
        ids=repr,
    )
    def test_no_tensor_to_split(self, value):
        assert find_rows([("args[0]", value)], 0) is None

    def test_no_rows_are_rows(self):
        assert find_rows([("args[0]", torch.ones(0, 3))], 0) == 0

    def test_disagreement_names_both_tensors_and_the_way_out(self):
        named = [("args[0]", torch.ones(9, 2)), ('kwargs["mask"]', {"m": torch.ones(2, 9)})]
        with pytest.raises(SplitError, match=r"got 9 in args\[0\] and 2 in kwargs\[\"mask\"\]\[\"m\"\]") as caught:
            find_rows(named, 0)
        assert "(2, 9)" in str(caught.value)
        assert "Replicated" in str(caught.value)

    def test_tensor_without_the_dim(self):
        with pytest.raises(SplitError, match=r"the batch on dim 1, got shape \(4,\) in args\[0\]"):
            find_rows([("args[0]", torch.ones(4))], 1)

    @pytest.mark.parametrize("dim", [2, -3])
    def test_dim_out_of_range(self, dim):
        with pytest.raises(SplitError, match="Replicated"):
            find_rows([("x", torch.ones(2, 2))], dim)
