"""What code calls a tensor that is no parameter of a module, for messages."""

from typing import Any

from torch import Tensor, nn

from everygpu.parallel.engines.processes.used_globals import UsedGlobals
from everygpu.parallel.replicas.callables import open_callable
from everygpu.parallel.replicas.contents import CONTAINERS, is_constant, is_open
from everygpu.parallel.replicas.watch import TABLES


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
    for path, m in modules.items():
        for key, value in vars(m).items():
            if key not in TABLES and _leads_to(value, tensor, set(map(id, modules.values()))):
                return f"attribute {path}{'.' if path else ''}{key}"
    found = UsedGlobals(list(modules.values())).variables.values()
    # A function leads to its defaults and closure, which are variables, too, and say more.
    for variable in sorted(found, key=lambda v: callable(v.read())):
        if _leads_to(variable.read(), tensor, set(map(id, modules.values()))):
            return str(variable)
    return f"a tensor of shape {tuple(tensor.shape)}"


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
