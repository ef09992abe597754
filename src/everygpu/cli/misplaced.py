"""Options of a command that stand after the script, and go to it: a note where it surely has no use for them."""

import ast
import re
import sys
from collections.abc import Sequence

import click

from everygpu.cli.text import harmless

_USAGE_ERROR = 2
_READERS = re.compile(
    r"argv|parse|click|typer|\bfire\b|hydra|absl|flags|docopt|getopt|tyro|\bcli\b|\bargs\b|importlib|runpy|\bexec\b|__import__",
    re.IGNORECASE,
)
_KNOWN = frozenset(
    {"PIL", "datasets", "everygpu", "numpy", "timm", "torch", "torchaudio", "torchvision", "tqdm", "transformers"}
)
"""Packages that read no command line by themselves, beside the standard library's."""


def note_unread(script: str, args: Sequence[str], *, is_module: bool = False) -> None:
    """Say before a script runs that options after it have no effect, if it reads no arguments."""
    found = _find(args)
    if found and not is_module and reads_no_arguments(script):
        _tell(f"{found[0]} stands after {script}, which reads no arguments: put it before the script.")


def note_refused(script: str, args: Sequence[str], code: object) -> None:
    """Say after a script has refused its arguments that options of ours are among them."""
    found = _find(args)
    if found and code == _USAGE_ERROR:
        _tell(
            f"{found[0]} stands after {script} and goes to it, which ended with exit code {code}. "
            f"Put it before the script if it is this command's."
        )


def _find(args: Sequence[str]) -> list[str]:
    """Return the running command's long options among a script's arguments, but for those that follow ``--``."""
    context = click.get_current_context(silent=True)
    params = [] if context is None else [p for p in context.command.params if not getattr(p, "hidden", False)]
    own = {name for p in params for name in p.opts if name.startswith("--")}
    until = args.index("--") if "--" in args else len(args)
    names = (arg.partition("=")[0] for arg in args[:until])
    return [name for name in names if name in own]


def reads_no_arguments(script: str) -> bool:
    """Tell whether a script surely leaves its command line alone: nothing in its text reads one, nor do its imports."""
    try:
        with open(script, "rb") as file:
            text = file.read()
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return False
    if _READERS.search(text.decode("utf-8", "replace")):
        return False
    return all(name in _KNOWN or name in sys.stdlib_module_names for name in _imports(tree))


def _imports(tree: ast.AST) -> list[str]:
    """Return the packages that a script imports; "" for those beside it."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append("" if node.level else node.module or "")
    return [name.partition(".")[0] for name in names]


def _tell(line: str) -> None:
    click.echo(harmless(f"{click.get_current_context().command_path}: {line}"), err=True)
