"""Global variables, class attributes and closure cells that the code of a module tree reads."""

import builtins
import functools
import sys
import types
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from everygpu.parallel.engines.processes.code_names import CodeNames, names_of
from everygpu.parallel.replicas.callables import MISSING, cell_contents, open_callable
from everygpu.parallel.replicas.contents import CONTAINERS, is_constant, is_open
from everygpu.parallel.replicas.watch import TABLES

CACHED: Any = type(functools.cache(len))
"""The type of functions with a cache."""

Path = tuple[Any, ...]

_CALLED_BY_TORCH = frozenset({"forward", "backward", "setup_context", "jvp", "vmap"})
_SPECIAL = frozenset({"__call__", "__getattr__", "__getattribute__", "__getitem__", "__len__", "__iter__"})
_MOST_ITEMS = 1000
"""Longer containers hold data, not code."""

_OF_OTHERS = frozenset({"torch", "everygpu", "torchgen", "triton", "numpy", "cloudpickle"})


class Variable(NamedTuple):
    """A variable, by a name that is the same in every process."""

    path: Path
    """("global", module, name), ("class", module, qualified name, name), ("cell", path of a function, name) or
    ("defaults", path of a function, name)."""
    owner: Any
    """The dict, class, cell or function that has it."""
    where: str
    """File and line of the first code found that names it."""

    def read(self) -> Any:
        """Return its value now; MISSING if there is none."""
        kind, key = self.path[0], self.path[-1]
        if kind == "global":
            return self.owner.get(key, MISSING)
        if kind == "class":
            return vars(self.owner).get(key, MISSING)
        return cell_contents(self.owner) if kind == "cell" else getattr(self.owner, key)

    def write(self, value: Any) -> None:
        """Set it, or delete it."""
        kind, key = self.path[0], self.path[-1]
        if kind == "global":
            write_global(self.owner, key, value)
        elif kind == "cell" and value is MISSING:
            del self.owner.cell_contents
        elif kind == "cell":
            self.owner.cell_contents = value
        elif value is not MISSING:
            setattr(self.owner, key, value)
        elif key in vars(self.owner):
            delattr(self.owner, key)

    def __str__(self) -> str:
        kind, *names = self.path
        if kind == "global":
            return f"global variable {names[0]}.{names[1]}"
        if kind == "class":
            return f"class attribute {names[1]}.{names[2]}"
        return f"{f'variable {names[-1]}' if kind == 'cell' else 'a default argument'} in {self.where}"


class UsedGlobals:
    """Finds the variables outside a module tree that its code can read.

    Functions are followed from ``forward``, hooks and patched methods to whatever they name, except into the standard
    library, torch and this package. Of packages in site-packages the classes of modules are looked into, and no other
    functions: a patched method or name is found, their own state isn't.

    Args:
        modules: All of the tree, in an order that is the same in every process.

    Attributes:
        variables: By path.
        namespaces: The ``__globals__`` of the functions found, by the name of the module that they are of.
        classes: Those with code that isn't torch's, by module and qualified name.
        stores: File and line of the code that writes to attributes and globals, by name.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.variables: dict[Path, Variable] = {}
        self.namespaces: dict[str, list[dict[str, Any]]] = {}
        self.classes: dict[tuple[str, str], type] = {}
        self.stores: dict[str, str] = {}
        self._names: set[str] = set(_CALLED_BY_TORCH)
        self._takes_all = False
        self._seen: dict[int, Any] = {id(m): m for m in modules}
        self._origins: dict[str, str] = {}
        self._todo: deque[tuple[Path, Any]] = deque()
        for i, m in enumerate(modules):
            self._add_class(type(m))
            for name, value in vars(m).items():
                if name not in TABLES and not is_constant(value):
                    self._todo.append((("attribute", i, name), value))
        before = None
        while before != (now := (len(self._names), len(self._seen), len(self.classes), self._takes_all)):
            before = now
            while self._todo:
                self._follow(*self._todo.popleft())
            for key, kind in list(self.classes.items()):  # names that were found lead to methods
                self._add_members(key, kind)

    def _follow(self, path: Path, value: Any) -> None:
        """Look for code in a value."""
        if isinstance(value, type):
            self._add_class(value)
        if id(value) in self._seen or is_constant(value):
            return
        self._seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            self._add_function(path, value)
        is_object = is_open(value) or isinstance(value, nn.Module)
        if is_object:
            self._add_class(type(value))
        parts = _parts(value)
        if not parts and is_object and self._origin(type(value).__module__) == "user":
            parts = list(vars(value).values())
        self._todo.extend(((*path, i), part) for i, part in enumerate(parts))

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            key = (base.__module__, base.__qualname__)
            if key not in self.classes and self._origin(base.__module__) != "others":
                self.classes[key] = base

    def _add_members(self, key: tuple[str, str], kind: type) -> None:
        for name, value in list(vars(kind).items()):
            path = ("class", *key, name)
            if path in self.variables or not self._is_reached(name):
                continue
            code = next((c for c in _functions(value)), None)
            self._add(path, kind, "" if code is None else f"{code.co_filename}:{code.co_firstlineno}")
            self._todo.append((path, value))

    def _is_reached(self, name: str) -> bool:
        is_special = name.startswith("__") and name.endswith("__")
        if is_special:
            return name in _SPECIAL or name in self._names
        return self._takes_all or name in self._names

    def _add_function(self, path: Path, function: types.FunctionType) -> None:
        module = function.__globals__.get("__name__") or ""
        origin = self._origin(module)
        closure = list(zip(function.__code__.co_freevars, function.__closure__ or ()))
        if origin == "user" or (origin == "library" and path[0] != "global"):
            found = names_of(function.__code__)
            self._note(module, function, found)
            for name, where in found.globals.items():
                self._add_global(module, function.__globals__, name, where, found)
            for name in found.imports:
                self._add_module(_imported(name, function.__globals__), found, "")
        where = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
        for name, cell in closure:
            if origin == "user" and name != "__class__":
                self._add(("cell", *path, name), cell, where)
            self._todo.append((("cell", *path, name), cell_contents(cell)))
        for name in ("__defaults__", "__kwdefaults__"):
            if origin == "user" and getattr(function, name):
                self._add(("defaults", *path, name), function, where)

    def _note(self, module: str, function: types.FunctionType, found: CodeNames) -> None:
        spaces = self.namespaces.setdefault(module, [])
        if not any(space is function.__globals__ for space in spaces):
            spaces.append(function.__globals__)
        self.stores = {**found.stores, **self.stores}
        self._names |= found.attributes
        if found.looks_up():
            self._names |= found.texts
            self._takes_all |= "" in found.texts

    def _add_global(self, module: str, space: dict[str, Any], name: str, where: str, found: CodeNames) -> None:
        value = space.get(name, MISSING)
        if value is MISSING and hasattr(builtins, name):
            return
        self._add(("global", module, name), space, where)
        self._todo.append((("global", module, name), value))
        if isinstance(value, types.ModuleType):
            self._add_module(value, found, name)
        elif isinstance(value, type):
            self._names |= {"__init__", "__new__", "__post_init__"}

    def _add_module(self, module: types.ModuleType | None, found: CodeNames, chain: str) -> None:
        """Add what code reads from a module that it names."""
        if module is None or self._origin(module.__name__) != "user":
            return
        space = vars(module)
        wanted = {n: w for c, w in found.chains.items() if chain and (n := _after(chain, c))}
        others = {n for n in found.attributes if n in space}
        if found.looks_up():
            others |= found.texts - {""}
        for name in (*wanted, *sorted(others - wanted.keys())):
            path = ("global", module.__name__, name)
            is_new = path not in self.variables
            self._add(path, space, wanted.get(name, ""))
            value = space.get(name, MISSING)
            self._todo.append((path, value))
            if isinstance(value, types.ModuleType) and is_new:
                self._add_module(value, found, f"{chain}.{name}")
        self.namespaces.setdefault(module.__name__, [])
        if not any(known is space for known in self.namespaces[module.__name__]):
            self.namespaces[module.__name__].append(space)

    def _add(self, path: Path, owner: Any, where: str) -> None:
        if path not in self.variables:
            self.variables[path] = Variable(path, owner, where)

    def _origin(self, module: str) -> str:
        if module not in self._origins:
            self._origins[module] = origin_of(module)
        return self._origins[module]


def origin_of(module: str) -> str:
    """Return "user", "library" for site-packages, or "others" for torch, the standard library and this package."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in _OF_OTHERS or top == "":
        return "others"
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "library" if any(f"{s}-packages" in file for s in ("site", "dist")) else "user"


def write_global(space: dict[str, Any], name: str, value: Any) -> None:
    """Set a name in a namespace, or delete it."""
    if value is MISSING:
        space.pop(name, None)
    else:
        space[name] = value


def _parts(value: Any) -> Collection[Any]:
    """Return where else there may be code in a value."""
    if isinstance(value, CONTAINERS):
        items = value.values() if isinstance(value, dict) else value
        return list(items) if len(items) <= _MOST_ITEMS else ()
    if isinstance(value, types.FunctionType):
        return [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
    opened = open_callable(value)
    if opened is not None:
        return opened.children
    if isinstance(value, property):
        return (value.fget, value.fset)
    if isinstance(value, functools.cached_property):
        return (value.func,)
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, CACHED):
        return (value.__wrapped__,)
    return ()


def _functions(value: Any) -> Iterator[types.CodeType]:
    for part in (value, *_parts(value)):
        if isinstance(part, types.FunctionType):
            yield part.__code__


def _imported(name: str, space: dict[str, Any]) -> types.ModuleType | None:
    package = space.get("__package__") or ""
    return sys.modules.get(name) or sys.modules.get(f"{package}.{name}")


def _after(chain: str, longer: str) -> str | None:
    """Return the next name of a longer chain: "b" of "a.b.c" after "a"."""
    return longer[len(chain) + 1 :].partition(".")[0] if longer.startswith(f"{chain}.") else None


def find_class(module: str, qualified: str) -> Any:
    """Return the class of a module that is imported here; None if there is none, and for ``__main__``."""
    found: Any = None if module == "__main__" else sys.modules.get(module)
    for name in qualified.split("."):
        found = getattr(found, name, None)
    return found
