"""Classes with a way of their own to be counted, cut, joined and moved."""

import sys
import types

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from everygpu import DataParallel, Feeder, Replicated, TrainStep, register_batch
from everygpu.errors import OptionError, SplitError
from everygpu.feed.rank_rows import slice_rows
from everygpu.parallel import gather, scatter


class Ragged:
    """Rows of unequal length, one after another."""

    def __init__(self, values, lengths):
        self.values, self.lengths = values, lengths

    def split(self, rows):
        lengths = self.lengths.split(rows)
        return [Ragged(*part) for part in zip(self.values.split([int(n.sum()) for n in lengths]), lengths)]

    @staticmethod
    def join(parts):
        return Ragged(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))

    def to(self, device):
        return Ragged(self.values.to(device), self.lengths.to(device))

    def tolist(self):
        return self.values.tolist(), self.lengths.tolist()


class Larger(Ragged):
    pass


class Node:
    def __init__(self, x):
        self.x = x


@pytest.fixture(scope="module", autouse=True)
def known():
    register_batch(Ragged, split=Ragged.split, join=Ragged.join, rows=lambda batch: len(batch.lengths))
    register_batch(Node, move=lambda node, device: Node(node.x.to(device)))


def ragged(kind=Ragged, device="cpu"):
    return kind(torch.arange(10.0, device=device), torch.tensor([1, 4, 2, 0, 3], device=device))


class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.tensor(2.0))

    def forward(self, batch):
        assert batch.values.device == self.by.device
        return Ragged(batch.values * self.by, batch.lengths)


class TestRegistered:
    @pytest.mark.parametrize("kind", [Ragged, Larger])
    def test_is_cut_by_its_rows(self, devices, kind):
        used = devices(2)
        shards = scatter({"r": ragged(kind, used[0]), "x": torch.ones(5, 2)}, used)
        assert [s["r"].tolist() for s in shards] == [([0, 1, 2, 3, 4, 5, 6], [1, 4, 2]), ([7, 8, 9], [0, 3])]
        assert [s["r"].values.device for s in shards] == used

    @pytest.mark.parametrize("num_replicas", [1, 2, 3])
    def test_is_joined_with_gradients(self, devices, num_replicas):
        used = devices(num_replicas)
        module = Double().to(used[0])
        out = DataParallel(module, used, engine="threads")(ragged(device=used[0]))
        assert out.tolist() == ([2.0 * i for i in range(10)], [1, 4, 2, 0, 3])
        assert out.values.device == used[0]
        out.values.sum().backward()
        assert module.by.grad.item() == 45

    def test_whatever_the_dim(self):
        first, second = scatter((torch.ones(2, 5), ragged()), ["cpu"] * 2, 1)
        assert (first[0].shape, first[1].lengths.tolist()) == ((2, 3), [1, 4, 2])
        assert (second[0].shape, second[1].lengths.tolist()) == ((2, 2), [0, 3])

    def test_number_of_rows_must_be_that_of_the_others(self):
        with pytest.raises(SplitError, match=r"got 4 in args\[0\] and 5 in args\[1\]\."):
            scatter((torch.ones(4), ragged()), ["cpu"] * 2)

    def test_whole_on_purpose(self, devices):
        used = devices(2)
        shards = scatter((torch.ones(2), Replicated({"r": ragged()})), used)
        assert [s[1]["r"].lengths.tolist() for s in shards] == [[1, 4, 2, 0, 3]] * 2
        assert [s[1]["r"].values.device for s in shards] == used

    def test_from_the_feeder(self, devices):
        used = devices(2)
        (batch,) = list(Feeder([{"r": ragged(), "x": torch.ones(5)}], used))
        assert batch["r"].values.device == used[0]
        assert [s["r"].lengths.tolist() for s in scatter(batch, used)] == [[1, 4, 2], [0, 3]]

    def test_ranks_are_dealt_their_own(self):
        assert slice_rows((ragged(), torch.arange(5)), slice(1, 3), 0)[0].tolist() == ([1, 2, 3, 4, 5, 6], [4, 2])
        assert slice_rows(ragged(), slice(5, 5), 0).tolist() == ([], [])

    def test_another_number_of_parts_is_an_error(self):
        class Whole(Ragged):
            pass

        register_batch(
            Whole, split=lambda batch, rows: [batch], join=Ragged.join, rows=lambda batch: len(batch.lengths)
        )
        with pytest.raises(SplitError, match=r"a part of a \S*Whole for each number of rows in \[3, 2\], got 1"):
            scatter(ragged(Whole), ["cpu"] * 2)

    def test_among_the_targets_of_a_step(self, devices):
        used = devices(2)
        module = nn.Linear(1, 1).to(used[0])
        step = TrainStep(
            DataParallel(module, used),
            lambda out, target: (gather(out)[:, 0] - target.lengths.float()).square().mean(),
            torch.optim.SGD(module.parameters(), lr=0.0),
        )
        assert step(torch.ones(5, 1), ragged()).isfinite()

    def test_counts_before_what_a_class_is_besides(self):
        class Words(dict):
            pass

        register_batch(
            Words,
            split=lambda batch, rows: [Words(words=part.tolist()) for part in torch.tensor(batch["words"]).split(rows)],
            join=lambda parts: Words(words=[word for part in parts for word in part["words"]]),
            move=lambda batch, device: batch,
            rows=lambda batch: len(batch["words"]),
        )  # fmt: skip
        parts = scatter(Words(words=[0, 1, 2]), ["cpu"] * 2)
        assert parts == [{"words": [0, 1]}, {"words": [2]}]
        assert gather(parts, "cpu") == {"words": [0, 1, 2]}


class TestOneRow:
    @pytest.mark.parametrize("kind", [list, tuple])
    def test_lists_are_cut_between_objects(self, devices, kind):
        used = devices(2)
        shards = scatter({"n": kind(Node(torch.ones(i + 1)) for i in range(3)), "x": torch.ones(3)}, used)
        assert [[len(node.x) for node in s["n"]] for s in shards] == [[1, 2], [3]]
        assert {type(s["n"]) for s in shards} == {kind}
        assert [node.x.device for s in shards for node in s["n"]] == [used[0], used[0], used[1]]

    def test_are_joined_in_order(self):
        one, two, three = (Node(torch.tensor(i)) for i in (1, 2, 3))
        assert [node.x.item() for node in gather([[one, two], [three]], "cpu")] == [1, 2, 3]

    def test_several_arguments_are_no_list(self):
        with pytest.raises(SplitError, match="the Node object"):
            DataParallel(nn.Identity(), ["cpu"] * 2)(Node(torch.ones(2)))

    def test_among_others_it_is_no_row(self):
        with pytest.raises(SplitError, match="the Node object"):
            scatter([Node(torch.ones(2)), "x"], ["cpu"] * 2)


@pytest.mark.parametrize("kind", [dict, list, tuple, torch.Tensor, int, "Ragged", None])
def test_what_cannot_be_registered(kind):
    with pytest.raises(OptionError, match="needs a class other than"):
        register_batch(kind)


@pytest.mark.parametrize("only", [{"split": Ragged.split}, {"join": Ragged.join}])
def test_splitting_and_joining_belong_together(only):
    with pytest.raises(OptionError, match="needs both split and join"):
        register_batch(Node, **only)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(2, 3, batch_first=True)

    def forward(self, packed):
        out, (last, _) = self.rnn(packed)
        return {"out": out, "last": last[0]}


def packed(lengths, *, is_sorted, device="cpu"):
    x = torch.arange(2.0 * len(lengths) * max(lengths), device=device).view(len(lengths), -1, 2).requires_grad_()
    return x, pack_padded_sequence(x / 10, lengths, batch_first=True, enforce_sorted=is_sorted)


class TestPackedSequences:
    @pytest.mark.parametrize("num_replicas", [2, 3])
    @pytest.mark.parametrize(
        ("lengths", "is_sorted"), [([1, 4, 2, 5, 3], False), ([5, 4, 2, 2, 1], True), ([3, 3, 3, 3, 3], False)]
    )
    def test_replicas_see_their_rows(self, devices, num_replicas, lengths, is_sorted):
        used = devices(num_replicas)
        module = Recurrent().to(used[0])
        (x, batch), (y, again) = (packed(lengths, is_sorted=is_sorted, device=used[0]) for _ in range(2))
        expected, found = module(batch), DataParallel(module, used, engine="threads")(again)
        assert type(found["out"]) is PackedSequence
        assert (found["out"].sorted_indices is None) == is_sorted
        for a, b in zip(pad_packed_sequence(found["out"]), pad_packed_sequence(expected["out"])):
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(gather(found["last"]), expected["last"])
        for out in (expected, found):
            (out["out"].data.square().sum() + out["last"].sum()).backward()
        torch.testing.assert_close(y.grad, x.grad)

    def test_dealt_to_ranks(self):
        _, batch = packed([1, 4, 2], is_sorted=False)
        assert pad_packed_sequence(slice_rows(batch, slice(1, 3), 0))[1].tolist() == [4, 2]
        with pytest.raises(SplitError, match="1 row or more"):
            slice_rows(batch, slice(0, 0), 0)


class TestNestedTensors:
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    def test_replicas_see_their_rows(self, devices, layout):
        used = devices(2)
        rows = [torch.ones(i + 1, 4, device=used[0], requires_grad=True) for i in range(3)]
        nested = torch.nested.as_nested_tensor(rows, layout=layout)
        shards = scatter((nested, torch.ones(3)), used)
        assert [[tuple(row.shape) for row in s[0].unbind()] for s in shards] == [[(1, 4), (2, 4)], [(3, 4)]]
        assert [s[0].device for s in shards] == used
        joined = gather([s[0] * 2.0 for s in shards], used[0])
        assert joined.layout == layout
        assert [row.tolist() for row in joined.unbind()] == [[[2.0] * 4] * (i + 1) for i in range(3)]
        joined.to_padded_tensor(0.0).sum().backward()
        assert rows[2].grad.tolist() == [[2.0] * 4] * 3

    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    def test_none_for_a_rank_is_an_error(self, layout):
        rows = [torch.ones(3, 2, 4), torch.ones(3, 5, 4)]
        with pytest.raises(SplitError, match="drop_last=True"):
            slice_rows(torch.nested.as_nested_tensor(rows, layout=layout), slice(1, 1), 0)

    def test_an_error_in_forward_stays_as_it_is(self):
        class Failing(nn.Module):
            def forward(self, x):
                raise ValueError("theirs")

        nested = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 2)])
        with pytest.raises(ValueError, match="theirs") as caught:
            DataParallel(Failing(), ["cpu"] * 2, engine="threads")(nested)
        assert "called with args[0] (1,)" in str(caught.value.__cause__)

    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    def test_from_the_feeder(self, devices, layout):
        used = devices(2)
        nested = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 2)], layout=layout)
        (batch,) = list(Feeder([{"x": nested}], used))
        assert batch["x"].device == used[0]
        assert [s["x"].unbind()[0].shape for s in scatter(batch, used)] == [(1, 2), (3, 2)]


def test_libraries_are_found_by_name(monkeypatch):
    """Lists of a BatchEncoding's encodings are rows, once tokenizers is imported."""
    library = types.ModuleType("tokenizers")
    library.Encoding = type("Encoding", (), {})
    encodings = [library.Encoding() for _ in range(3)]
    assert scatter((torch.ones(3), encodings), ["cpu"] * 2)[0][1] == encodings
    monkeypatch.setitem(sys.modules, "tokenizers", library)
    library.Encoding = type("Encoding", (), {})
    encodings = [library.Encoding() for _ in range(3)]
    assert [s[1] for s in scatter((torch.ones(3), encodings), ["cpu"] * 2)] == [encodings[:2], encodings[2:]]


class TableBase:
    """What a tensordict has of what is used of it."""

    def __init__(self, x, batch_size):
        self.x, self.batch_size = x, batch_size

    def split(self, rows, dim):
        return [TableBase(part, (len(part),)) for part in self.x.split(rows, dim)]

    def to(self, device):
        return self


def test_tensordicts_have_their_rows_on_dim_0(monkeypatch):
    library = types.ModuleType("tensordict")
    library.TensorDictBase, library.is_tensorclass = TableBase, lambda kind: False
    monkeypatch.setitem(sys.modules, "tensordict", library)
    table = TableBase(torch.ones(3, 2), (3,))
    assert [part.batch_size for part in scatter(table, ["cpu"] * 2)] == [(2,), (1,)]
    with pytest.raises(SplitError, match=r"a TableBase must have its rows on dim 0, got dim=1 for args\[0\]"):
        scatter(table, ["cpu"] * 2, 1)
    with pytest.raises(SplitError, match="the TableBase object"):
        scatter(TableBase(torch.ones(3, 2), ()), ["cpu"] * 2)
