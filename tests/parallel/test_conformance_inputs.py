"""What goes in: how arguments are cut, containers of any kind, what is no container, and bad input."""

import argparse
import dataclasses
import functools
import logging
import threading
import warnings
from collections import OrderedDict, UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree

import everygpu
from everygpu import tree
from everygpu.errors import DeviceError, ModuleError, OptionError, PlacementError, ReplicaError, SplitError
from tests.parallel.oracle import Returning, assert_same, assert_same_grads, pair, rows

pytestmark = pytest.mark.usefixtures("in_threads")


class GradReducer(nn.Module):
    """Needs all of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)

    def forward(self, x, y, *, z):
        return self.lin(x) + 10 * y + 100 * z["z"][0]


def count_rows():
    """Make a model that tells, for each replica, how many rows it got of each argument."""
    return Returning(lambda *args, **kwargs: [x.new_tensor(x.shape[0]) for x in (*args, *kwargs.values())])


@pytest.mark.parametrize("split", ["chunk", "even"])
def test_every_replica_gets_all_arguments_cut_alike(devices, split):
    devs = devices(4)
    for num_rows in (0, 1, 2, 3, 4, 5, 9, 10):
        model, bare = pair(GradReducer, devs, split=split)
        x, y, z = (rows(num_rows, width, device=devs[0], seed=width).requires_grad_() for width in (3, 2, 1))
        assert assert_same(model, bare, x, y=y, z={"z": [z]}).output.shape == (num_rows, 2)
        first, *others = everygpu.DataParallel(count_rows(), devs, split=split)(x, x + 1, a=x + 2, b=x + 3)
        assert first.sum() == num_rows
        assert all(other.tolist() == first.tolist() for other in others)
        assert num_rows or len(first) == 1, "zero rows run one replica on an empty shard"


@pytest.mark.parametrize("where", ["args", "kwargs", "nested"])
def test_tensors_of_different_size_are_an_error_naming_them(devices, where):
    devs = devices(4)
    model = everygpu.DataParallel(count_rows(), devs)
    x, y = rows(9, 3, device=devs[0]), rows(2, 3, device=devs[0])
    args, kwargs, name = {
        "args": ((x, y), {}, "args[1]"),
        "kwargs": ((x,), {"y": y}, 'kwargs["y"]'),
        "nested": ((x, {"targets": [x, y]}), {}, 'args[1]["targets"][1]'),
    }[where]
    with pytest.raises(SplitError) as caught:
        model(*args, **kwargs)
    for part in ("args[0]", name, "9", "2", "Replicated"):
        assert part in str(caught.value)
    (count,) = model(x)
    assert count.sum() == 9, "the object works at the next call"


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x, mask, scales=None):
        return self.lin(x) * mask + scales["s"][0]


def test_replicated_is_given_whole_to_every_replica(devs, x):
    model, bare = pair(Masked, devs)
    masks = [rows(3, device=devs[0], seed=2).requires_grad_() for _ in range(2)]
    scales = [rows(3, device=devs[0], seed=3).requires_grad_() for _ in range(2)]
    ours = model(x, everygpu.Replicated(masks[0]), scales=everygpu.Replicated({"s": [scales[0]]}))
    theirs = bare(x, masks[1], scales={"s": [scales[1]]})
    torch.testing.assert_close(ours, theirs)
    for out in (ours, theirs):
        out.square().sum().backward()
    torch.testing.assert_close((masks[0].grad, scales[0].grad), (masks[1].grad, scales[1].grad))
    assert_same_grads(model, bare)


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


class Packing(nn.Module):
    """Returns a container of its output and a loss."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        logits = self.linear(x)
        return self.kind(logits=logits, loss=logits.square().mean())


def parallel(module, num_replicas=3):
    return everygpu.DataParallel(module, ["cpu"] * num_replicas)


@pytest.mark.parametrize("kind", [AttrDict, ItemDict, Copying, Shared, Renaming, Output, Fields])
class TestMirrors:
    """Containers whose attributes show their items."""

    def test_as_an_output(self, kind, x):
        module, x = Packing(kind), x.cpu().float()
        alone, out = module(x), parallel(module)(x)
        assert type(out) is kind
        for name, value in vars(alone).items():
            if name != "loss" and isinstance(value, torch.Tensor):
                torch.testing.assert_close(everygpu.parallel.gather(getattr(out, name)), value)
        assert out.loss.shape == (3,)
        if not isinstance(out, (Fields, Renaming)):
            assert out.logits is out["logits"]
            assert out.loss is out["loss"]
        expected = torch.autograd.grad(alone.loss, [module.linear.weight])
        torch.testing.assert_close(torch.autograd.grad(out.loss.mean(), [module.linear.weight]), expected)
        step = everygpu.TrainStep(parallel(module), None, torch.optim.SGD(module.parameters(), lr=0.1))
        torch.testing.assert_close(step(x), alone.loss.detach())

    def test_as_an_input(self, kind, x):
        batch, seen = kind(logits=x.cpu(), loss=torch.arange(7)), []
        name = "scores" if hasattr(batch, "scores") else "logits"

        def read(b):
            shown = getattr(b, name)
            seen.append((len(b.logits if kind is Fields else b["logits"]), len(shown), len(b.loss)))
            return shown

        torch.testing.assert_close(everygpu.parallel.gather(parallel(Returning(read))(batch)), x.cpu())
        assert seen == [(3, 3, 3), (3, 3, 3), (1, 1, 1)]
        (fed,) = everygpu.Feeder([batch], ["cpu"] * 3)
        for value in vars(fed).values():
            assert not isinstance(value, torch.Tensor) or isinstance(value, everygpu.parallel.ShardedBatch)
        assert type(fed) is kind


class TestContainers:
    def test_attribute_with_other_rows_is_named(self, x):
        with pytest.raises(SplitError, match=r"got 7 in args\[0\]\[\"logits\"\] and 9 in args\[0\]\.loss \(9,\)"):
            parallel(Returning(lambda b: b))(Renaming(x, torch.ones(9)))

    def test_plain_attributes_stay_and_what_is_computed_from_rows_is_computed_again(self, x):
        @dataclasses.dataclass
        class Batch:
            x: torch.Tensor

            @functools.cached_property
            def centre(self):
                return self.x.mean(0)

        batch, named, seen = Batch(x.cpu()), Copying(x=x), []
        named.name, named.owner = "train", named
        assert batch.centre.shape == (3,)
        parallel(Returning(lambda b, c: seen.append((b.name, c.centre))))(named, batch)
        torch.testing.assert_close([centre for _, centre in seen], [part.mean(0) for part in x.cpu().split(3)])
        assert [name for name, _ in seen] == ["train"] * 3


class TestArrays:
    def test_rows_are_cut_as_a_tensors(self, x):
        x, weights = x.cpu(), np.arange(7.0)
        model = parallel(
            Returning(lambda x, w, whole, number: x * torch.from_numpy(w)[:, None] + len(whole) + number.item())
        )
        out = model(x, w=weights, whole=everygpu.Replicated(np.ones(10)), number=np.array(1.0))
        torch.testing.assert_close(everygpu.parallel.gather(out), x * torch.from_numpy(weights)[:, None] + 11)
        assert parallel(Returning(torch.from_numpy))(weights).shape == (7,)
        with pytest.raises(SplitError, match=r"got 7 in args\[0\] and 10 in args\[1\]"):
            model(x, np.ones(10))

    @pytest.mark.parametrize("split", ["chunk", "even", [2, 0, 1]])
    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_every_split_and_dimension(self, split, dim):
        array = np.arange(35).reshape(5, 7)
        parts = everygpu.parallel.scatter(array, ["cpu"] * 3, dim, split=split)
        expected = everygpu.parallel.scatter(torch.from_numpy(array), ["cpu"] * 3, dim, split=split)
        assert [p.tolist() for p in parts] == [p.tolist() for p in expected]

    def test_feeder_and_train_step(self):
        module = nn.Sequential(Returning(lambda b: b["x"] * torch.from_numpy(b["w"])[:, None]), nn.Linear(3, 2))
        batch = {"x": torch.randn(7, 3), "w": np.arange(7.0, dtype=np.float32)}
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


class Registered(Batch):
    pass


@pytest.fixture
def registered():
    _pytree.register_pytree_node(Registered, lambda b: ([b.x], None), lambda new, _: Registered(new[0]))
    yield
    _pytree._deregister_pytree_node(Registered)


class TestObjects:
    """Objects that are no containers."""

    @pytest.mark.parametrize(
        ("make", "place"),
        [(Batch, ".x"), (Slotted, "._Slotted__hidden"), (Graph, "._store.mapping['x']"),
         (lambda x: Batch(x.numpy()), ".x"), (lambda x: SimpleNamespace(x=[x]), ".x[0]"), (lambda x: {x}, "[0]"),
         (lambda x: torch.distributions.Normal(x, 1.0), ".loc")],
    )  # fmt: skip
    def test_rows_out_of_reach_are_an_error_that_says_the_ways_out(self, make, place):
        x = torch.randn(7, 4)
        model = parallel(Returning(lambda *_, **__: x))
        with pytest.raises(SplitError) as caught:
            model(make(x))
        for words in (f"shape (7, 4) at {place}. ", "a dict", "register_pytree_node", "everygpu.Replicated"):
            assert words in str(caught.value)
        with pytest.raises(SplitError, match="everygpu.Replicated"):
            model(x, meta=[make(x)])

    def test_train_step_refuses_too(self):
        module = nn.Linear(3, 2)
        step = everygpu.TrainStep(parallel(module), nn.MSELoss(), torch.optim.SGD(module.parameters(), lr=0.1))
        with pytest.raises(SplitError, match="the Batch object"):
            step(Batch(torch.ones(7, 3)), torch.ones(7, 2))

    def test_every_way_out_works(self, registered):
        x = torch.randn(7, 4)
        read = Returning(lambda b: b["x"] if isinstance(b, dict) else b.x)
        for batch in ({"x": x}, Registered(x)):
            torch.testing.assert_close(everygpu.parallel.gather(parallel(read)(batch)), x)
        seen, batch = [], Batch(x)
        parallel(Returning(seen.append))(everygpu.Replicated(batch))
        assert seen == [batch] * 3
        assert parallel(read, 1)(batch) is x, "on one replica it is the module's"

    def test_plain_objects_go_whole(self, x):
        def function():
            return x

        function.x = x
        config = argparse.Namespace(lr=0.1, names=["a"] * 100, dropout=torch.tensor(0.1))
        config.parent = config
        plain = [config, function, Batch, "text", None, 3, nn.Linear(2, 2), torch.float32, object(), np, range(3), {3},
                 slice(2), torch.Generator(), b"bytes", Batch("no tensor"), print, torch.device("cpu"),
                 threading.Lock()]  # fmt: skip
        seen = []
        parallel(Returning(lambda x, *more, last: seen.append((*more, last))))(x, *plain, last=plain[0])
        assert len(seen) == 3
        assert all(a is b for more in seen for a, b in zip(more, [*plain, plain[0]], strict=True))

    def test_large_vocabulary_is_not_searched_through(self):
        class Words(dict):
            """Counts what is read of it."""

            num_read = 0

            def items(self):
                for item in super().items():
                    Words.num_read += 1
                    yield item

        tokenizer = SimpleNamespace(ids=Words((str(i), i) for i in range(10_000)))
        assert tree.find_tensor(tokenizer) is None
        assert 0 < Words.num_read < 100


class Cache:
    """Of what was seen so far, as transformers' DynamicCache: it grows where it is, and has a number of rows."""

    def __init__(self, keys):
        self.layers = [SimpleNamespace(keys=keys)]
        self.num_rows = len(keys)


class Caching(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 4)

    def forward(self, x, cache=None):
        keys = torch.tanh(self.lin(x))[:, None]
        if cache is None:
            cache = Cache(keys)
        else:
            assert cache.num_rows == len(x)
            cache.layers[0].keys = torch.cat([cache.layers[0].keys, keys], 1)
        return {"out": cache.layers[0].keys.cumsum(1).sum(1), "past": [cache]}


class TestObjectsThatReplicasReturned:
    @pytest.mark.parametrize("how", ["sharded", "joined"])
    @pytest.mark.parametrize("num_rows", [1, 4, 7])
    def test_each_replica_gets_its_own_back(self, devs, num_rows, how):
        model, bare = pair(Caching, devs, gather=how)
        results = []
        for module in (model, bare):
            (x, *more), cache, total = [rows(num_rows, 3, device=devs[0], seed=i) for i in range(3)], None, 0
            for step in (x, *more):
                found = module(step, cache=cache)
                (cache,) = found["past"]
                total = total + (found["out"] * torch.arange(4, device=devs[0])).square().mean()
            total.backward()
            results.append(total.detach())
        torch.testing.assert_close(*results)
        assert_same_grads(model, bare)

    def test_other_rows_than_they_are_of_are_an_error(self):
        model = parallel(Caching(), 2)
        (cache,) = model(torch.zeros(6, 3))["past"]
        with pytest.raises(
            SplitError, match=r'same number of rows on dim 0, got 5 in args\[0\] and 6 in kwargs\["cache"\]'
        ):
            model(torch.zeros(5, 3), cache=cache)
        model.split = [1, 2]
        with pytest.raises(SplitError, match=r"such as Cache, can be passed back .* replica, \[3, 3\], got \[2, 4\]"):
            model(torch.zeros(6, 3), cache=cache)
        with pytest.raises(SplitError, match=r"\[3, 3\], got \[6\]"):
            everygpu.parallel.scatter((torch.zeros(6, 3), cache), ["cpu"])


def test_weights_stacked_for_each_device_are_told_apart_from_rows(devs):
    """MAML++ repeats them for nn.DataParallel, which gives each replica its own copy."""
    x, w = rows(7, 3, device=devs[0]), rows(2, 3, device=devs[0], seed=2).requires_grad_()
    model = everygpu.DataParallel(Returning(lambda x, w: torch.tanh(x @ w["w"][0].t())), devs)
    with pytest.raises(SplitError, match=r"everygpu.Replicated\(w.unsqueeze\(0\)\) without the repeat: gradients are"):
        model(x, w={"w": w.unsqueeze(0).repeat(len(devs), 1, 1)})

    def learned(run):
        (inner,) = torch.autograd.grad(run(w).square().mean(), w, create_graph=True)
        return torch.autograd.grad(run(w - inner).square().mean(), w)

    ours = learned(lambda w: model(x, w=everygpu.Replicated({"w": w.unsqueeze(0)})))
    torch.testing.assert_close(ours, learned(lambda w: torch.tanh(x @ w.t())))


class Late(nn.Linear):
    """Made on the meta device; moving it gives it memory."""

    def to(self, device):
        super().to_empty(device=device)
        nn.init.ones_(self.weight)
        nn.init.ones_(self.bias)
        return self


def test_a_module_that_is_elsewhere_is_moved_but_where_that_is_forbidden(devices, caplog):
    devs = devices(2)
    with caplog.at_level(logging.INFO, logger="everygpu"):
        model = everygpu.DataParallel(Late(3, 2, device="meta"), devs, engine="threads")
    assert [r.levelname for r in caplog.records] == ["INFO"], "one log line"
    assert {p.device for p in model.parameters()} == {devs[0]}
    assert model(torch.ones(4, 3, device=devs[0])).tolist() == [[4.0, 4.0]] * 4
    with pytest.raises(PlacementError, match="module must have its parameters and buffers on device"):  # torch's
        everygpu.DataParallel(Late(3, 2, device="meta"), devs, strict_device=True)


@pytest.mark.gpu
def test_a_module_moved_away_between_calls_is_moved_back(model, bare, x, devs):
    assert_same(model, bare, x)
    model.cpu()
    assert_same(model, bare, x)
    assert model.module.first.weight.device == devs[0]


def test_a_module_spread_over_devices_names_two_parameters(model, bare, x, devs):
    with pytest.raises(PlacementError) as caught:
        everygpu.DataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2, device="meta")), devs)
    for part in ("0.weight", "1.weight", "cpu", "meta", "module.to("):
        assert part in str(caught.value)
    model(x)
    kept, model.module.second = model.module.second, nn.Linear(4, 2, device="meta")
    with pytest.raises(PlacementError, match="second.weight"):
        model(x)
    model.module.second = kept
    torch.testing.assert_close(model(x), bare(x))


def make_script_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated; people still pass it
        return torch.jit.script(nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("make", "named", "advice"),
    [
        (lambda: torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1), "optimizer SGD", "Wrap the model"),
        (lambda: torch.relu, "builtin_function_or_method", "nn.Module"),
        (lambda: nn.Linear, "class Linear", "Call it"),
        (make_script_module, "TorchScript", "eager module"),
        (lambda: nn.Sequential(make_script_module()), "TorchScript", "eager module"),
        (lambda: nn.LazyLinear(3), "lazy", "Run one batch"),
        (lambda: None, "NoneType", "nn.Module"),
    ],
)
def test_something_else_than_a_module(devices, make, named, advice):
    for take in (
        everygpu.DataParallel,
        everygpu.parallel.replicate,
        lambda m, devs: everygpu.parallel.data_parallel(m, torch.ones(4, 3), devs),
    ):
        with pytest.raises(ModuleError) as caught:
            take(make(), devices(2))
        assert named in str(caught.value)
        assert advice in str(caught.value)


def fail_below_zero(x):
    """Fail in the replica that gets a negative row."""
    if bool((x < 0).any()):
        try:
            raise LookupError("first")
        except LookupError as error:
            raise KeyError("negative row") from error
    return x


@pytest.mark.parametrize("bad_row", [0, 3, 6])
def test_exception_in_one_replica(devs, x, bad_row):
    model, x = everygpu.DataParallel(Returning(fail_below_zero), devs), x.abs()
    bad = x.clone()
    bad[bad_row] = -1
    shards = bad.chunk(len(devs))
    position = next(i for i, s in enumerate(shards) if bool((s < 0).any()))
    with pytest.raises(KeyError, match="negative row") as caught:
        model(bad)
    assert type(caught.value) is KeyError
    cause = caught.value.__cause__
    assert isinstance(cause, ReplicaError)
    for part in (f"replica {position}", str(devs[position]), str(tuple(shards[position].shape))):
        assert part in str(cause)
    assert isinstance(cause.__cause__, LookupError), "its own cause"
    assert "raise KeyError" in str(caught.traceback[-1].statement), "the traceback leads to the user's line"
    torch.testing.assert_close(everygpu.parallel.gather(model(x)), x)


@pytest.mark.parametrize(
    ("name", "value"),
    [("split", "thirds"), ("split", [1.0]), ("split", [1.0, -1.0]), ("split", [0, 0]), ("split", [1.0, float("nan")]),
     ("split", [1.0, "many"]), ("split", 2), ("split", ""), ("split", "12"), ("split", [1, 2, 3]), ("split", [0, 1]),
     ("split", [1, float("inf")]), ("split", ()), ("split", [None, 1]),
     ("buffers", "last"), ("buffers", None), ("dim", "rows"), ("dim", 0.5)],
)  # fmt: skip
def test_wrong_option(devices, name, value):
    with pytest.raises(OptionError, match=name) as caught:
        everygpu.DataParallel(nn.Linear(3, 2), devices(2), **{name: value})
    assert repr(value) in str(caught.value)
    assert value != "thirds" or "'chunk', 'even', 'auto' or one weight" in str(caught.value)


@pytest.mark.parametrize(
    "device_ids", [["gpu"], ["cpu", "meta"], [], [None], ["cuda:99"], [99], ["cpu:"], [-1], [1.5], "warp", 2]
)
def test_wrong_devices(device_ids):
    advice = r"Pass \[2\] for GPU 2 alone, \[0, 1\] for 2 GPUs" if device_ids == 2 else "."
    with pytest.raises(DeviceError, match=advice):
        everygpu.DataParallel(nn.Linear(3, 2), device_ids)
    with pytest.raises(DeviceError):
        everygpu.DataParallel(nn.Linear(3, 2), ["cpu"], output_device="cuda:99")


@pytest.mark.gpu
def test_the_same_gpu_twice(monkeypatch):
    monkeypatch.delenv("EVERYGPU_SHARE_GPU", raising=False)
    with pytest.raises(DeviceError, match="cuda:0"):
        everygpu.DataParallel(nn.Linear(3, 2), [0, "cuda:0"])


def test_dim_that_the_batch_does_not_have(devices):
    devs = devices(2)
    model = everygpu.DataParallel(nn.Linear(3, 2).to(devs[0]), devs, dim=2)
    with pytest.raises(SplitError, match=r"args\[0\]"):
        model(torch.ones(4, 3, device=devs[0]))
    assert model(torch.ones(1, 2, 4, 3, device=devs[0])).shape == (1, 2, 4, 2)
