"""What a module or its replica is asked for."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import everygpu
from tests.parallel.oracle import Mlp, assert_same, assert_same_grads, pair, rows, score

pytestmark = pytest.mark.usefixtures("in_threads")


class Encoder(nn.Module):
    """Has methods and attributes people reach for from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()
        self.width = 3

    @property
    def total(self):
        return sum(p.numel() for p in self.parameters())

    def encode(self, x):
        return self.body.first(x)

    def forward(self, x):
        return self.body(x)


def test_attributes_of_the_module(devices):
    devs = devices(2)
    model, bare = pair(Encoder, devs)
    x = rows(4, 3, device=devs[0])
    assert model.width == 3
    assert model.total == bare.total
    assert model.body is model.module.body
    torch.testing.assert_close(model.encode(x), bare.encode(x))
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = model.nothing_of_the_kind
    assert not hasattr(model, "nothing_of_the_kind")


def test_attributes_are_set_where_they_are_read(devices):
    devs = devices(3)
    model, bare = pair(Encoder, devs)
    x = rows(7, 3, device=devs[0])
    model(x)
    body = Mlp().double().to(devs[0])
    model.body, bare.body = body, copy.deepcopy(body)
    model.width = 5
    assert model.module.body is body
    assert (model.module.width, model.width) == (5, 5)
    assert list(model.state_dict()) == list(bare.state_dict())
    assert_same(model, bare, x)
    model.split = "even"
    model.note, model._mark = "the module's", "a library's"
    assert not hasattr(model.module, "split")
    assert model.module.note == model.note == "the module's"
    assert not hasattr(model.module, "_mark")
    del model.note
    assert not hasattr(model.module, "note")


class Extended(Mlp):
    """Uses what it has been given."""

    def forward(self, x):
        for name, value in [*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)]:
            x = x * value if name.startswith("scale") else x + value
        x = super().forward(x)
        return self.head(x) if hasattr(self, "head") else x


def register(model, device):
    torch.manual_seed(1)
    like = {"dtype": torch.float64, "device": device}
    model.register_buffer("shift", torch.randn(3, **like))
    model.register_buffer("passing", torch.randn(3, **like), persistent=False)
    model.register_parameter("scale", nn.Parameter(torch.randn(3, **like)))
    model.scale_more = nn.Parameter(torch.randn(3, **like))
    model.add_module("head", nn.Linear(2, 3, **like))
    model.register_module("head", nn.Linear(2, 4, **like))


@pytest.mark.parametrize("used", [False, True])
def test_what_is_registered_is_the_modules(devices, used):
    devs = devices(3)
    model, bare = pair(Extended, devs)
    x = rows(7, 3, device=devs[0])
    if used:
        assert_same(model, bare, x)
    register(model, devs[0])
    register(bare, devs[0])
    assert model.shift is model.module.shift
    assert list(model._modules) == ["module"]
    assert not model._parameters
    assert not model._buffers
    assert list(model.state_dict()) == list(bare.state_dict())
    bare.load_state_dict(model.state_dict())
    for _ in range(2):
        assert_same(model, bare, x)
    with pytest.raises(KeyError, match="already exists"):
        model.register_buffer("first", torch.ones(1))


def test_what_is_registered_is_the_compiled_modules(devices):
    devs = devices(2)
    bare = Extended().double().to(devs[0])
    model = everygpu.DataParallel(torch.compile(bare, backend="eager"), devs)
    register(model, devs[0])
    assert list(bare.state_dict()) == list(model.state_dict())
    assert {"shift", "scale", "scale_more", "head.weight"} <= bare.state_dict().keys()
    assert list(model.module._modules) == ["_orig_mod"]


def test_the_wrapped_module_is_replaced_by_its_name(devices):
    devs = devices(2)
    model = everygpu.DataParallel(Mlp().double().to(devs[0]), devs)
    other = Mlp().double().to(devs[0])
    model.add_module("module", other)
    assert model.module is other
    assert_same(model, copy.deepcopy(other), rows(4, 3, device=devs[0]))
    with pytest.raises(KeyError, match="already exists"):
        model.register_buffer("split", torch.ones(1))


@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy])
def test_the_wrapper_has_its_own_attributes(devices, copied):
    devs = devices(2)
    module = Encoder().double().to(devs[0])
    own = vars(everygpu.DataParallel(module, devs)).keys() - vars(module).keys()
    for name in own:
        setattr(module, name, "mine")
    model = copied(everygpu.DataParallel(module, devs))
    model(rows(4, 3, device=devs[0]))
    assert {"split", "_replicas", "_engine"} <= own
    assert all(getattr(model.module, name) == "mine" for name in own)


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_no_recursion_before_there_is_a_module():
    empty = everygpu.DataParallel.__new__(everygpu.DataParallel)
    with pytest.raises(AttributeError):
        _ = empty.width
    with pytest.raises(AttributeError):
        _ = empty.module
    assert not hasattr(empty, "__deepcopy__")


class Introspective(Mlp):
    """Looks at its own parameters in forward, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(1))
        self.first.weight.gain = 2.0

    def forward(self, x):
        p = next(self.parameters())
        names = [name for name, _ in self.named_parameters()]
        keys = list(self.state_dict())
        facts = (
            type(p).__name__,
            isinstance(p, nn.Parameter),
            all(isinstance(q, nn.Parameter) for q in self.parameters()),
            isinstance(self.shift, nn.Parameter),
            p.dtype,
            p.requires_grad == torch.is_grad_enabled() or p.requires_grad,
            names,
            keys,
            len(list(self.buffers())),
            sum(q.numel() for q in self.parameters()),
            p is self.first.weight,
            self.training,
            p.device == x.device,
        )
        return super().forward(x.to(p.device, p.dtype)) + self.shift, facts


def test_parameters_are_real_in_every_replica(devices):
    devs = devices(3)
    model, bare = pair(Introspective, devs)
    x = rows(7, 3, device=devs[0])
    for _ in range(2):
        out, facts = model(x)
        expected, theirs = bare(x)
        torch.testing.assert_close(out, expected)
        assert facts == theirs  # a list of replicas' answers where they differ
        with torch.no_grad():
            assert model(x)[1] == theirs


def test_parameters_keep_their_own_attributes_and_class(devices):
    devs = devices(3)

    class Special(nn.Parameter):
        pass

    class Tagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.weight.gain = 2.0
            self.other = Special(torch.ones(3))

        def forward(self, x):
            return x * self.weight * self.weight.gain * self.other, type(self.other).__name__

    model = everygpu.DataParallel(Tagged().to(devs[0]), devs)
    out, kind = model(torch.ones(6, 3, device=devs[0]))
    assert out.unique().tolist() == [2.0]
    assert kind == "Special"


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.ones(3) * i for i in range(1, 4)])
        self.named = nn.ParameterDict({"a": torch.ones(3), "b": nn.Parameter(torch.ones(3) * 2)})
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.heads = nn.ModuleDict({"left": nn.Linear(3, 2)})

    def forward(self, x):
        for p in self.listed:
            x = x * p
        for name, p in self.named.items():
            x = torch.sin(x + p) if name == "a" else x * p
        for layer in self.layers:
            x = layer(x)
        return self.heads["left"](x), len(self.listed), len(self.named), sorted(self.named.keys())


def test_parameter_lists_and_dicts_are_filled(devices):
    devs = devices(3)
    model, bare = pair(Lists, devs)
    x = rows(7, 3, device=devs[0])
    out, *facts = model(x)
    expected, *theirs = bare(x)
    assert facts == theirs == [3, 2, ["a", "b"]]
    torch.testing.assert_close(out, expected)
    score(out).backward()
    score(expected).backward()
    assert_same_grads(model, bare)
    model.module.listed.append(torch.full((3,), 2.0).to(x))
    assert model(x)[1] == 4


class Copying(nn.Module):
    """Copies a part of itself in forward, as averaging and meta-learning code does."""

    def __init__(self, copied) -> None:
        super().__init__()
        self.copied = copied
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.rnn = nn.LSTM(3, 2, batch_first=True)

    def forward(self, x):
        twin, rnn = self.copied(self.body), self.copied(self.rnn)
        facts = all(isinstance(p, nn.Parameter) and p.is_leaf for p in twin.parameters())
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(2)
        whole = self.copied(self)
        out = self.body[0](x).sum(1, keepdim=True) + rnn(twin(x)[:, None])[0][:, 0].detach()
        return out + whole.body[0].bias.detach().sum(), facts


@pytest.mark.filterwarnings("ignore:RNN module weights")  # so does a copy of any recurrent net on a GPU
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch_save])
def test_copies_made_inside_a_replicas_forward(devices, copied):
    devs = devices(3)
    model, bare = pair(lambda: Copying(copied), devs)
    for m in (model, bare):
        m.eval()
    x = rows(7, 3, device=devs[0])
    for _ in range(2):
        out, leaves = model(x)
        expected, _ = bare(x)
        assert leaves is True
        torch.testing.assert_close(out, expected)
        for m, o in ((model, out), (bare, expected)):
            m.zero_grad()
            score(o).backward()
        assert_same_grads(model, bare)
        with torch.no_grad():
            torch.testing.assert_close(model(x)[0], expected)
