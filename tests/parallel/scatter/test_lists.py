"""Lists that may have an item per row: a warning tells how they are taken."""

import logging

import pytest
import torch
from torch import nn

from everygpu import DataParallel, Feeder, Replicated, Rows
from everygpu.parallel import scatter
from everygpu.parallel.scatter import row_count

CPUS = ["cpu"] * 2
X = torch.ones(4, 2)
WIDE, HIGH = torch.ones(3, 4, 5), torch.ones(3, 6, 5)


@pytest.fixture(autouse=True)
def said(caplog):
    """Give what is said, from the beginning of the test on."""
    row_count._warn_of_list.cache_clear()
    caplog.set_level(logging.WARNING, logger="everygpu")
    return caplog


@pytest.mark.parametrize(
    ("items", "what"),
    [
        (["a"] * 4, "4 items (str)"),
        (("a",) * 4, "4 items (str)"),
        ([{"id": i} for i in range(4)], "4 items (dict)"),
        ([object() for _ in range(4)], "4 items (object)"),
        ([(3, 4)] * 4, "4 items (tuple)"),
        ([{}] * 4, "4 items (dict)"),
        ([5, 3, 2, 1], "4 items (int)"),
        ((0.5, 1.0, 0.0, 2.0), "4 items (float)"),
        ([True, False] * 2, "4 items (bool)"),
        ([WIDE, HIGH], "tensors of several shapes, each of which is cut along dim 0"),
        ((WIDE, HIGH), "tensors of several shapes, each of which is cut along dim 0"),
    ],
)
def test_lists_that_may_be_rows_are_told_of_once(said, items, what):
    batch = {"meta": items} if torch.is_tensor(items[0]) else {"x": X, "meta": items}
    for _ in range(2):
        shards = scatter(batch, CPUS)
    assert all(len(s["meta"]) == len(items) for s in shards)
    (message,) = said.messages
    for part in ('args[0]["meta"] is a list of ', what, "everygpu.Rows(...)", "everygpu.Replicated(...)"):
        assert part in message


@pytest.mark.parametrize(
    "inputs",
    [
        *((X, items) for items in (["a"] * 3, [1, 2, 3], [None] * 4, [torch.ones(4)] * 4, [torch.tensor(1)] * 4)),
        *((X, items) for items in (Rows("abcd"), Replicated(["a"] * 4), [{"y": X}] * 4, "abcd", dict.fromkeys("abcd"))),
        ([WIDE, HIGH], torch.ones(3)),
        *([WIDE, other] for other in (WIDE, torch.ones(3, 4), "text")),
        {"a": WIDE, "b": HIGH},
        Rows([WIDE, HIGH]),
        [WIDE],
    ],
    ids=repr,
)
def test_others_are_not(said, inputs):
    scatter(inputs, CPUS)
    assert said.messages == []


def test_one_device_needs_no_word(said):
    scatter((torch.ones(4), ["a"] * 4), ["cpu"])
    DataParallel(nn.Identity(), ["cpu"])((torch.ones(4), ["a"] * 4))
    assert said.messages == []


def test_what_a_loader_gives_is_no_list_of_rows(said):
    x, y = torch.ones(4, 2), torch.ones(4, 3)
    for a, b, names in Feeder([[x, y, ["a", "b", "c", "d"]]], CPUS):
        assert (len(a), len(b), len(names)) == (4, 4, 4)
        DataParallel(nn.Bilinear(2, 3, 1), CPUS)(a, b)
    scatter((x, y), CPUS)
    assert said.messages == []


def test_batches_of_other_sizes_are_not_told_of_again(said):
    for num_rows in (4, 6, 3):
        scatter((torch.ones(num_rows, 2), ["a"] * num_rows), CPUS)
    assert len(said.messages) == 1
