"""Errors: what they inherit, print and survive."""

import inspect
import pickle

import pytest

from everygpu import errors
from everygpu.errors import CheckpointMismatchError, EveryGPUError

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
