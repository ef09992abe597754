"""Outputs and inputs whose rows are on another dimension, as the state of an ``nn.LSTM`` with ``batch_first`` has."""

import logging

import pytest
import torch
from torch import nn

from everygpu import DataParallel, gather
from everygpu.errors import GatherError, SplitError
from everygpu.parallel import rows_elsewhere
from everygpu.parallel.scatter.row_count import find_rows
from tests.parallel.models import Returning


@pytest.fixture(autouse=True)
def said(caplog):
    """Give what is said, from the beginning of the test on."""
    rows_elsewhere._say.cache_clear()
    caplog.set_level(logging.WARNING, logger="everygpu")
    return caplog


def run(function, num_rows=8, **options):
    return DataParallel(Returning(function), ["cpu"] * 2, engine="threads", **options)(torch.ones(num_rows, 3))


def lstm(num_replicas=3, **options):
    torch.manual_seed(0)
    net = nn.LSTM(8, 4, 2, batch_first=not options)
    return net, DataParallel(net, ["cpu"] * num_replicas, engine="threads", **options)


def test_the_state_of_an_lstm_is_joined_along_dim_0_and_warned_of_once(said):
    _, model = lstm()
    for _ in range(2):
        out, (h, _) = model(torch.randn(12, 5, 8))
        assert (out.shape, h.shape) == ((12, 5, 4), (6, 4, 4))  # one device gives (2, 12, 4)
    (message,) = said.messages
    assert message.startswith("gather: out[1][0] and out[1][1]: as many entries on dim 1 as each replica has rows")
    assert "permute them to dim 0" in message


def test_with_rows_on_dim_1_everywhere_the_state_is_that_of_one_device(said):
    net, model = lstm(dim=1)
    x = torch.randn(5, 7, 8)
    one, many = net(x), model(x)
    one, many = net(x, one[1]), model(x, many[1])
    assert torch.allclose(gather(many[0]), one[0], atol=1e-6)
    assert torch.allclose(gather(many[1][0]), one[1][0], atol=1e-6)
    assert said.messages == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x, x.new_ones(12, 4, 4)),  # three entries for each row
        lambda x: (x, x.new_ones(4, 4, 2)),
        lambda x: (x, x.new_ones(3, 4)),
        lambda x: (x, x.new_ones(1)),
        lambda x: (x, x.sum()),
        lambda x: x.new_ones(3, 4, 2),  # no other output tells where the rows are
        lambda x: (x.sum(), x.new_ones(3, 4, 2)),
        lambda x: (x, [x.new_ones(3, 5, 2)]),
    ],
)
def test_other_outputs_are_not_warned_of(function, said):
    run(function)
    assert said.messages == []


def test_boxes_of_several_rows_are_not_warned_of(said):
    sizes = iter([(3, 4, 2), (5, 4, 2)])
    assert run(lambda x: (x, x.new_ones(*next(sizes))))[1].shape == (8, 4, 2)
    assert said.messages == []


def test_states_of_unequal_replicas_say_to_permute():
    with pytest.raises(GatherError, match=r"\(2, 3, 4\), .*\(2, 1, 4\) .* If its rows are on dim 1, permute it inside"):
        lstm()[1](torch.randn(7, 5, 8))
    widths = iter([5, 6])
    with pytest.raises(GatherError, match="Pad to a common length"):
        run(lambda x: x.new_ones(4, next(widths), 4))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("shape", [(2, 12, 4), (6, 4, 4)], ids=["of one device", "as replicas' were joined"])
def test_a_state_that_is_passed_back_names_its_dim(shape, first):
    named = [("args[0]", torch.ones(12, 5, 8)), ("args[1][0]", torch.ones(shape))]
    with pytest.raises(SplitError, match=r"If the rows of args\[1\]\[0\] are on dim 1, .* permute it .* pass dim=1"):
        find_rows(named if first else named[::-1], 0, 3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_disagreements_say_nothing_of_it():
    for shape in ((7, 3, 3), (5, 12)):
        with pytest.raises(SplitError) as caught:
            find_rows([("args[0]", torch.ones(12, 5)), ("args[1]", torch.ones(shape))], 0, 2)
        assert "nn.LSTM" not in str(caught.value)
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)])
    with pytest.raises(SplitError, match="got 5 in x and 2 in y"):
        find_rows([("x", torch.ones(5, 2)), ("y", nested)], 0, 2)
