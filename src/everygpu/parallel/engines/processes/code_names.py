"""Names in the bytecode of a function: globals, attributes and imports."""

import dis
import types
from dataclasses import dataclass, field

_BUILDS_TEXT = frozenset({"BUILD_STRING", "FORMAT_VALUE", "FORMAT_SIMPLE"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "IMPORT_FROM", "LOAD_SUPER_ATTR"})
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
_STORES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR"})


@dataclass(frozen=True, slots=True)
class CodeNames:
    """What code names, code within it included."""

    globals: dict[str, str] = field(default_factory=dict)
    """Global names, with the file and line of the first use."""
    chains: dict[str, str] = field(default_factory=dict)
    """Attributes of globals with dots, "config.scale", with file and line."""
    stores: dict[str, str] = field(default_factory=dict)
    """Attributes and globals that the code writes to, with file and line."""
    attributes: set[str] = field(default_factory=set)
    """Names of attributes."""
    texts: set[str] = field(default_factory=set)
    """Texts in the code, which ``getattr`` may be called with."""
    imports: set[str] = field(default_factory=set)
    """Modules that the code imports."""

    def looks_up(self) -> bool:
        """Tell whether the code looks up attributes by texts."""
        return not self.globals.keys().isdisjoint({"getattr", "hasattr"})


@dataclass(frozen=True, slots=True)
class _Reader:
    found: CodeNames
    code: types.CodeType

    def read(self) -> None:
        chain, line = "", self.code.co_firstlineno
        for op in dis.get_instructions(self.code):
            line = _line(op) or line
            where = f"{self.code.co_filename}:{line}"
            chain = self._chain(chain, op, where)
            if op.opname in _STORES:
                self.found.stores.setdefault(op.argval, where)
            elif op.opname == "IMPORT_NAME":
                self.found.imports.add(op.argval)
            elif op.opname in _BUILDS_TEXT:
                self.found.texts.add("")

    def _chain(self, chain: str, op: dis.Instruction, where: str) -> str:
        """Return the dotted name on the stack after an instruction."""
        if op.opname in _GLOBALS:
            self.found.globals.setdefault(op.argval, where)
            return str(op.argval)
        if op.opname in _ATTRIBUTES:
            self.found.attributes.add(op.argval)
            if chain:
                chain = f"{chain}.{op.argval}"
                self.found.chains.setdefault(chain, where)
            return chain
        return chain if op.opname in ("CACHE", "PUSH_NULL") else ""


def names_of(code: types.CodeType) -> CodeNames:
    """List the names in a function's code; a text that is made at run time counts as an empty one."""
    found = CodeNames()
    todo = [code]
    while todo:
        code = todo.pop(0)
        _Reader(found, code).read()
        found.texts.update(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
        todo += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return found


def _line(op: dis.Instruction) -> int | None:
    # Python 3.13 has the number in a field of its own.
    number = getattr(op, "line_number", op.starts_line)
    return number if isinstance(number, int) and not isinstance(number, bool) else None
