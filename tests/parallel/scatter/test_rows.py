"""Lists whose items are each a row, from the loader to the outputs."""

import pytest
import torch
from torch import nn

from everygpu import DataParallel, Rows
from everygpu.errors import GatherError, SplitError
from everygpu.parallel import gather, scatter

WORDS = ["a", "b", "c", "d", "e"]


def images(device="cpu"):
    return Rows(torch.full((3, 4 + i, 5), float(i), device=device) for i in range(5))


class Detect(nn.Module):
    """Takes images of several sizes, and returns what it finds in each."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images, x):
        assert len(images) == len(x)
        assert all(image.device == self.scale.device for image in images)
        found = [{"box": image[0] * self.scale, "name": "i" * i} for i, image in enumerate(images)]
        return {"found": Rows(found), "mean": x.mean(1)}


class TestInputs:
    def test_each_replica_gets_its_items(self, devices):
        used = devices(2)
        shards = scatter((Rows(WORDS), {"x": torch.ones(5, 2)}), used)
        assert [s[0] for s in shards] == [WORDS[:3], WORDS[3:]]
        assert {type(s[0]) for s in shards} == {Rows}
        assert [len(s[1]["x"]) for s in shards] == [3, 2]

    def test_tensors_in_items_are_moved_and_not_cut(self, devices):
        used = devices(2)
        rows = Rows({"image": image, "name": "x", "more": [image]} for image in images(used[0]))
        shards = scatter(rows, used)
        for device, shard in zip(used, shards):
            assert {row["image"].device for row in shard} == {row["more"][0].device for row in shard} == {device}
        assert [row["image"].shape[1] for shard in shards for row in shard] == [4, 5, 6, 7, 8]

    def test_gradients_flow_back(self, devices):
        used = devices(2)
        rows = Rows(torch.ones(i + 1, device=used[0], requires_grad=True) for i in range(3))
        sum((i + 1) * row.sum().to(used[0]) for i, s in enumerate(scatter(rows, used)) for row in s).backward()
        assert [row.grad.tolist() for row in rows] == [[1], [1, 1], [2, 2, 2]]

    def test_none_make_one_empty_shard(self):
        (shard,) = scatter({"words": Rows(), "x": torch.ones(0, 2)}, ["cpu"] * 3)
        assert shard["words"] == []
        assert type(shard["words"]) is Rows

    def test_number_must_be_that_of_the_others(self):
        with pytest.raises(SplitError, match=r"got 4 in args\[0\] and 5 in args\[1\]"):
            scatter((torch.ones(4), Rows(WORDS)), ["cpu"] * 2)


class TestOutputs:
    def test_tensors_on_the_cpu_stay_there(self, devices):
        used = devices(2)
        joined = gather([Rows([torch.ones(1)]), Rows([torch.ones(2)])], used[0])
        assert {row.device.type for row in joined} == {"cpu"}

    def test_all_replicas_must_return_them(self):
        with pytest.raises(GatherError, match=r"out\[\"a\"\].*Rows from replica 0 and list from replica 1"):
            gather([{"a": Rows(["x"])}, {"a": ["x"]}], "cpu")

    @pytest.mark.parametrize("num_replicas", [1, 2, 3])
    def test_of_a_model(self, devices, num_replicas):
        used = devices(num_replicas)
        module = Detect().to(used[0])
        out = DataParallel(module, used, engine="threads")(images(used[0]), torch.ones(5, 2, device=used[0]))
        assert [row["box"].shape for row in out["found"]] == [(4 + i, 5) for i in range(5)]
        assert {row["box"].device for row in out["found"]} == {used[0]}
        assert out["mean"].shape == (5,)
        sum(row["box"].sum() for row in out["found"]).backward()
        assert module.scale.grad.item() == sum(i * (4 + i) * 5 for i in range(5))
