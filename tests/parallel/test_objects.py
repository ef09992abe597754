"""Containers whose attributes show their items, arrays, and objects that are no containers at all."""

import argparse
import dataclasses
import functools
from collections import OrderedDict, UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree

import everygpu
from everygpu import tree
from everygpu.errors import SplitError

pytestmark = pytest.mark.usefixtures("in_threads")

ROWS = 7


class AttrDict(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class ItemDict(AttrDict):
    """Sets an item for every attribute."""

    __setattr__ = dict.__setitem__

    def __init__(self, *args, **kwargs):
        object.__setattr__(self, "__dict__", self)
        self.update(*args, **kwargs)


class Copying(dict):
    """Has a second reference to each item."""

    def __init__(self, **items):
        super().__init__(items)
        vars(self).update(items)


class Shared(UserDict):
    def __init__(self, **items):
        super().__init__(items)
        vars(self).update(items)


class Renaming(dict):
    """Shows an item under another name, and has a tensor that is no item."""

    def __init__(self, logits, loss):
        super().__init__(logits=logits)
        self.scores, self.loss = logits, loss


@dataclasses.dataclass
class Output(OrderedDict):
    """A dict and a dataclass at once."""

    logits: object = None
    loss: object = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            self[field.name] = getattr(self, field.name)


@dataclasses.dataclass
class Fields:
    logits: object
    loss: object

    def __post_init__(self):
        self.scores = self.logits


MIRRORS = [AttrDict, ItemDict, Copying, Shared, Renaming, Output, Fields]


class Returning(nn.Module):
    """Returns a container of its output and a loss."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        logits = self.linear(x)
        return self.kind(logits=logits, loss=logits.square().mean())


class Reading(nn.Module):
    """Applies a function to what it is given."""

    def __init__(self, function=lambda x: x):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 2)

    def forward(self, *args, **kwargs):
        return self.linear(self.function(*args, **kwargs))


def parallel(module, num_replicas=3):
    return everygpu.DataParallel(module, ["cpu"] * num_replicas)


@pytest.fixture
def x():
    return torch.randn(ROWS, 4)


class TestMirrors:
    @pytest.mark.parametrize("kind", MIRRORS)
    def test_outputs_have_all_rows_under_both_names(self, kind, x):
        module = Returning(kind)
        alone, out = module(x), parallel(module)(x)
        assert type(out) is kind
        for name, value in vars(alone).items():
            if name != "loss" and isinstance(value, torch.Tensor):
                torch.testing.assert_close(everygpu.gather(getattr(out, name)), value)
        assert out.loss.shape == (3,)
        if not isinstance(out, (Fields, Renaming)):
            assert out.logits is out["logits"]
            assert out.loss is out["loss"]

    @pytest.mark.parametrize("kind", MIRRORS)
    def test_loss_under_an_attribute_trains_on_all_rows(self, kind, x):
        module = Returning(kind)
        (alone,) = torch.autograd.grad(module(x).loss, [module.linear.weight])
        parallel(module)(x).loss.mean().backward()
        torch.testing.assert_close(module.linear.weight.grad, alone)

    @pytest.mark.parametrize("kind", MIRRORS)
    def test_train_step_finds_the_loss_of_all_rows(self, kind, x):
        module = Returning(kind)
        expected = module(x).loss.detach()
        step = everygpu.TrainStep(parallel(module), None, torch.optim.SGD(module.parameters(), lr=0.1))
        torch.testing.assert_close(step(x), expected)

    @pytest.mark.parametrize("kind", MIRRORS)
    def test_inputs_are_cut_under_both_names(self, kind, x):
        batch = kind(logits=x, loss=torch.arange(ROWS))
        name, seen = "scores" if hasattr(batch, "scores") else "logits", []

        def read(b):
            shown = getattr(b, name)
            seen.append((len(b.logits if kind is Fields else b["logits"]), len(shown), len(b.loss)))
            return shown

        model = parallel(Reading(read))
        torch.testing.assert_close(everygpu.gather(model(batch)), model.module.linear(x))
        assert seen == [(3, 3, 3), (3, 3, 3), (1, 1, 1)]

    @pytest.mark.parametrize("kind", MIRRORS)
    def test_feeder_gives_the_same_under_both_names(self, kind, x):
        feeder = everygpu.Feeder([kind(logits=x, loss=torch.arange(ROWS))], ["cpu"] * 3)
        (batch,) = feeder
        for value in vars(batch).values():
            assert not isinstance(value, torch.Tensor) or isinstance(value, everygpu.ShardedBatch)
        assert type(batch) is kind

    def test_new_container_has_attributes_of_its_own(self):
        old = AttrDict(a=1)
        new = tree.map_leaves(lambda leaf: leaf + 1, old)
        new.b = 3
        assert (new, new.a, vars(new) is new, old) == ({"a": 2, "b": 3}, 2, True, {"a": 1})

    def test_attribute_with_other_rows_is_named(self, x):
        with pytest.raises(SplitError, match=r"got 7 in args\[0\]\[\"logits\"\] and 9 in args\[0\]\.loss \(9,\)"):
            parallel(Reading())(Renaming(x, torch.ones(9)))

    def test_plain_attributes_stay(self, x):
        batch = Copying(x=x)
        batch.name, batch.owner = "train", batch
        seen = []
        parallel(Reading(lambda b: seen.append(b.name) or b.x))(batch)
        assert seen == ["train"] * 3

    def test_what_is_computed_from_the_rows_is_computed_again(self, x):
        @dataclasses.dataclass
        class Batch:
            x: torch.Tensor

            @functools.cached_property
            def centre(self):
                return self.x.mean(0)

        batch, seen = Batch(x), []
        assert batch.centre.shape == (4,)
        parallel(Reading(lambda b: seen.append(b.centre) or b.x))(batch)
        torch.testing.assert_close(seen, [part.mean(0) for part in x.split(3)])


class TestArrays:
    def test_rows_are_cut_as_a_tensors(self, x):
        weights = np.arange(float(ROWS), dtype=np.float32)
        model = parallel(Reading(lambda x, w: x * torch.from_numpy(w)[:, None]))
        torch.testing.assert_close(everygpu.gather(model(x, w=weights)), model.module(x, w=weights))

    def test_alone_they_make_the_batch(self, x):
        model = parallel(Reading(torch.from_numpy))
        assert model(x.numpy()).shape == (ROWS, 2)

    @pytest.mark.parametrize("split", ["chunk", "even", [2, 0, 1]])
    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_every_split_and_dimension(self, split, dim):
        array = np.arange(35).reshape(5, 7)
        parts = everygpu.scatter(array, ["cpu"] * 3, dim, split=split)
        expected = everygpu.scatter(torch.from_numpy(array), ["cpu"] * 3, dim, split=split)
        assert [p.tolist() for p in parts] == [p.tolist() for p in expected]

    def test_disagreement_is_an_error(self, x):
        with pytest.raises(SplitError, match=r"got 7 in args\[0\] and 10 in args\[1\]"):
            parallel(Reading())(x, np.ones(10))

    def test_marked_and_single_numbers_go_whole(self, x):
        seen = []
        model = parallel(Reading(lambda x, a, b, c: seen.append((a.shape, b.shape, type(c))) or x))
        model(x, everygpu.Replicated(np.ones(10)), np.array(1.0), np.float32(2))
        assert seen == [((10,), (), np.float32)] * 3

    def test_feeder_and_train_step(self, x):
        module = Reading(lambda b: b["x"] * torch.from_numpy(b["w"])[:, None])
        batch = {"x": x, "w": np.arange(float(ROWS), dtype=np.float32)}
        model = parallel(module)
        expected = module(batch).square().mean().detach()
        step = everygpu.TrainStep(model, lambda out: out.square().mean(), torch.optim.SGD(module.parameters(), lr=0.1))
        (fed,) = everygpu.Feeder([(batch,)], model)
        torch.testing.assert_close(step(fed), expected)


class Batch:
    def __init__(self, x):
        self.x = x


class Slotted:
    __slots__ = ("__hidden", "unset")

    def __init__(self, x):
        self.__hidden = x


class Graph:
    """Keeps its tensors two objects down."""

    def __init__(self, x):
        self._store = SimpleNamespace(mapping={"x": x}, parent=self)


class Array(Batch):
    def __init__(self, x):
        super().__init__(x.numpy())


class Registered(Batch):
    pass


@pytest.fixture
def registered():
    _pytree.register_pytree_node(Registered, lambda b: ([b.x], None), lambda new, _: Registered(new[0]))
    yield
    _pytree._deregister_pytree_node(Registered)


class TestObjects:
    @pytest.mark.parametrize(
        ("make", "place"),
        [(Batch, ".x"), (Slotted, "._Slotted__hidden"), (Graph, "._store.mapping['x']"), (Array, ".x"),
         (lambda x: SimpleNamespace(x=[x]), ".x[0]"), (lambda x: {x}, "[0]"),
         (lambda x: torch.distributions.Normal(x, 1.0), ".loc")],
    )  # fmt: skip
    def test_rows_out_of_reach_are_an_error_that_says_the_ways_out(self, make, place, x):
        model = parallel(Reading(lambda *_, **__: x))
        with pytest.raises(SplitError) as caught:
            model(make(x))
        for words in (f"shape (7, 4) at {place}. ", "a dict", "register_pytree_node", "everygpu.Replicated"):
            assert words in str(caught.value)
        with pytest.raises(SplitError, match="everygpu.Replicated"):
            model(x, meta=[make(x)])

    def test_train_step_refuses_too(self, x):
        module = Reading(lambda b: b.x)
        step = everygpu.TrainStep(parallel(module), nn.MSELoss(), torch.optim.SGD(module.parameters(), lr=0.1))
        with pytest.raises(SplitError, match="the Batch object"):
            step(Batch(x), torch.ones(ROWS, 2))

    def test_every_way_out_works(self, x, registered):
        for batch in ({"x": x}, Registered(x)):
            model = parallel(Reading(lambda b: b["x"] if isinstance(b, dict) else b.x))
            torch.testing.assert_close(everygpu.gather(model(batch)), model.module(batch))
        seen = []
        batch = Batch(x)
        parallel(Reading(lambda b: seen.append(b) or b.x))(everygpu.Replicated(batch))
        assert seen == [batch] * 3

    def test_on_one_replica_it_is_the_module_s(self, x):
        model = parallel(Reading(lambda b: b.x), 1)
        assert model(Batch(x)).shape == (ROWS, 2)

    def test_plain_objects_go_whole(self, x):
        def function():
            return x

        function.x = x
        config = argparse.Namespace(lr=0.1, names=["a"] * 100, dropout=torch.tensor(0.1))
        config.parent = config
        plain = [config, function, Batch, "text", None, 3, nn.Linear(2, 2), torch.float32, object(), np, range(3),
                 slice(2), torch.Generator(), b"bytes", Batch("no tensor"), print, torch.device("cpu")]  # fmt: skip
        seen = []
        parallel(Reading(lambda x, *more: seen.append(more) or x))(x, *plain)
        assert len(seen) == 3
        assert all(a is b for more in seen for a, b in zip(more, plain))

    def test_large_vocabulary_is_not_searched_through(self):
        class Words(dict):
            """Counts what is read of it."""

            num_read = 0

            def items(self):
                for pair in super().items():
                    Words.num_read += 1
                    yield pair

        tokenizer = SimpleNamespace(ids=Words((str(i), i) for i in range(10_000)))
        assert tree.find_tensor(tokenizer) is None
        assert 0 < Words.num_read < 100

    def test_objects_that_replicas_return_come_back_as_a_list_also_if_equal(self, x):
        class Named(Batch):
            def __eq__(self, other):
                return True

        out = parallel(Reading())
        out.module.forward = lambda x: Named(x)
        assert [len(named.x) for named in out(x)] == [3, 3, 1]
