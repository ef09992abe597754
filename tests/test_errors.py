"""The tree of errors is the one drawn at the top of its file."""

import builtins
import inspect
import pickle
import re

import pytest

from everygpu import errors
from everygpu.errors import CheckpointMismatchError, EveryGPUError

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
    assert kind.__doc__.endswith(".")


def test_mismatch_without_a_message_can_still_be_printed():
    assert str(CheckpointMismatchError()) == ""
