"""Errors: what they inherit, print and survive."""

import ast
import inspect
import pickle

import pytest

from everygpu import errors
from everygpu.errors import CheckpointMismatchError, EveryGPUError
from tests.source import trees

DEFINED = {
    name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and kind.__module__ == errors.__name__
}


def test_each_is_one_of_ours_says_what_it_is_for_and_survives_pickling():
    message = "scatter: must have\n4 rows, got 'x'."
    for kind in DEFINED.values():
        assert issubclass(kind, EveryGPUError)
        again = pickle.loads(pickle.dumps(kind(message)))
        assert (type(again), str(again)) == (kind, message)
        assert kind.__doc__.splitlines()[0].endswith(".")


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [(errors.LossError, RuntimeError), (errors.LossError, ValueError), (errors.DeviceError, RuntimeError),
     (errors.ModuleError, TypeError), (errors.PlacementError, RuntimeError)],
)  # fmt: skip
def test_code_that_catches_builtins_goes_on_working(kind, builtin):
    assert issubclass(kind, builtin)


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
    for line in ("raise EveryGPUError('x')", "raise errors.EveryGPUError('x') from e", "raise EveryGPUError"):
        assert list(raised_bare(ast.parse(line))) == [1]


def children_without_a_builtin(tree):
    """Name the classes that inherit from the base class and from nothing else."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and [ast.unparse(b) for b in node.bases] == ["EveryGPUError"]:
            yield node.name


def test_every_child_has_a_builtin():
    assert {name: kinds for name, tree in trees().items() if (kinds := list(children_without_a_builtin(tree)))} == {}
    assert list(children_without_a_builtin(ast.parse("class A(EveryGPUError): ..."))) == ["A"]
