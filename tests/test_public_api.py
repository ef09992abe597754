"""The public names and signatures: a change here is a change for users, and goes into CHANGELOG.md."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.exports import EXPORTS

LISTED = Path(__file__).with_name("public_api.txt")
OPERATORS = ("__init__", "__call__", "__iter__", "__len__", "__enter__", "__exit__")


def signature(function: Callable[..., Any]) -> str:
    """Write a signature without annotations, which Python versions write differently."""
    plain = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in plain.parameters.values()]
    return str(plain.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def describe(name: str, value: Any) -> Iterator[str]:
    """Give a line for a function; for a class, one for each public method and property too."""
    if not inspect.isclass(value):
        yield f"{name}{signature(value)}"
        return
    ours = [kind for kind in value.__mro__ if kind.__module__.startswith("everygpu.")]
    base = next(kind for kind in value.__mro__ if kind not in ours)
    yield f"class {name}({base.__name__})"
    members = {key: member for kind in reversed(ours) for key, member in vars(kind).items()}
    for key, member in sorted(members.items()):
        if not key.startswith("_") or key in OPERATORS:
            function = getattr(member, "__func__", member)
            yield f"  {name}.{key}{signature(function) if inspect.isfunction(function) else ''}"


def test_public_names_and_signatures_are_those_listed() -> None:
    found = [line for name, value in EXPORTS.items() for line in describe(name, value)]
    assert found == LISTED.read_text().splitlines()
