"""Variables that forward reads outside the module are found, and their changes are sent."""

import functools
import importlib
import sys
import types

import pytest
import torch
from torch import nn

from everygpu.parallel.engines.processes.globals_receiver import GlobalsReceiver
from everygpu.parallel.engines.processes.globals_sender import GlobalsSender
from everygpu.parallel.engines.processes.module_sender import ModuleSender
from everygpu.parallel.engines.processes.packing import CannotTravelError, pack, unpack
from everygpu.parallel.engines.processes.shared_tensors import Exporter, Importer
from everygpu.parallel.engines.processes.used_globals import UsedGlobals
from tests.parallel.engines.processes import config_module, outside_model
from tests.parallel.engines.processes.outside_model import Base, Outside

HERE = outside_model.__name__
CPU = torch.device("cpu")
GENERATOR = (x for x in ())


class Pair:
    """A sender and a receiver of the same model in one process."""

    def __init__(self, model):
        self.model = model
        self.sender = GlobalsSender(list(model.modules()), Exporter(CPU))
        importer = Importer(CPU)
        self.receiver = GlobalsReceiver(lambda p: [importer.open(t) for t in p.tensors], lambda *name: model)
        self.told = {}
        self.send()

    def send(self):
        return self.sender.update(dict, self.told)[0]

    def receive(self, packed):
        self.receiver.apply(packed, list(self.model.modules()), is_renewed=False)


@pytest.fixture(autouse=True)
def everything_as_before():
    """Set variables to the objects that they were: what is received is a copy."""
    before = [(owner, dict(vars(owner))) for owner in (outside_model, config_module, Base, Outside)]
    defaults = outside_model.choose.__defaults__
    yield
    outside_model.choose.__defaults__ = defaults
    for owner, values in before:
        for name in vars(owner).keys() | values.keys():
            if name not in values:
                delattr(owner, name)
            elif vars(owner).get(name) is not values[name]:
                setattr(owner, name, values[name])


CHANGES = {
    "float": lambda m: m.setattr(outside_model, "FACTOR", 3.0),
    "list": lambda m: m.setattr(outside_model, "ITEMS", [5.0]),
    "name in another module": lambda m: m.setattr(config_module, "SCALE", 2.0),
    "global of a function imported by name": lambda m: m.setattr(config_module, "OFFSET", 1.0),
    "class attribute": lambda m: m.setattr(Base, "gain", 4.0),
    "class attribute of a subclass, new": lambda m: m.setattr(Outside, "gain", 4.0, raising=False),
    "dict": lambda m: m.setattr(outside_model, "WEIGHTS", {"w": 7.0}),
    "object": lambda m: m.setattr(outside_model, "OPTIONS", types.SimpleNamespace(gain=2.0, inner=Base)),
    "function": lambda m: m.setattr(outside_model, "shift", lambda x: x * 2),
    "method": lambda m: m.setattr(Outside, "scale", lambda self, x: x * 3),
    "defined later": lambda m: m.setattr(outside_model, "LATER", 2.0, raising=False),
    "defined later in another module": lambda m: m.setattr(config_module, "ABSENT", 2.0, raising=False),
    "deleted": lambda m: m.delattr(outside_model, "FACTOR"),
    "defaults": lambda m: m.setattr(outside_model.choose, "__defaults__", ([2.0],)),
}


def outcome(model):
    try:
        return model(torch.ones(2, 3)).tolist()
    except (NameError, AttributeError) as error:
        return type(error)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_sent_and_set(change):
    pair = Pair(Outside())
    before = outcome(pair.model)
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        changed = outcome(pair.model)
        packed = pair.send()
        assert packed is not None
        assert pair.send() is None
    assert outcome(pair.model) == before != changed
    undo = pair.send()
    pair.receive(packed)
    assert outcome(pair.model) == changed
    pair.receive(undo)
    assert outcome(pair.model) == before


IN_PLACE = {
    "list": (outside_model.ITEMS.append, outside_model.ITEMS.pop),
    "dict": (lambda v: outside_model.WEIGHTS.update(w=v), lambda: outside_model.WEIGHTS.update(w=1.0)),
    "nested": (config_module.TABLE["nested"].append, config_module.TABLE["nested"].pop),
    "class": (Base.table.append, Base.table.pop),
    "cell": (outside_model.activate.calls.append, outside_model.activate.calls.pop),
    "default": (outside_model.choose.__defaults__[0].append, outside_model.choose.__defaults__[0].pop),
    "object": (
        lambda v: setattr(outside_model.OPTIONS.inner, "gain", v),
        lambda: setattr(outside_model.OPTIONS.inner, "gain", 1.0),
    ),
}


@pytest.mark.parametrize(("change", "undo"), IN_PLACE.values(), ids=IN_PLACE)
def test_a_change_in_place_is_sent(change, undo):
    pair = Pair(Outside())
    change(2.0)
    try:
        assert pair.send() is not None
        assert pair.send() is None
    finally:
        undo()
    assert pair.send() is not None


def test_a_tensor_on_the_device_is_shared(monkeypatch):
    pair = Pair(Outside())
    mask = torch.ones(3)
    monkeypatch.setattr(outside_model, "MASK", mask)
    pair.receive(pair.send())
    mask[0] = 7
    assert outside_model.MASK is not mask
    assert outside_model.MASK[0] == 7


def test_values_that_are_not_read_are_not_sent():
    paths = UsedGlobals(list(Outside().modules())).variables
    assert ("global", HERE, "UNSENT") not in paths
    assert ("class", HERE, "Base", "gain") in paths


def test_a_value_that_cannot_be_sent_is_named(monkeypatch):
    pair = Pair(Outside())
    monkeypatch.setattr(outside_model, "FACTOR", outside_model.UNSENT)
    with pytest.raises(CannotTravelError, match=rf"global variable {HERE}\.FACTOR of type TextIOWrapper"):
        pair.send()


def test_equal_values_are_not_sent_again(monkeypatch):
    pair = Pair(Outside())
    monkeypatch.setattr(outside_model, "FACTOR", float("1.0"))
    assert pair.send() is None


def test_torch_is_not_looked_into():
    layer = nn.TransformerEncoderLayer(8, 2)
    assert not UsedGlobals(list(layer.modules())).variables


def told_at_first(model):
    """Return the names of what a helper is told of a model that it has imported itself."""
    sender = GlobalsSender(list(model.modules()), Exporter(CPU))
    packed, tensors = sender.update(dict, {})
    return {path[1:] for path, *_ in unpack(packed, tensors, None)}


def test_code_as_it_is_imported_is_not_sent():
    told = told_at_first(Outside())
    assert (HERE, "FACTOR") in told
    assert not told & {(HERE, "choose"), (HERE, "activate"), (HERE, "Base"), (HERE, "Outside", "scale")}


def test_a_wrapper_that_was_put_in_place_is_sent(monkeypatch):
    choose = outside_model.choose
    monkeypatch.setattr(outside_model, "choose", functools.wraps(choose)(lambda x: choose(x)))
    assert (HERE, "choose") in told_at_first(Outside())


@pytest.fixture
def library(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "some_library.py").write_text(
        "from torch import nn\nSTATE = [open]\ndef act(x): return x * STATE[0]\n"
        "class Layer(nn.Module):\n    def forward(self, x): return act(x) * len(STATE)\n"
    )
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("some_library")
    del sys.modules["some_library"]


def test_patches_of_a_library_are_found_and_its_own_state_is_not(library, monkeypatch):
    pair = Pair(library.Layer())
    library.STATE.append(1)
    monkeypatch.setattr(library, "act", lambda x: x + 1)
    packed = pair.send()
    assert [path for path, *_ in unpack(packed, [], None)] == [("global", "some_library", "act")]
    monkeypatch.setattr(library.Layer, "forward", lambda self, x: x)
    packed = pair.send()
    assert [path for path, *_ in unpack(packed, [], None)] == [("class", "some_library", "Layer", "forward")]


def test_a_variable_that_a_local_class_takes_along_is_named():
    class Local(nn.Linear):
        def forward(self, x):
            return super().forward(x) + len(GENERATOR)

    sender = ModuleSender(Local(2, 2), Exporter(CPU))
    with pytest.raises(CannotTravelError, match=rf"global variable {__name__}.GENERATOR of type generator"):
        sender.update(sender.tensors())


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (("global", "no_such_module", "x"), "module no_such_module can't be imported"),
        (("class", HERE, "NoSuchClass", "x"), "isn't found"),
        (("cell", "class", HERE, "Outside", "no_such_method", "x"), "isn't found"),
    ],
)
def test_what_is_not_there_in_the_other_process_is_refused(path, reason):
    packed, _ = pack([(path, True, 1.0)], Exporter(CPU), {})
    with pytest.raises(CannotTravelError, match=reason):
        Pair(Outside()).receive(packed)
