"""Methods of the module run on all devices as its forward does: ``call_method``."""

import numpy as np
import pytest
import torch
from torch import nn

import everygpu
from everygpu import DataParallel
from everygpu.errors import CallError, GatherError, SplitError
from everygpu.parallel import ShardedBatch

pytestmark = pytest.mark.usefixtures("in_threads")


class Writer(nn.Module):
    """Appends tokens until all of its rows have ended, as ``generate`` does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.dropout = nn.Dropout(0.5)
        self.num_calls = 0

    def forward(self, x):
        return x * self.scale

    def generate(self, lengths, max_new_tokens=20):
        """Return (rows, length of the longest) tokens, a row of n being 1 to n and then 0."""
        self.num_calls += 1
        columns = torch.arange(1, min(int(lengths.max()), max_new_tokens) + 1, device=lengths.device)
        return torch.where(columns <= lengths[:, None], columns, 0)

    def encode(self, x, *, bias=None):
        hidden = self.dropout(x) * self.scale
        return {"hidden": hidden if bias is None else hidden + bias, "name": "encoded"}

    def loss(self, x):
        return (x * self.scale).mean()

    def fresh(self, x):
        return torch.ones(len(x)) + x.sum() * 0

    def double(self):  # as nn.Module has one: the wrapper's own isn't meant
        return torch.full((1, 1), self.scale.item() * 2)

    def fail(self, x):
        if len(x) == 2:
            raise KeyError("mine")
        return x


LENGTHS = torch.tensor([3, 1, 2, 5, 4])


def writers(used, **options):
    return DataParallel(Writer().to(used[0]), used, **options)


def with_method(method):
    """Make a model of two replicas with a method of its own."""
    return DataParallel(type("Own", (nn.Identity,), {"method": method})(), ["cpu"] * 2)


class TestGenerate:
    def test_rows_are_filled_up(self, devices):
        used = devices(2)
        model = writers(used)
        out = model.call_method("generate", LENGTHS.to(used[0]), pad_value=0)
        assert type(out) is ShardedBatch
        assert everygpu.parallel.gather(out, -1).tolist() == model.module.generate(LENGTHS.to(used[0])).tolist()
        assert out.shape == (5, 5)
        filled = model.call_method("generate", LENGTHS, max_new_tokens=4, pad_value=-1)
        assert everygpu.parallel.gather(filled, -1).tolist()[0] == [1, 2, 3, -1]
        assert model.num_calls == 3
        assert model.call_method("generate", LENGTHS, max_new_tokens=2).shape == (5, 2), "equal sizes need no value"
        with pytest.raises(GatherError, match=r"got \(3, 3\), \(2, 5\) from the replicas. Pass pad_value=... to call_"):
            model.call_method("generate", LENGTHS)

    def test_one_device_is_not_scattered(self):
        lengths, seen = LENGTHS.clone(), []
        model = DataParallel(type("Own", (nn.Identity,), {"method": lambda self, x: seen.append(x)})(), ["cpu"])
        model.call_method("method", lengths)
        assert seen[0] is lengths

    @pytest.mark.parametrize("gather", ["sharded", "joined"])
    @pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.complex64])
    def test_of_any_dtype(self, dtype, gather):
        model = with_method(lambda self, x: {"out": x[:, : len(x)].to(dtype), "array": x[:, : len(x)].numpy()})
        model.gather_rule = gather
        out = model.call_method("method", torch.ones(3, 4), pad_value=0)
        expected = torch.tensor([[1, 1], [1, 1], [1, 0]])
        assert torch.equal(
            everygpu.parallel.gather(out["out"]) if gather == "sharded" else out["out"], expected.to(dtype)
        )
        assert np.array_equal(out["array"], expected)

    def test_gradients_reach_what_was_filled_up(self):
        x = torch.ones(3, 4, requires_grad=True)
        with_method(lambda self, x: x[:, : len(x)] * 3).call_method("method", x, pad_value=7.0).sum().backward()
        assert x.grad.tolist() == [[3, 3, 0, 0], [3, 3, 0, 0], [3, 0, 0, 0]]

    def test_other_numbers_of_dimensions_are_no_sizes(self):
        with pytest.raises(GatherError, match="same structure"):
            with_method(lambda self, x: x.squeeze()).call_method("method", torch.ones(3, 2), pad_value=0)


class TestAsForward:
    def test_trains_with_forward_and_sees_the_module_as_it_is(self, devices):
        used = devices(2)
        model = writers(used)
        model.eval()
        x, bias = torch.arange(5.0, device=used[0]), torch.ones(5, device=used[0])
        out = model.call_method("encode", x, bias=bias)
        assert out["name"] == "encoded"
        torch.testing.assert_close(everygpu.parallel.gather(out["hidden"]), x * 2 + 1)
        model(x).sum().backward()
        out["hidden"].sum().backward()
        assert model.scale.grad == 20
        torch.testing.assert_close(model.call_method("loss", x).mean().cpu(), torch.tensor(4.0))  # weighted by rows
        with torch.no_grad():
            model.scale.fill_(5.0)
        torch.testing.assert_close(everygpu.parallel.gather(model.call_method("encode", x)["hidden"]), x * 5)

    def test_masks_are_those_of_forward(self):
        x, model, drawn = torch.ones(64), writers(["cpu"] * 2), []
        for _ in range(2):
            torch.manual_seed(3)
            drawn.append(model.call_method("encode", x)["hidden"].tolist())
        assert drawn[0] == drawn[1]
        assert drawn[0][:32] != drawn[0][32:]

    def test_autocast_and_grad_mode(self):
        model = DataParallel(type("Modes", (nn.Linear,), {"project": lambda self, x: self(x)})(2, 2), ["cpu"] * 2)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            out = model.call_method("project", torch.ones(4, 2))
        assert (out.dtype, out.requires_grad) == (torch.bfloat16, False)

    def test_frozen(self):
        model, x = writers(["cpu"] * 2), torch.ones(4)
        model.eval()
        with model.frozen(), torch.no_grad():
            model(x)
            model.scale.data.fill_(9.0)  # against the promise: the second replica keeps what it has
            assert model.call_method("encode", x)["hidden"].tolist() == [9, 9, 2, 2]

    def test_tensors_made_without_a_device(self, devices):
        used = devices(2)
        out = writers(used).call_method("fresh", torch.ones(4, device=used[0]))
        assert [shard.device for shard in out.shards] == list(used)

    def test_a_submodule_and_a_name_of_nn_module(self):
        model = writers(["cpu"] * 2)
        assert model.call_method("dropout", torch.ones(4)).shape == (4,)
        assert model.call_method("double").tolist() == [[4.0]]

    @pytest.mark.parametrize("num", [1, 2])
    def test_by_overridden_verbs(self, num):
        class Own(DataParallel):
            def scatter(self, inputs, kwargs, device_ids):
                return super().scatter(tuple(i["data"] for i in inputs), kwargs, device_ids)

            def gather(self, outputs, output_device):
                return {"joined": super().gather(outputs, output_device)}

        out = Own(Writer(), ["cpu"] * num).call_method("generate", {"data": LENGTHS}, pad_value=0)
        out = out["joined"] if num == 2 else out
        assert everygpu.parallel.gather(out, -1).tolist() == Writer().generate(LENGTHS).tolist()


class TestErrors:
    def test_name_the_replica(self):
        with pytest.raises(KeyError, match="mine") as caught:
            writers(["cpu"] * 2).call_method("fail", torch.ones(5))
        assert "replica 1 on cpu failed" in str(caught.value.__cause__)

    @pytest.mark.parametrize("num", [1, 2])
    @pytest.mark.parametrize(
        ("name", "words"),
        [("genrate", "got 'genrate'. Did you mean 'generate'"), ("scale_", "got 'scale_'"), ("num_calls", "must have")],
    )
    def test_unknown_methods(self, num, name, words):
        with pytest.raises(CallError, match=words):
            writers(["cpu"] * num).call_method(name)

    def test_rows_must_agree(self):
        with pytest.raises(SplitError, match="same number of rows"):
            writers(["cpu"] * 2).call_method("encode", torch.ones(4), bias=torch.ones(3))

    def test_not_within_its_own_forward(self):
        class Calls(Writer):
            def forward(self, x):
                return self.wrapper[0].call_method("encode", x)

        net = Calls()
        model = DataParallel(net, ["cpu"] * 2)
        net.wrapper = [model]
        with pytest.raises(CallError, match="from within its own forward"):
            model(torch.ones(4))
        net.wrapper.clear()
