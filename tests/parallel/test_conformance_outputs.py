"""What comes out: losses, numbers, containers."""

import copy
import dataclasses
import threading
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import everygpu
from everygpu.errors import GatherError
from tests.parallel.oracle import assert_same, assert_same_grads, pair, rows

pytestmark = pytest.mark.usefixtures("in_threads")


class Return(nn.Module):
    """Returns what a function makes of the rows."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


def returned(make, devs, num_rows=5, **options):
    """Call a model that returns ``make(rows)``, where row i is filled with i."""
    x = torch.arange(num_rows, dtype=torch.float64, device=devs[0])[:, None].expand(num_rows, 2)
    return everygpu.DataParallel(Return(make), devs, **options)(x)


def is_first(x):
    """Tell the first shard from the others."""
    return float(x[0, 0]) == 0


def sizes(devs, num_rows=5):
    return [len(c) for c in torch.arange(num_rows).chunk(len(devs))]


class MeanLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x):
        return self.lin(x).square().mean()


def test_scalar_losses_become_a_vector_without_a_warning(devices):
    devs = devices(3)
    model, bare = pair(MeanLoss, devs)
    x = rows(6, 3, device=devs[0])
    loss = model(x)
    torch.testing.assert_close(loss, torch.stack([bare(shard) for shard in x.chunk(len(devs))]))
    loss.mean().backward()
    bare(x).backward()
    assert_same_grads(model, bare)


@pytest.mark.parametrize("dim", [1, -2])
def test_scalar_loss_with_rows_on_another_dim(devices, dim):
    devs = devices(3)
    model, bare = pair(MeanLoss, devs, dim=dim)
    x = rows(4, 6, 3, device=devs[0])
    loss = model(x)
    assert loss.shape == (len(devs),)
    loss.mean().backward()
    bare(x).backward()
    assert_same_grads(model, bare)


def test_rows_on_another_dim_are_joined_there(devices):
    devs = devices(3)
    model, bare = pair(lambda: nn.LSTM(3, 2), devs, dim=1)
    x = rows(4, 7, 3, device=devs[0]).requires_grad_()
    assert_same(model, bare, x)


def test_none_in_all_replicas_passes_through(devices):
    out = returned(lambda x: (x, None, {"loss": None}), devices(3))
    assert out[0].shape == (5, 2)
    assert out[1:] == (None, {"loss": None})


@pytest.mark.parametrize("in_first", [True, False])
@pytest.mark.parametrize("value", [lambda x: x, lambda x: 1, lambda x: [x]], ids=["tensor", "number", "list"])
def test_none_in_one_replica_is_an_error_naming_both(devices, in_first, value):
    devs = devices(2)
    model = everygpu.DataParallel(Return(lambda x: {"aux": None if is_first(x) == in_first else value(x)}), devs)
    x = torch.arange(4.0, device=devs[0])[:, None]
    with pytest.raises(GatherError) as caught:
        model(x)
    for part in ('out["aux"]', "None", "replica 0", "replica 1"):
        assert part in str(caught.value)
    model.module.make = lambda x: {"aux": x}
    assert model(x)["aux"].flatten().tolist() == [0, 1, 2, 3], "the object works at the next call"


@dataclasses.dataclass
class Output:
    logits: Tensor
    name: str
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


def test_dataclass_is_rebuilt(devices):
    devs = devices(3)
    out = returned(lambda x: Output(x, "m", x.sum(), (x, x + 1)), devs)
    assert type(out) is Output
    assert out.logits[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert out.name == "m"
    assert out.loss.shape == (len(devs),)
    assert out.hidden[1][:, 0].tolist() == [1, 2, 3, 4, 5]


def test_frozen_slotted_dataclass_is_rebuilt(devices):
    out = returned(FrozenOutput, devices(3))
    assert type(out) is FrozenOutput
    assert out.logits.shape == (5, 2)
    assert out.rows == 7


def test_dataclass_with_another_constructor_is_rebuilt(devices):
    out = returned(lambda x: StrictOutput(x, source="model"), devices(3))
    assert type(out) is StrictOutput
    assert out.logits.shape == (5, 2)


def test_model_output_is_rebuilt(devices):
    devs = devices(3)
    out = returned(lambda x: ClassifierOutput(loss=x.mean(), logits=x, hidden_states=(x, x)), devs)
    assert type(out) is ClassifierOutput
    assert list(out) == ["loss", "logits", "hidden_states"]
    assert out.logits is out["logits"] is out[1]
    assert out.logits.shape == (5, 2)
    assert out.loss.shape == (len(devs),)
    assert out.hidden_states[1].shape == (5, 2)


def test_model_output_without_a_loss(devices):
    out = returned(lambda x: ClassifierOutput(logits=x), devices(3))
    assert type(out) is ClassifierOutput
    assert list(out) == ["logits"]
    assert out.loss is None
    assert out.logits is out["logits"] is out[0]
    assert out.logits.shape == (5, 2)


def test_real_model_output_is_rebuilt(devices):
    outputs = pytest.importorskip("transformers.modeling_outputs")
    kind = outputs.SequenceClassifierOutput
    out = returned(lambda x: kind(loss=x.mean(), logits=x, hidden_states=(x, x)), devices(3))
    assert type(out) is kind
    assert list(out) == ["loss", "logits", "hidden_states"]
    assert out.logits is out["logits"] is out[1]
    assert out.logits.shape == (5, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Point(x, 0.5),
        lambda x: Pair(x, {"a": [x]}),
        lambda x: x.max(1),
        lambda x: [(x,), [x], {}],
        lambda x: OrderedDict(b=x, a=x + 1),
        lambda x: {2: x, "two": x, (1, 2): x},
        lambda x: deque([x, x + 1], maxlen=3),
        lambda x: UserDict(a=x),
        lambda x: ((), [], {}),
    ],
    ids=["NamedTuple", "namedtuple", "return_types", "nested", "OrderedDict", "keys", "deque", "UserDict", "empty"],
)
def test_containers_are_rebuilt(devices, make):
    devs = devices(3)
    x = torch.arange(5, dtype=torch.float64, device=devs[0])[:, None].expand(5, 2)
    out, expected = returned(make, devs), make(x)
    assert type(out) is type(expected)
    if isinstance(out, UserDict):
        out, expected = out.data, expected.data
    if isinstance(out, deque):
        assert out.maxlen == expected.maxlen
        out, expected = list(out), list(expected)
    torch.testing.assert_close(out, expected)


def test_gradients_flow_through_containers(devices):
    devs = devices(3)

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 2)

        def forward(self, x):
            h = self.lin(x)
            return {"a": [h, (h.exp(),)], "b": Pair(h.sin(), h.cos())}

    model, bare = pair(Many, devs)
    assert_same(model, bare, rows(7, 3, device=devs[0]).requires_grad_())


def test_cpu_tensors_are_joined_on_the_cpu(devices):
    devs = devices(3)
    out = returned(lambda x: {"cpu": x.cpu(), "here": x, "n": torch.tensor(x.shape[0], device="cpu")}, devs)
    assert out["cpu"].device.type == "cpu"
    assert out["n"].device.type == "cpu"
    assert out["here"].device == devs[0]
    assert out["cpu"][:, 0].tolist() == [0, 1, 2, 3, 4]
    assert out["n"].tolist() == sizes(devs)


def test_gradients_flow_through_cpu_outputs(devices):
    devs = devices(3)

    class ToCpu(nn.Linear):
        def forward(self, x):
            return super().forward(x).cpu()

    model, bare = pair(lambda: ToCpu(3, 2), devs)
    assert_same(model, bare, rows(7, 3, device=devs[0]))


def test_inputs_that_are_no_tensors_reach_every_replica(devices):
    devs = devices(3)
    lock, thing = threading.Lock(), SimpleNamespace(a=1)
    seen = []

    class Takes(nn.Module):
        def forward(self, x, *others, **named):
            seen.append((*others, *named.values()))
            return x

    given = (1, "a", None, lock, thing, {3})
    everygpu.DataParallel(Takes(), devs)(rows(6, 2, device=devs[0]), *given[:3], a=given[3], b=given[4], c=given[5])
    assert len(seen) == len(devs)
    assert all(a is b for got in seen for a, b in zip(got, given))


def test_inputs_in_any_container_are_cut(devices):
    devs = devices(3)
    x = rows(7, 2, device=devs[0])

    class Takes(nn.Module):
        def forward(self, out, frozen, point, ragged):
            return out.logits + frozen.logits * point.x - ragged["a"][0], type(out).__name__, type(ragged).__name__

    given = (Output(x, "m"), FrozenOutput(x + 1), Point(x * 2, "p"), defaultdict(list, a=[x / 2]))
    expected = Takes()(*copy.copy(given))
    torch.testing.assert_close(everygpu.DataParallel(Takes(), devs)(*given)[0], expected[0])
    assert everygpu.DataParallel(Takes(), devs)(*given)[1:] == expected[1:]
