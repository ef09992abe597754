"""Run a script as Python does, in this process, or by torchrun."""

import importlib.machinery
import importlib.util
import io
import os
import sys
from collections.abc import Mapping, Sequence
from types import CodeType, ModuleType

import click

from everygpu.cli.output import say
from everygpu.errors import DivergedError, NonFiniteError
from everygpu.exit_codes import BAD_NUMBERS, INTERRUPTED, OTHER, STOPPED, report_reason


def require_script(script: str, is_module: bool) -> None:
    """Refuse a script that is not there, before anything is done for it."""
    if is_module or os.path.isfile(script):
        return
    todo = "Scripts are not read from stdin: write it to a file." if script == "-" else "For a module, write -m."
    raise click.BadParameter(f"File {script!r} does not exist. {todo}", param_hint="'SCRIPT'")


def run_script(script: str, args: Sequence[str], is_module: bool = False) -> str | int | None:
    """Run a file, or a module, to its end, show its error, and return what to give to ``sys.exit``."""
    # Like python, unlike runpy: sys.argv[0] is the path as written while __file__ is absolute, and __main__ stays the
    # script's module, which threads, exit handlers and worker processes still find afterwards.
    file: str | None = None
    try:
        if is_module:
            sys.argv = ["-m", *args]  # what the packages around it see while they are imported
            code, module = _load_module(script)
            sys.argv[0] = module.__file__ or script
        else:
            sys.argv = [script, *args]
            file = os.path.abspath(script)
            code, module = _load_file(file, os.path.dirname(os.path.realpath(script)))
        file = code.co_filename
        sys.modules["__main__"] = module
        exec(code, module.__dict__)
    except SystemExit as stop:
        return stop.code
    except BaseException as raised:  # noqa: BLE001 - the interpreter's place
        error = raised
    else:
        return 0
    show_error(error, file)  # outside of the clause, as a hook's own error has nothing to do with this one
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, (DivergedError, NonFiniteError)):
        report_reason(str(error))
        return BAD_NUMBERS
    return OTHER


def show_error(error: BaseException, file: str | None = None) -> None:
    """Show an error as the interpreter does, from its first line in the user's file; one in its hook hides nothing."""
    trace = error.__traceback__
    while file is not None and trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except SystemExit:
        raise  # a hook may choose the exit code
    except BaseException as second:  # noqa: BLE001
        say("Error in sys.excepthook:")
        sys.__excepthook__(type(second), second, second.__traceback__)
        say("\nOriginal exception was:")
        sys.__excepthook__(type(error), error, trace)


def _load_file(path: str, folder: str) -> tuple[CodeType, ModuleType]:
    _set_first_path(folder)
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True), module


def _load_module(name: str) -> tuple[CodeType, ModuleType]:
    _set_first_path(os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ModuleNotFoundError, ValueError) as cause:  # of a package around it
        sys.exit(f"everygpu run: {cause}.")
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec is not None else None
    if spec is None or code is None:
        sys.exit(f"everygpu run: No module named {name!r} that can be run. Check the name and the working directory.")
    module = ModuleType("__main__")
    module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, spec.parent
    module.__file__ = spec.origin
    return code, module


def _set_first_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


OPTIONS = (
    "--event-log-handler", "--local-addr", "--local-ranks-filter", "--log-dir", "--logs-specs", "--master-addr",
    "--master-port", "--max-restarts", "--monitor-interval", "--nnodes", "--node-rank", "--rdzv-backend", "--rdzv-conf",
    "--rdzv-endpoint", "--rdzv-id", "--redirects", "--role", "--signals-to-handle", "--start-method", "--tee",
)  # fmt: skip
"""torchrun's options with a value, as its own ``--help`` explains them."""
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def torchrun_arguments(
    num_processes: int, options: Mapping[str, str], script: str, args: Sequence[str], is_module: bool = False
) -> list[str]:
    """Write torchrun's command line. Without ``--nnodes`` this machine is alone; else processes meet by its c10d."""
    options = dict(options)
    if "--nnodes" in options and "--master-addr" not in options:
        options = {"--rdzv-backend": "c10d", "--rdzv-id": os.path.basename(script), **options}
    alone = [] if "--nnodes" in options else ["--standalone"]
    written = [text for name, value in {"--signals-to-handle": _SIGNALS, **options}.items() for text in (name, value)]
    # After -- torchrun takes no option of the script's for one of its own. The exit codes are those of one process.
    ours = ["--module", "--", "everygpu", "--rank", *(["-m"] if is_module else [])]
    return [*alone, "--nproc-per-node", str(num_processes), *written, *ours, script, *args]


def launch(arguments: Sequence[str]) -> tuple[int, str | None]:
    """Run torchrun in this process, which holds what it has reserved; return the first failure's code, and a line."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(list(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        return code if code >= 0 else 128 - code, f"process {rank} ended with exit code {code}."
    except SignalException as error:
        name = error.sigval.name
        code = STOPPED if name == "SIGUSR1" else 128 + int(error.sigval)  # as a CheckpointManager takes it
        return code, f"stopped by {name}; so were the processes."
    return 0, None
