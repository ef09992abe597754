"""The tree of errors is the one drawn at the top of its file."""

import ast
import builtins
import inspect
import pickle
import re

import pytest

from everygpu import errors
from everygpu.errors import CheckpointMismatchError, EveryGPUError
from tests.source import trees

BRANCH = re.compile(r"^ {4}(?P<indent>[│ ]*)(?:├──|└──) (?P<name>\w+) \((?P<builtin>\w+)\)", re.MULTILINE)


def read_drawing():
    """Yield name, parent and builtin of each error in the drawing."""
    parents = {0: "EveryGPUError"}
    for match in BRANCH.finditer(errors.__doc__):
        depth = len(match["indent"])
        parents[depth + 4] = match["name"]
        yield match["name"], parents[depth], match["builtin"]


DRAWN = list(read_drawing())
DEFINED = {
    name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and kind.__module__ == errors.__name__
}


def test_drawing_has_every_error_once():
    names = [name for name, _, _ in DRAWN]
    assert sorted([*names, "EveryGPUError"]) == sorted(DEFINED)


@pytest.mark.parametrize(("name", "parent", "builtin"), DRAWN)
def test_error_has_the_bases_that_are_drawn(name, parent, builtin):
    kind = DEFINED[name]
    assert DEFINED[parent] in kind.__bases__
    assert issubclass(kind, getattr(builtins, builtin))
    assert issubclass(kind, EveryGPUError)


@pytest.mark.parametrize("kind", DEFINED.values(), ids=DEFINED)
def test_message_is_shown_as_written_and_survives_pickling(kind):
    message = "scatter: must have\n4 rows, got 'x'."
    again = pickle.loads(pickle.dumps(kind(message)))
    assert type(again) is kind
    assert str(again) == message


@pytest.mark.parametrize("kind", DEFINED.values(), ids=DEFINED)
def test_error_says_what_it_is_for(kind):
    assert kind.__doc__.splitlines()[0].endswith(".")


def test_mismatch_without_a_message_can_still_be_printed():
    assert str(CheckpointMismatchError()) == ""


def raised_bare(tree):
    """Give the lines that raise the base class itself."""
    for node in ast.walk(tree):
        raised = node.exc.func if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else None
        raised = node.exc if isinstance(node, ast.Raise) and raised is None else raised
        if raised is not None and ast.unparse(raised).rpartition(".")[2] == "EveryGPUError":
            yield node.lineno


def test_the_base_class_itself_is_never_raised():
    assert {name: lines for name, tree in trees().items() if (lines := list(raised_bare(tree)))} == {}


@pytest.mark.parametrize(
    "line", ["raise EveryGPUError('x')", "raise errors.EveryGPUError('x') from e", "raise EveryGPUError"]
)
def test_a_raise_of_the_base_class_is_found(line):
    assert list(raised_bare(ast.parse(line))) == [1]


def children_without_a_builtin(tree):
    """Name the classes that inherit from the base class and from nothing else."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and [ast.unparse(b) for b in node.bases] == ["EveryGPUError"]:
            yield node.name


def test_every_child_has_a_builtin():
    assert {name: kinds for name, tree in trees().items() if (kinds := list(children_without_a_builtin(tree)))} == {}
    assert list(children_without_a_builtin(ast.parse("class A(EveryGPUError): ..."))) == ["A"]
