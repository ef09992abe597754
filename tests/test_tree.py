"""Containers of every kind, opened and built again."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree

from everygpu import tree
from tests.parallel.test_conformance_outputs import ClassifierOutput

Point = namedtuple("Point", "x y")


class Bag(list):
    """A list with an attribute, and a constructor of its own."""

    def __init__(self, label, items):
        super().__init__(items)
        self.label = label


class Pair(tuple):
    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: object
    y: object = None


@dataclasses.dataclass
class Fussy:
    """A dataclass that computes one field and can't be made again from its fields."""

    x: object
    label: str
    double: object = dataclasses.field(init=False, default=None)

    def __post_init__(self):
        if self.label != "made":
            raise ValueError(self.label)
        self.label = "ready"


class Registered:
    def __init__(self, x, label):
        self.x, self.label = x, label


@pytest.fixture(scope="module", autouse=True)
def registered_type():
    _pytree.register_pytree_node(Registered, lambda r: ([r.x], r.label), lambda x, label: Registered(x[0], label))
    yield
    _pytree._deregister_pytree_node(Registered)


def labelled(container, label):
    container.label = label
    return container


CONTAINERS = {
    "list": (lambda: [1, 2], ["v[0]", "v[1]"]),
    "tuple": (lambda: (1, 2), ["v[0]", "v[1]"]),
    "dict": (lambda: {"a": 1, 3: 2}, ['v["a"]', "v[3]"]),
    "empty list": (list, []),
    "empty tuple": (tuple, []),
    "empty dict": (dict, []),
    "named tuple": (lambda: Point(1, 2), ["v.x", "v.y"]),
    "tuple subclass": (lambda: Pair((1, 2)), ["v[0]", "v[1]"]),
    "list subclass": (lambda: Bag("b", [1, 2]), ["v[0]", "v[1]"]),
    "UserDict": (lambda: UserDict(a=1, b=2), ['v["a"]', 'v["b"]']),
    "dataclass": (lambda: Fussy(1, "made"), ["v.x", "v.label", "v.double"]),
    "frozen dataclass": (lambda: Frozen(1, 2), ["v.x", "v.y"]),
    "ModelOutput": (lambda: ClassifierOutput(logits=1), ['v["logits"]']),
}
BUILDERS = {name: build for name, (build, _) in CONTAINERS.items()} | {
    "OrderedDict": lambda: OrderedDict(b=1, a=2),
    "defaultdict": lambda: defaultdict(list, a=1),
    "deque": lambda: deque([1, 2], maxlen=5),
}


@pytest.mark.parametrize(("build", "paths"), CONTAINERS.values(), ids=CONTAINERS)
def test_leaves_are_named_as_one_would_write_them(build, paths):
    value = build()
    assert [path for path, _ in tree.leaves(value, "v")] == paths
    for path, leaf in tree.leaves(value, "v"):
        assert eval(path, {"v": value}) is leaf


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_container_is_built_again_around_new_leaves(build):
    value, untouched = build(), build()
    tripled = tree.map_leaves(lambda leaf: leaf * 3 if isinstance(leaf, int) else leaf, value)
    assert type(tripled) is type(value)
    expected = [leaf * 3 if isinstance(leaf, int) else leaf for _, leaf in tree.leaves(value, "")]
    assert [leaf for _, leaf in tree.leaves(tripled, "")] == expected
    assert value == untouched
    assert tripled is not value or value == ()


def test_what_a_subclass_adds_is_kept():
    assert tree.map_leaves(str, Bag("b", [1])).label == "b"
    assert tree.map_leaves(str, labelled(UserDict(a=1), "u")).label == "u"
    assert tree.map_leaves(str, defaultdict(list, a=1))["new"] == []
    assert tree.map_leaves(str, deque([1], maxlen=5)).maxlen == 5
    output = tree.map_leaves(str, ClassifierOutput(loss=1, logits=2))
    assert (output.loss, output["logits"], list(output)) == ("1", "2", ["loss", "logits"])


def test_type_registered_with_torch_is_a_container():
    value = Registered([1, 2], "r")
    assert [leaf for _, leaf in tree.leaves(value, "v")] == [1, 2]
    again = tree.map_leaves(str, value)
    assert (again.x, again.label) == (["1", "2"], "r")


def test_return_types_of_torch_are_containers():
    found = torch.tensor([[1.0, 3.0], [4.0, 2.0]]).max(1)
    negated = tree.map_leaves(torch.neg, found)
    assert type(negated) is type(found)
    assert negated.values.tolist() == [-3, -4]
    assert negated.indices.tolist() == [-1, 0]


PACKED = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])


@pytest.mark.parametrize(
    "leaf",
    [None, True, 3, 1.5, "text", b"bytes", {1, 2}, frozenset(), range(3), object(), Frozen, PACKED, torch.ones(2),
     torch.nn.Parameter(torch.ones(2)), torch.nn.Linear(1, 1)],
    ids=lambda leaf: type(leaf).__name__,
)  # fmt: skip
def test_everything_else_is_a_leaf(leaf):
    assert tree.open_container(leaf) is None
    assert [found is leaf for _, found in tree.leaves(leaf, "v")] == [True]
    assert tree.map_leaves(lambda x: x, leaf) is leaf


def test_field_that_was_never_set_is_left_out():
    value = Fussy(1, "made")
    del value.x
    assert [path for path, _ in tree.leaves(value, "v")] == ["v.label", "v.double"]
    assert not hasattr(tree.map_leaves(str, value), "x")


def wrap(children):
    return st.one_of(
        st.lists(children, max_size=3),
        st.tuples(children, children),
        st.dictionaries(st.text("ab.", max_size=2), children, max_size=3),
        st.builds(Point, children, children),
        st.builds(Frozen, children, children),
        st.lists(children, max_size=3).map(deque),
    )


TREES = st.recursive(st.integers() | st.text("ab.", max_size=3) | st.none(), wrap, max_leaves=12)


@given(value=TREES)
def test_nothing_is_lost_in_nested_containers(value):
    assert tree.map_leaves(lambda leaf: leaf, value) == value


def test_paths_lead_through_every_level():
    value = {"boxes": [Point(1, Frozen([2]))]}
    paths = [path for path, _ in tree.leaves(value, "out")]
    assert paths == ['out["boxes"][0].x', 'out["boxes"][0].y.x[0]', 'out["boxes"][0].y.y']


def test_tensors_in_an_object():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    assert [t.shape for t in tree.tensors_in(packed)] == [(3,), (2,)]
    holder = SimpleNamespace(a=1, b={"c": [torch.ones(4), torch.tensor(1.0)]})
    assert [t.shape for t in tree.tensors_in(holder)] == [(4,), ()]
    assert tree.tensors_in("text") == []
