"""A helper's variables outside the module, set as they are in the main process."""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from everygpu.parallel.engines.processes.messages import Packed
from everygpu.parallel.engines.processes.packing import CannotTravelError, unpack
from everygpu.parallel.engines.processes.used_globals import Path, UsedGlobals, find_class, write_global
from everygpu.parallel.replicas.callables import MISSING


class GlobalsReceiver:
    """Sets variables to the values that the main process tells.

    Functions that have travelled by value have a namespace of their own for each message that they came with: a global
    is set in each of them, and in the module if it is imported here.

    Args:
        open_tensors: Makes tensors of those in a message.
        find: Returns what both processes have, by its name.
    """

    def __init__(self, open_tensors: Callable[[Packed], Sequence[Tensor]], find: Callable[[str, int], Any]) -> None:
        self._open_tensors = open_tensors
        self._find = find
        self._values: dict[Path, Any] = {}

    def apply(self, packed: Packed | None, modules: Sequence[nn.Module], *, is_renewed: bool) -> None:
        """Set what has changed.

        Args:
            packed: From the main process.
            modules: All of the replica.
            is_renewed: Attributes of the replica were unpickled again, with the values of that time.
        Raises:
            CannotTravelError: a variable isn't found here.
        """
        told: dict[Path, Any] = {}
        if packed is not None:
            rows = unpack(packed, self._open_tensors(packed), self._find)
            told = {path: value if is_there else MISSING for path, is_there, value in rows}
            self._values.update(told)
        left = dict(self._values) if is_renewed else told
        while left:
            found = UsedGlobals(modules)
            rest = {path: value for path, value in left.items() if not _write(found, path, value)}
            if len(rest) == len(left):
                self._refuse(rest, told)
                return
            left = rest  # code that was set just now leads to more

    def _refuse(self, rest: dict[Path, Any], told: dict[Path, Any]) -> None:
        lost = [path for path, value in rest.items() if path in told and value is not MISSING]
        for path in rest:
            self._values.pop(path, None)  # of code that is gone
        if lost:
            raise CannotTravelError(f"the variable {lost[0]} isn't found in the other process")


def _write(found: UsedGlobals, path: Path, value: Any) -> bool:
    """Set a variable; tell whether it was found."""
    if path[0] == "global":
        return _write_global(found, path[1], path[2], value)
    if path[0] == "class":
        return _write_class(found.classes.get(path[1:3]) or find_class(*path[1:3]), path[3], value)
    variable = found.variables.get(path)
    if variable is not None:
        variable.write(value)
    return variable is not None


def _write_global(found: UsedGlobals, module: str, name: str, value: Any) -> bool:
    spaces = list(found.namespaces.get(module, ()))
    if module != "__main__":  # this process has another
        if not spaces and module not in sys.modules:
            _import(module)
        if module in sys.modules:
            spaces.append(vars(sys.modules[module]))
    for space in spaces:
        write_global(space, name, value)
    return bool(spaces)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:
        raise CannotTravelError(f"module {module} can't be imported in the other process ({error})") from error


def _write_class(kind: Any, name: str, value: Any) -> bool:
    if kind is None:
        return False
    if value is not MISSING:
        setattr(kind, name, value)
    elif name in vars(kind):
        delattr(kind, name)
    return True
