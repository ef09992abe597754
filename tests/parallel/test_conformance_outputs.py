"""What comes out: tensors are joined, containers rebuilt, the rest passed on, or a reason is given why not."""

import dataclasses
import logging
import sys
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import everygpu
from everygpu import DataParallel, Rows
from everygpu.errors import GatherError, SplitError
from everygpu.parallel import gather
from tests.parallel.oracle import Returning, assert_same_grads, pair, rows

pytestmark = pytest.mark.usefixtures("in_threads")


def join(*outputs, dim=0):
    return gather(outputs, "cpu", dim)


class TestTensors:
    @pytest.mark.parametrize("sizes", [[3], [0, 2], [2, 0, 5], [1, 1, 4, 0, 3, 2]])
    def test_rows_are_joined_in_order_and_gradients_go_back(self, devices, sizes):
        used = devices(len(sizes))
        for dim in range(-3, 3):
            shapes = [[2, 3, 4] for _ in sizes]
            for shape, size in zip(shapes, sizes):
                shape[dim] = size
            outputs = [torch.randn(shape, device=d, requires_grad=True) for shape, d in zip(shapes, used)]
            joined = gather([o * 1 for o in outputs], used[0], dim)  # as a replica's: no leaves
            assert joined.device == used[0]
            assert joined.cpu().equal(torch.cat([o.cpu() for o in outputs], dim))
            weights = torch.randn_like(joined)
            (joined * weights).sum().backward()
            assert torch.cat([o.grad.cpu() for o in outputs], dim).equal(weights.cpu())

    def test_scalars_become_one_entry_per_replica(self, devs):
        outputs = [torch.tensor(float(i), device=d, requires_grad=True) for i, d in enumerate(devs)]
        for dim in (0, 1):
            assert gather(outputs, devs[0], dim).tolist() == [0.0, 1.0, 2.0]
        (gather(outputs, devs[0]) * 3).sum().backward()
        assert [o.grad.item() for o in outputs] == [3.0] * len(devs)
        assert join(torch.tensor(1.0)).shape == (1,)
        assert join(torch.ones(3, 2)).shape == (3, 2)

    def test_dtype_is_kept(self):
        for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int8):
            assert join(torch.ones(2).to(dtype), torch.ones(1).to(dtype)).dtype is dtype

    def test_arrays_are_joined(self):
        assert join(np.ones((2, 3)), np.zeros((1, 3))).tolist() == [[1] * 3, [1] * 3, [0] * 3]
        assert join(np.ones((2, 3)), np.zeros((2, 1)), dim=1).shape == (2, 4)
        assert join(np.array(1), np.array(2)).tolist() == [1, 2]


class TestOtherValues:
    @pytest.mark.parametrize(
        "value",
        [None, True, 3, 2.5, 1 + 2j, "text", b"bytes", torch.float16, (), [], {}, {1, 2}, Counter(a=2), float("nan"),
         torch.Size([4, 2]), np.float64(1)],
        ids=repr,
    )  # fmt: skip
    def test_equal_values_pass_through(self, value):
        joined = join(value, value, value)
        assert type(joined) is type(value)
        assert joined is value or joined == value

    @pytest.mark.parametrize(
        "values",
        [(1, 2, 1), (1.0, 1), (True, 1), ("a", "b"), ({1}, {2}), (1, "a"), (b"a", "a"), (np.float64(1), np.float64(2)),
         (torch.Size([4, 2]), torch.Size([3, 2]))],
        ids=repr,
    )  # fmt: skip
    def test_differing_values_come_back_as_a_list(self, values):
        joined = join(*values)
        assert joined == list(values)
        assert [type(v) for v in joined] == [type(v) for v in values]

    def test_nan_of_each_replica_is_the_same(self):
        assert isinstance(join(float("nan"), float("nan")), float)

    def test_objects_come_back_as_a_list_also_if_they_compare_oddly(self):
        class Odd:
            __hash__ = None

            def __eq__(self, other):
                raise ValueError("no")

        class Equal:
            __hash__ = None

            def __init__(self):
                self.x = torch.ones(1)

            def __eq__(self, other):
                return True

        for kind in (Odd, Equal):
            a, b = kind(), kind()
            joined = join(a, b)
            assert joined[0] is a
            assert joined[1] is b
            assert join(a, a) is a


@dataclasses.dataclass
class Output:
    logits: Tensor
    number: int
    loss: Tensor | None = None
    hidden: tuple[Tensor, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenOutput:
    logits: Tensor
    rows: int = dataclasses.field(init=False, default=7)


@dataclasses.dataclass
class StrictOutput:
    """Its constructor takes something else than its fields."""

    logits: Tensor
    source: dataclasses.InitVar[str]

    def __post_init__(self, source):
        assert source == "model"


class ModelOutput(OrderedDict):
    """As Hugging Face has it: an ordered dict and a dataclass at once, without what is None."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __getitem__(self, k):
        return dict(self.items())[k] if isinstance(k, str) else self.to_tuple()[k]

    def __setattr__(self, name, value):
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __delitem__(self, *args, **kwargs):
        raise RuntimeError("no")

    def update(self, *args, **kwargs):
        raise RuntimeError("no")

    def to_tuple(self):
        return tuple(self[k] for k in self.keys())

    def __reduce__(self):
        kind, _, *rest = super().__reduce__()
        return kind, tuple(getattr(self, f.name) for f in dataclasses.fields(self)), *rest


@dataclasses.dataclass
class ClassifierOutput(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class Point(NamedTuple):
    x: Tensor
    label: object


Pair = namedtuple("Pair", ["first", "second"])


@pytest.fixture
def numbered(devs):
    """Five rows, row i filled with i."""
    return torch.arange(5, dtype=torch.float64, device=devs[0])[:, None].expand(5, 2)


def opened(value: Any) -> Any:
    """Give what a container holds, in plain ones."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        return (fields, dict(value.items())) if isinstance(value, dict) else fields
    if isinstance(value, deque):
        return [value.maxlen, *value]
    return value.data if isinstance(value, UserDict) else value


CONTAINERS = {
    "NamedTuple": lambda x: Point(x, 0.5),
    "namedtuple": lambda x: Pair(x, {"a": [x]}),
    "return types": lambda x: x.max(1),
    "nested": lambda x: [(x,), [x], {}],
    "OrderedDict": lambda x: OrderedDict(b=x, a=x + 1),
    "keys": lambda x: {2: x, "two": x, (1, 2): x},
    "deque": lambda x: deque([x, x + 1], maxlen=3),
    "UserDict": lambda x: UserDict(a=x),
    "empty": lambda x: ((), [], {}),
    "none": lambda x: (x, None, {"loss": None}),
    "dataclass": lambda x: Output(x, 3, None, (x, x + 1)),
    "frozen dataclass": FrozenOutput,
    "dataclass with another constructor": lambda x: StrictOutput(x, source="model"),
    "ModelOutput": lambda x: ClassifierOutput(logits=x, hidden_states=(x, x)),
}


class TestContainers:
    @pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
    def test_are_rebuilt(self, devs, numbered, make):
        out, expected = DataParallel(Returning(make), devs)(numbered), make(numbered)
        assert type(out) is type(expected)
        torch.testing.assert_close(opened(out), opened(expected))

    @pytest.mark.parametrize("name", ["ours", "transformers.modeling_outputs"])
    def test_a_model_output_with_a_loss(self, devs, numbered, name):
        kind = ClassifierOutput if name == "ours" else pytest.importorskip(name).SequenceClassifierOutput
        out = DataParallel(Returning(lambda x: kind(loss=x.mean(), logits=x, hidden_states=(x, x))), devs)(numbered)
        assert type(out) is kind
        assert list(out) == ["loss", "logits", "hidden_states"]
        assert out.logits is out["logits"] is out[1]
        assert (out.loss.shape, out.hidden_states[1].shape) == ((3,), (5, 2))

    def test_order_of_keys_does_not_matter_and_the_kind_is_kept(self):
        joined = join({"a": torch.zeros(1), "b": torch.ones(1)}, {"b": torch.ones(1), "a": torch.zeros(1)})
        assert list(joined) == ["a", "b"]
        assert joined["b"].tolist() == [1, 1]
        assert join(defaultdict(int, a=torch.ones(1)), defaultdict(int, a=torch.ones(1)))["other"] == 0

    def test_replicas_outputs_are_left_alone(self):
        first, second = [torch.ones(1)], [torch.ones(1)]
        join(first, second).append(3)
        assert len(first) == len(second) == 1

    def test_gradients_flow_through_containers_and_the_cpu(self, devs):
        class Many(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lin = nn.Linear(3, 2)

            def forward(self, x):
                h = self.lin(x)
                return {"a": [h, (h.exp().cpu(),)], "b": Pair(h.sin(), h.cos()), "n": torch.tensor(1.0, device="cpu")}

        model, bare = pair(Many, devs)
        x = rows(7, 3, device=devs[0]).requires_grad_()
        ours, theirs = model(x), bare(x)
        for out in (ours, theirs):
            assert out["a"][1][0].device.type == out.pop("n").device.type == "cpu"
            (out["a"][1][0].sum().to(devs[0]) + out["a"][0].square().sum() + out["b"].first.sum()).backward()
        torch.testing.assert_close(ours, theirs)
        assert_same_grads(model, bare)


class MeanLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x):
        return self.lin(x).square().mean()


@pytest.mark.parametrize("dim", [0, 1, -2])
def test_scalar_losses_become_a_vector_without_a_warning(devs, dim):
    model, bare = pair(MeanLoss, devs, dim=dim)
    x = rows(6, 6, 3, device=devs[0])
    loss = model(x)
    torch.testing.assert_close(loss, torch.stack([bare(shard) for shard in x.chunk(len(devs), dim)]))
    loss.mean().backward()
    bare(x).backward()
    assert_same_grads(model, bare)


class TestErrors:
    @pytest.mark.parametrize(
        ("outputs", "words"),
        [
            ((None, torch.ones(2)), ["out must", "None from replica 0", "shape (2,) from replica 1"]),
            (({"a": None}, {"a": 1}), ['out["a"]', "got None from replica 0 and int from replica 1"]),
            (([torch.ones(1)], [None]), ["out[0]", "None from replica 1"]),
            ((torch.ones(2), torch.ones(2), 3), ["from replica 0", "int from replica 2"]),
            (([torch.ones(1)], (torch.ones(1),)), ["list from replica 0", "tuple from replica 1"]),
            (([1], 1), ["list from replica 0", "int from replica 1"]),
            ((1, [1]), ["int from replica 0", "list from replica 1"]),
            (([1, 2], [1, 2, 3]), ["list of 2 ([0], [1])", "list of 3 ([0], [1], [2])"]),
            (({"a": 1}, {"b": 1}), ['dict of 1 (["a"])', 'dict of 1 (["b"])']),
            (({"a": [0, {"b": 1}]}, {"a": [0, {"b": None}]}), ['out["a"][1]["b"]']),
            ((torch.ones(2), torch.ones(2, 1)), ["shape (2,) from replica 0", "shape (2, 1) from replica 1"]),
            ((torch.tensor(1.0), torch.ones(1)), ["shape () from replica 0", "shape (1,) from replica 1"]),
            ((torch.ones(3, 1).squeeze(), torch.ones(1, 1).squeeze()), ["shape (3,)", "shape ()", "squeeze(-1)"]),
            ((torch.ones(2, 3), torch.ones(2, 4)), ["equal shapes except on dim 0", "(2, 3), (2, 4)", "Pad"]),
            ((np.ones(2), torch.ones(2)), ["ndarray from replica 0"]),
            ((np.ones(2), 1), ["ndarray from replica 0", "int from replica 1"]),
            (({torch.ones(1)}, {torch.ones(1)}), ["out is a set with tensors in it", "Return a list or a dict"]),
            ((), ["at least one replica, got none"]),
            (([torch.tensor(1.0), torch.ones(2)], [torch.tensor(1.0), torch.ones(2)]), ["out[1]", "dim 1", "(2,)"]),
        ],
    )  # fmt: skip
    def test_outputs_that_cannot_be_joined_are_named(self, outputs, words):
        with pytest.raises(GatherError) as caught:
            join(*outputs, dim=int("dim 1" in words))
        for word in words:
            assert word in str(caught.value)

    def test_none_in_one_replica_leaves_the_object_working(self, devices, numbered):
        model = DataParallel(Returning(lambda x: {"aux": None if float(x[0, 0]) == 0 else x}), devices(2))
        with pytest.raises(GatherError, match=r'out\["aux"\].*None from replica 0'):
            model(numbered)
        assert model(numbered[1:])["aux"][:, 0].tolist() == [1, 2, 3, 4]


QUANTIZED = pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*quantiz", "ignore:.*deprecated")
LAYOUTS = {
    "csr": (Tensor.to_sparse_csr, "torch.sparse_csr"),
    "mkldnn": (Tensor.to_mkldnn, "torch._mkldnn"),
    "per channel": (
        lambda x: torch.quantize_per_channel(x, torch.ones(2), torch.zeros(2), 1, torch.qint8),
        "per channel",
    ),
}


@QUANTIZED
@pytest.mark.parametrize(("convert", "named"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_that_torch_cannot_join_are_refused(convert, named):
    outputs = [{"x": convert(torch.ones(2, 2))} for _ in range(2)]
    with pytest.raises(GatherError, match=rf"out\[.x.\] must be strided.*{named}"):
        gather(outputs, "cpu")


@QUANTIZED
def test_tensors_that_are_quantized_are_joined():
    model = DataParallel(Returning(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)), ["cpu"] * 2)
    assert model(torch.ones(3, 2)).dequantize().tolist() == [[1, 1]] * 3


@pytest.mark.parametrize("is_own", [True, False])
def test_large_outputs_without_gradients_are_copied_only_where_they_are_the_models(is_own):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(2, 2**18))

        def forward(self, x):
            out = x.sum() + torch.zeros(2, 2**18) if is_own else self.table
            made.append(out.data_ptr())
            return out

    made = []
    with torch.no_grad():
        out = DataParallel(Wide(), ["cpu"] * 2)(torch.zeros(4, 1))
    assert (out.shards[0].data_ptr() == made[0]) is is_own


@pytest.fixture
def said(caplog):
    """Give what is said, from the beginning of the test on."""
    sys.modules["everygpu.parallel.gather"]._warn_of_no_rows.cache_clear()
    caplog.set_level(logging.WARNING, logger="everygpu")
    return caplog


def run(function, num_rows=8, num_replicas=2, **options):
    """Run on rows 0, 1, 2, …"""
    return DataParallel(Returning(function), ["cpu"] * num_replicas, **options)(torch.arange(float(num_rows)))


class TestNoRows:
    """Outputs that aren't rows of the batch."""

    def test_a_load_per_expert_is_warned_of_once(self, said):
        for _ in range(2):
            out, load = run(lambda x: (x, torch.ones(4)), 9, 3)
            assert (len(out), len(load)) == (9, 12)
        (message,) = said.messages
        assert message.startswith("gather: out[1] has shape (4,) in each of 3 replicas, other than their rows on dim 0")

    def test_a_last_batch_and_others_of_another_size_are_not_told_of_again(self, said):
        for num_rows, num_experts in ((9, 4), (6, 4), (12, 5), (7, 4)):
            run(lambda x, n=num_experts: (x, torch.ones(n)), num_rows, 3)
        assert len(said.messages) == 1

    def test_the_state_of_an_lstm(self, said):
        model = DataParallel(nn.LSTM(8, 4, 2, batch_first=True), ["cpu"] * 3)
        out, (h, _) = model(torch.randn(12, 5, 8))
        assert (out.shape, h.shape) == ((12, 5, 4), (6, 4, 4))  # one device gives (2, 12, 4)
        (message,) = said.messages
        assert "out[1][0] has shape (2, 4, 4)" in message
        assert "nn.LSTM with its rows permuted" in message
        with pytest.raises(GatherError, match=r"\(2, 3, 4\), .*\(2, 1, 4\) .* If its rows are on dim 1, permute it"):
            model(torch.randn(7, 5, 8))

    def test_with_rows_on_dim_1_everywhere_the_state_is_that_of_one_device(self, said):
        net = nn.LSTM(8, 4, 2)
        model, x = DataParallel(net, ["cpu"] * 3, dim=1), torch.randn(5, 7, 8)
        one, many = net(x), model(x)
        one, many = net(x, one[1]), model(x, many[1])
        torch.testing.assert_close(gather(many[0]), one[0])
        torch.testing.assert_close(gather(many[1][0]), one[1][0])
        assert said.messages == []

    @pytest.mark.parametrize("num_anchors", range(7, 13))
    @pytest.mark.parametrize("num_rows", range(3, 9))
    def test_anchors_are_warned_of_however_many_there_are(self, said, num_anchors, num_rows):
        _, anchors = run(lambda x: (x, torch.ones(num_anchors, 4)), num_rows)
        assert len(anchors) == 2 * num_anchors
        assert len(said.messages) == 1

    def test_where_shares_differ_it_is_proven_by_one_output(self, said):
        run(lambda x: torch.ones(6, 2), 8)
        assert said.messages == []
        run(lambda x: torch.ones(6, 2), 7)
        assert len(said.messages) == 1

    def test_others_are_not_warned_of(self, said):
        run(lambda x: (x, x.repeat_interleave(2)), 7)  # two entries for each row, as shares of 4 and 3 show
        for function in (
            lambda x: x.new_ones(12, 4, 4),
            lambda x: (x, x.new_ones(1)),
            lambda x: (x, x.sum()),
            lambda x: x.new_ones(3, 4, 2),  # no other output tells where the rows are
            lambda x: (x, x.new_ones(3 if x[0] else 5, 4)),  # boxes of several rows
        ):
            run(function)
        assert said.messages == []


@pytest.mark.parametrize(("count", "is_told"), [(len, True), (lambda x: 0.5, True), (lambda x: x.dtype, False)])
def test_a_number_that_all_replicas_return_is_told_of_once(said, count, is_told):
    sys.modules["everygpu.parallel.gather"]._warn_of_number.cache_clear()
    for _ in range(2):
        _, found = run(lambda x: (x, count(x)), 4)
        assert found == count(torch.zeros(2))
    assert [message[:24] for message in said.messages] == ["gather: out[1] is the nu"] * is_told
    assert run(lambda x: (x, torch.tensor(len(x))), 4)[1].sum() == 4
    assert run(lambda x: (x, len(x)), 3)[1] == [2, 1]


def test_flags_that_differ_are_told_of_once(said):
    sys.modules["everygpu.parallel.gather"]._warn_of_flags.cache_clear()
    for limit in (10, 1, 1):
        _, found = run(lambda x: (x, bool((x < limit).any())), 4)  # noqa: B023 - called at once
    assert found == [True, False]
    assert [message[:31] for message in said.messages] == ["gather: out[1] is True in some "]


def detections(x):
    """As many boxes in row i as i + 1."""
    return [{"boxes": torch.full((int(i) + 1, 4), float(i)), "id": int(i)} for i in x]


class TestItemsPerRow:
    @pytest.mark.parametrize("how", ["sharded", "joined"])
    @pytest.mark.parametrize("num_rows", [4, 3, 2])
    def test_detections_are_joined_end_to_end(self, num_rows, how):
        for found in (
            run(detections, num_rows, gather=how),
            run(lambda x: {"found": detections(x)}, num_rows)["found"],
        ):
            assert [d["id"] for d in found] == list(range(num_rows))
            assert [d["boxes"].shape for d in found] == [(i + 1, 4) for i in range(num_rows)]
            assert all((d["boxes"] == d["id"]).all() for d in found)
        assert run(lambda x: [f"row {int(i)}" for i in x], num_rows) == [f"row {i}" for i in range(num_rows)]

    def test_gradients_flow(self):
        scale = torch.ones((), requires_grad=True)
        x = torch.arange(4.0) * scale
        out = DataParallel(Returning(lambda x: [{"boxes": torch.ones(int(i) + 3) * i} for i in x]), ["cpu"] * 2)(x)
        sum(d["boxes"].sum() for d in out).backward()
        assert scale.grad.item() == 1 * 4 + 2 * 5 + 3 * 6

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: [{"logits": x[:, None], "loss": x.mean()} for _ in range(2)],
            lambda x: [{"loss": x.sum().view(1)} for _ in range(2)],
            lambda x: [{"loss": x.sum()} for _ in range(2)],
            lambda x: tuple(detections(x)),
            lambda x: [x, x.sum().view(1)],
            lambda x: [torch.ones(3, 4), torch.ones(5, 4)],
            lambda x: ["loss", "accuracy"],
            lambda x: [int(i) for i in x],
        ],
    )
    def test_items_per_output_are_joined_item_by_item(self, function):
        """As auxiliary outputs, with two layers and two rows for each replica."""
        assert len(run(function, 4)) == 2

    def test_rows_say_so(self):
        assert len(run(lambda x: Rows({"logits": torch.ones(2)} for _ in x), 4)) == 4
        assert run(lambda x: ["a"] * len(x), 4, 1) == ["a"] * 4
        assert len(run(lambda x: [{"as long as rows": torch.ones(len(x))} for _ in x], 3)) == 3
        assert len(gather([detections(torch.arange(2.0)), detections(torch.arange(2.0, 4.0))], "cpu")) == 2
        with pytest.raises(GatherError, match=r"list of 2 .*list of 1 .*Return everygpu.Rows\(...\)"):
            run(lambda x: [torch.ones(int(i)) for i in x], 3)


class TestWaysOut:
    def test_a_state_that_is_passed_back_names_its_dim(self):
        model = DataParallel(nn.LSTM(8, 4, 2, batch_first=True), ["cpu"] * 3)
        state = torch.ones(2, 12, 4), torch.ones(2, 12, 4)
        with pytest.raises(SplitError, match=r"If the rows of args\[1\].* are on dim 1, .* permute it .* pass dim=1"):
            model(torch.ones(12, 5, 8), state)

    def test_bags_with_offsets(self):
        with pytest.raises(
            SplitError, match=r"got 6 in args\[0\] and 3 in .* nn.EmbeddingBag, pass everygpu.Rows .*padding_idx"
        ):
            DataParallel(nn.EmbeddingBag(9, 4), ["cpu"] * 2)(torch.arange(6), torch.tensor([0, 2, 4]))

    def test_a_matrix_with_as_many_rows_as_the_batch_is_offered_whole(self):
        with pytest.raises(RuntimeError) as caught:
            DataParallel(Returning(torch.matmul), ["cpu"] * 2)(torch.ones(12, 12), torch.ones(12, 12))
        assert "everygpu.Replicated(...)" in str(caught.value.__cause__)


def test_cpu_tensors_are_joined_on_the_cpu(devs, numbered):
    make = Returning(lambda x: {"cpu": x.cpu(), "here": x, "n": torch.tensor(x.shape[0], device="cpu")})
    out = everygpu.DataParallel(make, devs)(numbered)
    assert (out["cpu"].device.type, out["n"].device.type, out["here"].device) == ("cpu", "cpu", devs[0])
    assert out["cpu"][:, 0].tolist() == [0, 1, 2, 3, 4]
    assert out["n"].tolist() == [2, 2, 1]
