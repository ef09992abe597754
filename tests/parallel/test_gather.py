"""Outputs of replicas joined into one, or a reason why not."""

import dataclasses
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from everygpu import DataParallel, gather
from everygpu.errors import GatherError

PROPERTY = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Result:
    loss: object
    logits: object


def join(*outputs, dim=0):
    return gather(outputs, "cpu", dim)


class TestTensors:
    @PROPERTY
    @given(rows=st.lists(st.integers(0, 5), min_size=1, max_size=6), dim=st.integers(-3, 2))
    def test_rows_are_joined_in_order(self, devices, rows, dim):
        used = devices(len(rows))
        outputs = []
        for i, device in enumerate(used):
            shape = [2, 3, 4]
            shape[dim] = rows[i]
            outputs.append(torch.full(shape, float(i), device=device))
        joined = gather(outputs, used[0], dim)
        assert joined.device == used[0]
        assert joined.cpu().equal(torch.cat([o.cpu() for o in outputs], dim))

    @PROPERTY
    @given(rows=st.lists(st.integers(0, 5), min_size=1, max_size=6))
    def test_gradient_goes_back_to_each_replica(self, devices, rows):
        used = devices(len(rows))
        outputs = [torch.ones(r, 2, device=d, requires_grad=True) for r, d in zip(rows, used)]
        joined = gather([o * 1 for o in outputs], used[0])  # as a replica's: no leaves
        weights = torch.arange(float(joined.numel()), device=used[0]).view_as(joined)
        (joined * weights).sum().backward()
        assert torch.cat([o.grad.cpu() for o in outputs]).equal(weights.cpu())

    def test_scalars_become_one_entry_per_replica(self, devices):
        used = devices(3)
        outputs = [torch.tensor(float(i), device=d, requires_grad=True) for i, d in enumerate(used)]
        joined = gather(outputs, used[0])
        assert joined.tolist() == [float(i) for i in range(len(used))]
        (joined * 3).sum().backward()
        assert [o.grad.item() for o in outputs] == [3.0] * len(used)

    def test_scalars_need_no_dim(self):
        assert join(torch.tensor(1), torch.tensor(2), dim=1).tolist() == [1, 2]

    def test_output_of_one_replica_keeps_its_form(self):
        assert join(torch.ones(3, 2)).shape == (3, 2)
        assert join(torch.tensor(1.0)).shape == (1,)

    def test_tensors_on_the_cpu_stay_there(self, devices):
        used = devices(2)
        outputs = [{"on": torch.ones(2, device=d), "off": torch.ones(2)} for d in used]
        joined = gather(outputs, used[0])
        assert joined["on"].device == used[0]
        assert joined["off"].device == torch.device("cpu")

    def test_dtype_is_kept(self):
        for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int8):
            assert join(torch.ones(2).to(dtype), torch.ones(1).to(dtype)).dtype is dtype


class TestOtherValues:
    @pytest.mark.parametrize(
        "value",
        [None, True, 3, 2.5, 1 + 2j, "text", b"bytes", torch.float16, (), [], {}, {1, 2}, Counter(a=2), float("nan")],
        ids=repr,
    )
    def test_equal_values_pass_through(self, value):
        joined = join(value, value, value)
        assert type(joined) is type(value)
        assert joined is value or joined == value

    def test_nan_of_each_replica_is_the_same(self):
        assert join(float("nan"), float("nan")) != join(1.0, 1.0)
        assert isinstance(join(float("nan"), float("nan")), float)

    @pytest.mark.parametrize(
        "values", [(1, 2, 1), (1.0, 1), (True, 1), ("a", "b"), ({1}, {2}), (1, "a"), (b"a", "a")], ids=repr
    )
    def test_differing_values_come_back_as_a_list(self, values):
        joined = join(*values)
        assert joined == list(values)
        assert [type(v) for v in joined] == [type(v) for v in values]

    def test_objects_that_compare_oddly_come_back_as_a_list(self):
        class Odd:
            def __eq__(self, other):
                raise ValueError("no")

            __hash__ = None

        a, b = Odd(), Odd()
        joined = join(a, b)
        assert joined[0] is a
        assert joined[1] is b
        assert join(a, a) is a

    def test_sizes_are_values(self):
        assert join(torch.Size([4, 2]), torch.Size([4, 2])) == torch.Size([4, 2])
        assert join({"size": torch.Size([4, 2])}, {"size": torch.Size([3, 2])}) == {
            "size": [torch.Size([4, 2]), torch.Size([3, 2])]
        }

    def test_numpy_arrays_are_joined(self):
        assert join(np.ones((2, 3)), np.zeros((1, 3))).tolist() == [[1] * 3, [1] * 3, [0] * 3]
        assert join(np.ones((2, 3)), np.zeros((2, 1)), dim=1).shape == (2, 4)
        assert join(np.array(1), np.array(2)).tolist() == [1, 2]

    def test_numpy_numbers_are_values(self):
        assert join(np.float64(1), np.float64(1)) == 1
        assert join(np.float64(1), np.float64(2)) == [1, 2]


class TestContainers:
    def test_each_kind_is_rebuilt(self):
        outputs = [
            {
                "list": [torch.ones(n)],
                "pair": Pair(torch.ones(n), "y"),
                "result": Result(torch.tensor(n), torch.ones(n)),
            }
            for n in (2, 1)
        ]
        joined = join(*outputs)
        assert joined["list"][0].shape == (3,)
        assert type(joined["pair"]) is Pair
        assert joined["pair"].y == "y"
        assert type(joined["result"]) is Result
        assert joined["result"].loss.tolist() == [2, 1]

    def test_order_of_keys_does_not_matter(self):
        joined = join({"a": torch.zeros(1), "b": torch.ones(1)}, {"b": torch.ones(1), "a": torch.zeros(1)})
        assert list(joined) == ["a", "b"]
        assert joined["b"].tolist() == [1, 1]

    def test_kind_of_the_dict_is_kept(self):
        joined = join(defaultdict(int, a=torch.ones(1)), defaultdict(int, a=torch.ones(1)))
        assert joined["other"] == 0
        assert list(join(OrderedDict(b=1, a=2), OrderedDict(b=1, a=2))) == ["b", "a"]

    def test_replicas_outputs_are_left_alone(self):
        first, second = [torch.ones(1)], [torch.ones(1)]
        join(first, second).append(3)
        assert len(first) == len(second) == 1


class TestErrors:
    @pytest.mark.parametrize(
        ("outputs", "words"),
        [
            ((None, torch.ones(2)), ["out must", "None from replica 0", "shape (2,) from replica 1"]),
            (({"a": None}, {"a": 1}), ['out["a"]', "got None from replica 0 and int from replica 1"]),
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
        ],
    )  # fmt: skip
    def test_outputs_that_cannot_be_joined_are_named(self, outputs, words):
        with pytest.raises(GatherError) as caught:
            join(*outputs)
        for word in words:
            assert word in str(caught.value)

    def test_tensor_without_the_dim(self):
        with pytest.raises(GatherError, match=r"out\[0\] must have the batch on dim 1, got shape \(2,\)"):
            join([torch.ones(2)], [torch.ones(2)], dim=1)


LAYOUTS = {
    "csr": (Tensor.to_sparse_csr, "torch.sparse_csr"),
    "mkldnn": (Tensor.to_mkldnn, "torch._mkldnn"),
    "per channel": (
        lambda x: torch.quantize_per_channel(x, torch.ones(2), torch.zeros(2), 1, torch.qint8),
        "per channel",
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*quantiz", "ignore:.*deprecated")
@pytest.mark.parametrize(("convert", "named"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_that_torch_cannot_join_are_refused(convert, named):
    outputs = [{"x": convert(torch.ones(2, 2))} for _ in range(2)]
    with pytest.raises(GatherError, match=rf"out\[.x.\] must be strided.*{named}"):
        gather(outputs, "cpu")


@pytest.mark.filterwarnings("ignore:.*quantiz", "ignore:.*deprecated")
def test_tensors_that_are_quantized_are_joined():
    model = DataParallel(Quantizing(), ["cpu"] * 2, engine="threads")
    assert model(torch.ones(3, 2)).dequantize().tolist() == [[1, 1]] * 3


class Quantizing(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)

    def forward(self, x):
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(2, 2**18))
        self.made = []

    def forward(self, x, is_own):
        out = x.sum() + torch.zeros(2, 2**18) if is_own else self.table
        self.made.append(out.data_ptr())
        return out


@pytest.mark.parametrize("is_own", [True, False])
def test_large_outputs_without_gradients_are_copied_only_where_they_are_the_models(is_own):
    net = Wide()
    made = net.made
    with torch.no_grad():
        out = DataParallel(net, ["cpu"] * 2)(torch.zeros(4, 1), is_own)
    assert (out.shards[0].data_ptr() == made[0]) is is_own
