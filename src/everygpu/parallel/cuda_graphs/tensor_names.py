"""What code calls a tensor that is no parameter of a module, for messages."""

import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from everygpu.parallel.replicas.remap import TABLES, cell_contents, is_constant, open_callable
from everygpu.parallel.replicas.snapshot import CONTAINERS, is_open


def name_of(module: nn.Module, tensor: Tensor) -> str:
    """Name a tensor that a forward reads: a buffer, or where an attribute or a variable leads to it.

    Args:
        module: Has the forward.
        tensor: None of its parameters.
    """
    buffer = next((name for name, b in module.named_buffers() if b is tensor), None)
    if buffer is not None:
        return f"buffer {buffer}"
    modules = dict(module.named_modules())
    known = set(map(id, modules.values()))
    for path, m in modules.items():
        for key, value in vars(m).items():
            if key not in TABLES and _leads_to(value, tensor, set(known)):
                return f"attribute {path}{'.' if path else ''}{key}"
    for name, value in _variables({kind for m in modules.values() for kind in type(m).__mro__}):
        if _leads_to(value, tensor, set(known)):
            return name
    return f"a tensor of shape {tuple(tensor.shape)}"


def _variables(classes: Iterable[type]) -> Iterator[tuple[str, Any]]:
    """Yield what the user's methods read by name: global variables, defaults and closures."""
    methods = [value for kind in classes for value in vars(kind).values() if isinstance(value, types.FunctionType)]
    for method in methods:
        home, code = method.__module__ or "", method.__code__
        if home.partition(".")[0] in ("torch", "everygpu"):
            continue
        for name in code.co_names:
            if name in method.__globals__:
                yield f"global variable {home}.{name}", method.__globals__[name]
        for value in (*(method.__defaults__ or ()), *(method.__kwdefaults__ or {}).values()):
            yield f"a default argument of {method.__qualname__}", value
        for name, cell in zip(code.co_freevars, method.__closure__ or ()):
            yield f"variable {name} in {method.__qualname__}", cell_contents(cell)


def _leads_to(value: Any, tensor: Tensor, seen: set[int]) -> bool:
    if value is tensor:
        return True
    if is_constant(value) or isinstance(value, Tensor) or id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, CONTAINERS):
        parts = [*value.values()] if isinstance(value, dict) else [*value]
    elif isinstance(value, nn.Module) or is_open(value):
        parts = [*vars(value).values()]
    else:
        opened = open_callable(value)
        parts = [] if opened is None else [*opened.children]
    return any(_leads_to(part, tensor, seen) for part in parts)
