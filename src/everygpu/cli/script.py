"""Be ``python script.py``, in this process."""

import importlib.machinery
import io
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


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
        traceback has been shown; 130 after an interrupt.
    Source:
        ``runpy.run_path``. We differ as ``python`` itself does: ``sys.argv[0]`` is the path as written
        while ``__file__`` is absolute, and ``__main__`` stays the script's module, so that threads, exit
        handlers and worker processes that outlive its last line still find it.
    """
    path = os.path.abspath(script)
    sys.argv = [script, *args]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    try:
        _execute(path)
    except SystemExit as stop:
        return stop.code
    except KeyboardInterrupt as error:
        _show(error, path)
        return 130
    except BaseException as error:  # noqa: BLE001 - the interpreter's place: show it and end with 1
        if is_expected(error):
            return 0
        _show(error, path)
        return 1
    return 0


def _execute(path: str) -> None:
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = module
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _show(error: BaseException, path: str) -> None:
    """Show a traceback that begins in the script, through the hook that the script may have set."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
