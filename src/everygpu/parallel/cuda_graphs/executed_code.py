"""Which code a step runs: its names say which globals and attributes the step can read."""

import dis
import functools
import gc
import importlib.util
import inspect
import operator
import os
import sys
import sysconfig
import threading
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from everygpu.parallel.replicas.remap import MISSING, cell_contents, is_copy
from everygpu.torch_private.compiler import compiled_from

_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_TORCH = Path(torch.__file__).parent
_TRITON = str(_TORCH.with_name("triton")) + os.sep
LEFT_OUT = (*(str(folder) + os.sep for folder in (_TORCH, Path(__file__).parents[2])), _TRITON, "<frozen ")
"""Whose code isn't looked into: torch's settings are guarded, Triton refuses globals that have changed since it has
compiled a kernel, and this package has no say in a step's values."""


def is_left_out(file: str) -> bool:
    """Whether a file of code is torch's, Triton's, Python's own, or of this package."""
    return file.startswith(LEFT_OUT) or (file.startswith(_LIBRARY) and "-packages" not in file)


class ExecutedCode:
    """The code that steps have run, libraries' left out, with the functions it belongs to."""

    def __init__(self) -> None:
        self.functions: list[types.FunctionType] = []
        self.globals: list[tuple[dict[str, Any], frozenset[str]]] = []
        """Tables of globals, with the names that are looked up there."""
        self.imports: set[str] = set()
        self.names: set[str] = set()
        """All names and strings: attributes that are read have one of these, unless it is put together."""
        self.version = 0
        """Goes up with each function that is new."""
        self._seen: dict[tuple[int, int], tuple[types.CodeType, dict[str, Any]]] = {}
        self._codes: dict[int, types.CodeType] = {}
        self._nested: set[int] = set()
        self._closures: dict[int, list[tuple[Any, ...]]] = {}
        self._num_imports: dict[int, int] = {}
        """These continue in a thread; their code has run before the next step."""
        self._is_left_out = functools.cache(is_left_out)
        self._compiled: str | None = None
        """Names code that was compiled where nobody looked."""

    def has(self, function: types.FunctionType) -> bool:
        """Whether a function's code has run."""
        return id(function.__code__) in self._codes

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what runs within, in this thread and in replicas'."""
        num = len(self._seen)
        try:
            with without_collecting(), profiling(self._note):
                yield
        finally:  # a failed step has also run some code
            if len(self._seen) > num or self._closures:
                before = len(self.functions)
                self._find_functions()
                self.version += len(self._seen) > num or len(self.functions) > before

    def _note(self, frame: Any, event: str, _: Any) -> None:
        if event not in ("call", "return"):  # of what is written in C
            return
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib"):
            if code.co_name == "_find_and_load":
                me = threading.get_ident()
                self._num_imports[me] = self._num_imports.get(me, 0) + (1 if event == "call" else -1)
            return
        if event == "return" or self._is_left_out(code.co_filename) or self._num_imports.get(threading.get_ident()):
            return
        if _is_generated(frame):
            return
        scope = frame.f_globals
        if (id(code), id(scope)) not in self._seen:
            self._seen[id(code), id(scope)] = code, scope
            made_from = compiled_from(code)
            original, inlined = (code, []) if made_from is None else made_from
            if inlined is None:
                self._compiled = f"the code that torch.compile made of {original.co_name} can't be seen"
            for part in (original, *(c for c in inlined or () if not is_left_out(c.co_filename))):
                self._codes[id(part)] = part
                self._nested.update(map(id, _codes_in(part)))
        if code.co_freevars and id(code) not in self._nested:
            values = frame.f_locals
            closure = tuple(values.get(name, MISSING) for name in code.co_freevars)
            others = self._closures.setdefault(id(code), [])
            if not any(all(map(operator.is_, closure, other)) for other in others):
                others.append(closure)

    def _find_functions(self) -> None:
        """Find the functions that have run, but those that gc.freeze() hides; what code makes that has run is new."""
        known = {id(f) for f in self.functions}
        for f in gc.get_objects():
            if type(f) is types.FunctionType and self.has(f) and id(f) not in known and self._has_run(f):
                self.functions.append(f)
        self._closures.clear()
        tables: dict[int, tuple[dict[str, Any], set[str]]] = {}
        pairs = [*self._seen.values(), *((f.__code__, f.__globals__) for f in self.functions)]
        for code, scope in pairs:
            names, imports = _names_of(code)
            tables.setdefault(id(scope), (scope, set()))[1].update(names)
            self.imports.update(_resolve(name, scope) for name in imports)
            self.names.update(code.co_names, (c for c in code.co_consts if type(c) is str))
        self.globals = [(scope, frozenset(names)) for scope, names in tables.values()]

    def find_lost(self, functions: Iterable[types.FunctionType]) -> str | None:
        """Name code that has run and is in none of these functions, is made by none of it, and isn't a class's body."""
        found = {id(f.__code__) for f in functions} | self._nested
        lost = [c for i, c in self._codes.items() if i not in found and c.co_flags & inspect.CO_OPTIMIZED]
        if not lost:
            return self._compiled
        where = f"{Path(lost[0].co_filename).name}:{lost[0].co_firstlineno}"
        return f"what function {lost[0].co_name} in {where} refers to can't be seen"

    def _has_run(self, f: types.FunctionType) -> bool:
        if id(f.__code__) in self._nested or is_copy(f):
            return False
        if not f.__closure__ or id(f.__code__) not in self._closures:
            return not f.__closure__
        cells = list(map(cell_contents, f.__closure__))
        return any(all(map(operator.is_, cells, closure)) for closure in self._closures[id(f.__code__)])


@contextmanager
def profiling(profile: Any) -> Iterator[None]:
    """Register a function that Python calls at each call of this thread; a user's profiler pauses."""
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextmanager
def without_collecting() -> Iterator[None]:
    """Leave garbage for later: its finalizers, and functions in ``gc.callbacks``, are no part of a step."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def current_profile() -> Any:
    """Return what ``profiling`` has called in this thread, for another thread that works for it; or None."""
    profile = sys.getprofile()
    return profile if isinstance(getattr(profile, "__self__", None), ExecutedCode) else None


def _is_generated(frame: Any) -> bool:
    """Whether code is a method that Python has written for a named tuple, or for a dataclass of a library; or what
    Triton has written to look at a kernel's arguments.
    """
    if frame.f_code.co_filename != "<string>":
        return False
    scope, caller = frame.f_globals, frame.f_back
    if "__name__" not in scope:
        return caller is not None and caller.f_code.co_filename.startswith(_TRITON)
    return scope["__name__"].startswith("namedtuple_") or is_left_out(scope.get("__file__", ""))


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield const
            yield from _codes_in(const)


def _names_of(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the globals that code looks up, and the Python modules it imports, by name."""
    found: tuple[set[str], set[str]] = (set(), set())
    for part in (code, *_codes_in(code)):
        before: list[Any] = [None, None]
        for i in dis.get_instructions(part):
            if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                found[0].add(i.argval)
            elif i.opname == "IMPORT_NAME":  # after how many packages to go up, and names
                found[1].add("." * before[0] + i.argval)
            before = [before[1], i.argval]
    return found


def _resolve(name: str, scope: dict[str, Any]) -> str:
    package = scope.get("__package__")
    return importlib.util.resolve_name(name, package) if name.startswith(".") and package else name
