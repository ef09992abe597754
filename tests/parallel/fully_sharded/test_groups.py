"""Which modules are sharded together."""

import pytest
import torch
from torch import nn

import everygpu
from everygpu.errors import OptionError, RankError
from everygpu.parallel.fully_sharded.options import find_groups
from tests.parallel.fully_sharded.training import Block, Net


class ResNet(nn.Module):
    """Stages of one class in attributes, each a list of blocks."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 2, 3)
        self.layer1 = nn.Sequential(Block(4), Block(4))
        self.layer2 = nn.Sequential(Block(6), Block(6), Block(6))
        self.fc = nn.Linear(6, 40)


class Unlisted(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.small = nn.Linear(8, 9), nn.GRU(8, 8), nn.Linear(2, 2)


class Repeated(nn.Module):
    """One layer called many times, another that shares a weight with the root, and a list of lists."""

    def __init__(self):
        super().__init__()
        self.same = nn.ModuleList([Block()] * 4)
        self.tied = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.lists = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])])
        self.weight = self.tied[0].weight


LAYER = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)


def parametrized():
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    return nn.ModuleDict({"a": linear, "b": nn.Linear(4, 4)})


@pytest.mark.parametrize(
    ("make", "blocks", "others"),
    [
        (Net, ["blocks.0", "blocks.1", "blocks.2"], []),
        (lambda: Net(tied=True), ["blocks.0", "blocks.1", "blocks.2"], []),
        (ResNet, ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer2.2"], ["fc"]),
        (Unlisted, [], ["encoder", "decoder"]),
        (Repeated, ["same.0", "tied.1", "lists.0.0", "lists.0.1", "lists.1.0", "lists.1.1"], []),
        (lambda: nn.Sequential(nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 9), nn.Linear(1, 2)), ["0", "2"], []),
        (lambda: nn.Linear(3, 3), [], []),
        (parametrized, [], ["a", "b"]),
        (
            lambda: nn.TransformerEncoder(LAYER, 2),
            ["layers.0", "layers.1"],
            [],
        ),
    ],
)
def test_groups_are_found(make, blocks, others):
    model = make()
    names = {module: name for name, module in model.named_modules()}
    groups = find_groups(model)
    assert [names[m] for m in groups.blocks] == blocks
    assert [names[m] for m in groups.others] == others


def test_classes_say_what_blocks_are():
    model = Net()
    assert find_groups(model, [nn.LayerNorm]).blocks == (*(b.norm for b in model.blocks), model.norm)
    with pytest.raises(OptionError, match="no module of wrap=GRU"):
        find_groups(model, [nn.GRU])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"shard": "parameters"}, RankError, "everygpu run --processes auto"),
        ({"shard": "weights"}, OptionError, "shard must be"),
        ({"precision": "bf16"}, OptionError, "precision needs shard="),
        ({"wrap": [Block]}, OptionError, "wrap needs shard="),
        ({"shard": "parameters", "wrap": ["Block"]}, OptionError, "wrap must be"),
        ({"shard": "parameters", "precision": "fp16"}, OptionError, "precision must be"),
        ({"shard": "parameters", "checkpoint_activations": "all"}, OptionError, "checkpoint_activations must be"),
        ({"shard": "parameters", "engine": "capture"}, OptionError, "engine must be"),
    ],
)
def test_options_are_checked(options, error, message):
    model = nn.Linear(2, 2)
    with pytest.raises(error, match=message):
        everygpu.DataParallel(model, ["cpu"], **options)
    assert type(model) is nn.Linear
    assert model(torch.ones(1, 2)).shape == (1, 2)
