"""The package's own source, parsed once for all tests that read it, and where the first of them does."""

import ast
import functools
from pathlib import Path
from types import ModuleType

import everygpu

ROOT = Path(everygpu.__file__).parent


@functools.cache
def tree_of(text: str) -> ast.Module:
    """Parse a module. Leave the tree as it is."""
    return ast.parse(text)


def say_again(module: ModuleType) -> None:
    """Empty the caches of a module's functions, so that what is said once is said once more."""
    for function in vars(module).values():
        getattr(function, "cache_clear", bool)()


def trees() -> dict[str, ast.Module]:
    """Parse all modules, by their paths from the package's folder."""
    return {path.relative_to(ROOT).as_posix(): tree_of(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
