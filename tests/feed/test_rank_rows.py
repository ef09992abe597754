"""Rows of a batch for each rank: none lost, none twice, in order."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import TensorDataset

import everygpu
from everygpu.errors import SplitError
from everygpu.feed.rank_rows import RankRows


def rank_rows_of(kind, size):
    return [RankRows(SimpleNamespace(rank=rank, size=size), kind) for rank in range(size)]


def test_rows_of_any_dimension_and_of_arrays():
    mask = everygpu.Replicated(torch.ones(7))
    batch = {"x": torch.arange(12).view(2, 6), "y": [np.arange(6)[None], mask], "z": torch.tensor(3.0)}
    found = [rank_rows.take(batch, 1) for rank_rows in rank_rows_of("whole", 4)]
    assert torch.equal(torch.cat([f["x"] for f in found], 1), batch["x"])
    assert [f["y"][0].tolist() for f in found] == [[[0, 1]], [[2, 3]], [[4]], [[5]]]
    assert all(f["y"][1] is mask and f["z"] is batch["z"] for f in found)
    assert rank_rows_of("whole", 2)[1].take("no rows") == "no rows"
    with pytest.raises(SplitError, match="same number of rows"):
        rank_rows_of("whole", 2)[0].take([torch.ones(2), torch.ones(3)])


def test_a_batch_without_rows_keeps_none_of_the_batch_it_was_made_of():
    rank_rows = rank_rows_of("sharded", 2)[0]
    rank_rows.take([torch.ones(1000), np.ones(1000)])
    tensor, array = rank_rows.lockstep.empty_batch()
    assert [len(tensor), len(array), tensor.untyped_storage().nbytes(), array.base] == [0, 0, 0, None]


def test_a_batch_that_cant_be_without_rows_is_an_error_only_where_one_is_needed():
    rank_rows, batch = rank_rows_of("sharded", 2)[0], pack_sequence([torch.ones(2), torch.ones(1)])
    assert rank_rows.take(batch) is batch
    with pytest.raises(SplitError, match="drop_last=True"):
        rank_rows.lockstep.empty_batch()


DATA = TensorDataset(torch.arange(8))
