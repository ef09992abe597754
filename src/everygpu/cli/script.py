"""Run a script as ``python script.py`` or ``python -m module`` does, in this process."""

import importlib.machinery
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType

import click

from everygpu.errors import DivergedError, NonFiniteError
from everygpu.exit_codes import BAD_NUMBERS, INTERRUPTED


def require_script(script: str, is_module: bool) -> None:
    """Refuse a script that is not there, before anything is done for it.

    Raises:
        click.BadParameter: there is no such file.
    """
    if is_module or os.path.isfile(script):
        return
    todo = "Scripts are not read from stdin: write it to a file." if script == "-" else "For a module, write -m."
    raise click.BadParameter(f"File {script!r} does not exist. {todo}", param_hint="'SCRIPT'")


def run_module(
    name: str, args: Sequence[str], is_expected: Callable[[BaseException], bool] = lambda _: False
) -> str | int | None:
    """Run a module as ``python -m name args…`` would, in this process.

    Args:
        name: Dotted; of a package, its ``__main__`` is run.
        args: What follows it in ``sys.argv``, of which the first is the module's file.
        is_expected: As for ``run_script``.
    Returns:
        As ``run_script``.
    Source:
        ``runpy.run_module``. We differ as ``python`` itself does: ``__main__`` stays the module.
    """
    sys.argv = ["-m", *args]  # what the packages around it see while they are imported
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    code: CodeType | None = None

    def execute() -> None:
        nonlocal code
        spec, code = _find_module(name)
        sys.argv[0] = spec.origin or name
        module = ModuleType("__main__")
        module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, spec.parent
        module.__file__ = spec.origin
        sys.modules["__main__"] = module
        exec(code, module.__dict__)

    return _run(execute, lambda: None if code is None else code.co_filename, is_expected)


def _find_module(name: str) -> tuple[importlib.machinery.ModuleSpec, CodeType]:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ModuleNotFoundError, ValueError) as cause:  # of a package around it
        sys.exit(f"everygpu run: {cause}.")
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec is not None else None
    if spec is None or code is None:
        sys.exit(f"everygpu run: no module named {name!r} that could be run. Check the name and the working directory.")
    return spec, code


def run_script(
    script: str, args: Sequence[str], is_expected: Callable[[BaseException], bool] = lambda _: False
) -> str | int | None:
    """Run a file as ``python script.py args…`` would, in this process.

    Args:
        script: Path of the file.
        args: What follows it in ``sys.argv``.
        is_expected: Tells of an exception that ends the script as it should: it is not shown.
    Returns:
        What to give to ``sys.exit``: the script's own exit code or message; 1 after an exception, whose
        traceback has been shown, 5 after one that says that the training's numbers are wrong; 130 after an interrupt.
    Source:
        ``runpy.run_path``. We differ as ``python`` itself does: ``sys.argv[0]`` is the path as written
        while ``__file__`` is absolute, and ``__main__`` stays the script's module, so that threads, exit
        handlers and worker processes that outlive its last line still find it.
    """
    path = os.path.abspath(script)
    sys.argv = [script, *args]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    return _run(lambda: _execute(path), lambda: path, is_expected)


def _run(
    execute: Callable[[], None],
    find_file: Callable[[], str | None],
    is_expected: Callable[[BaseException], bool] = lambda _: False,
) -> str | int | None:
    """Execute a program to its end; show an exception from where it is in the program's file."""
    try:
        execute()
    except SystemExit as stop:
        return stop.code
    except KeyboardInterrupt as error:
        _show(error, find_file())
        return INTERRUPTED
    except BaseException as error:  # noqa: BLE001 - the interpreter's place: show it and end with 1
        if is_expected(error):
            return 0
        _show(error, find_file())
        return BAD_NUMBERS if isinstance(error, (DivergedError, NonFiniteError)) else 1
    return 0


def _execute(path: str) -> None:
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = module
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _show(error: BaseException, path: str | None) -> None:
    """Show a traceback that begins in the script, through the hook that the script may have set."""
    trace = error.__traceback__
    while path is not None and trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
