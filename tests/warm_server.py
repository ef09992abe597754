"""Python, with torch imported, that forks where tests start a Python: tests/warm_python.py asks it to.

Each fork runs what it was asked for and ends as a Python does, but for taking its modules apart: with torch that would
take a quarter of a second.
"""

import atexit
import functools
import gc
import importlib.machinery
import json
import os
import runpy
import signal
import socket
import sys
import threading
import types

# At torch's first optimizer, and at the first call of a tensor with its own __torch_function__.
IMPORTED_LATE = ("torch._dynamo", "torch.distributed.tensor", "torch.utils.data")
BASE_PATH = sys.path[1:]  # without the folder of this file
LARGEST_REQUEST = 1 << 18


def wait_for_request(control):
    """Fork for each request; return it in the fork, with the files it brought along."""
    while True:
        data, files, *_ = socket.recv_fds(control, LARGEST_REQUEST, 16)
        if not data:
            os._exit(0)
        middle = os.fork()
        if middle == 0 and not (child := os.fork()):
            return json.loads(data), files
        if middle == 0:
            control.send(str(child).encode())
            os._exit(0)  # only now is the fork a child of the process that asked
        for file in files:
            os.close(file)
        os.waitpid(middle, 0)
        control.send(b"done")


def take_over(request, files):
    """Become what ``subprocess`` would have started: files, folder, environment, session and arguments."""
    above = 1 + max(*files, *request["numbers"])
    high = [os.dup2(file, above + i) for i, file in enumerate(files)]
    for file in files:
        os.close(file)
    for file, number in zip(high, request["numbers"]):
        os.dup2(file, number, inheritable=True)
        os.close(file)
    if request["new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.orig_argv = request["args"]
    encoding = os.environ.get("PYTHONIOENCODING", sys.stdout.encoding)
    reopen = functools.partial(open, encoding=encoding, closefd=False)
    sys.stdin, sys.stdout = reopen(0), reopen(1, "w", buffering=1 if os.environ.get("PYTHONUNBUFFERED") else -1)
    sys.stderr = reopen(2, "w", errors="backslashreplace", buffering=1)


def import_tested(folder):
    """Import the package, from the folder that the tests have it from, and what they use themselves."""
    sys.path[:] = [folder, *BASE_PATH]
    everygpu = importlib.import_module("everygpu")
    public = {getattr(everygpu, name).__module__ for name in everygpu.__all__}
    for name in (*IMPORTED_LATE, "pytest", "everygpu.cli", *public):
        importlib.import_module(name)


def run(args):
    """Run ``-c code``, ``-m module`` or a file, as Python does, in a ``__main__`` of its own."""
    kind = args[0] if args[0] in ("-c", "-m") else ""
    name, *options = args[1:] if kind else args
    first = {"-c": "", "-m": os.getcwd(), "": os.path.dirname(os.path.realpath(name))}[kind]
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [first, *(os.path.abspath(path) for path in added if path), *BASE_PATH]
    if importlib.machinery.PathFinder.find_spec("everygpu").origin != sys.modules["everygpu"].__file__:
        for imported in [x for x in sys.modules if x.partition(".")[0] == "everygpu"]:
            del sys.modules[imported]
    sys.argv = [kind or name, *options]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-m":
        runpy.run_module(name, vars(main), run_name="__main__", alter_sys=True)
        return
    if kind == "-c":
        code = compile(name, "<string>", "exec")
    else:
        main.__file__ = name
        with open(name, "rb") as file:
            code = compile(file.read(), name, "exec")
    exec(code, vars(main))


def run_to_the_end(args):
    """Run, show what goes wrong, wait for threads, call exit handlers, flush; never return."""
    code = 0
    try:
        run(args)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code and code is not stop.code:
            print(stop.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    import_tested(sys.argv[2])
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=int(sys.argv[1]))
    request, files = wait_for_request(control)
    control.close()
    take_over(request, files)
    # As in tests/faults/inject.py: autograd's engine is made anew before several threads come to it.
    sys.modules["torch"].ones((), requires_grad=True).square()
    run_to_the_end(request["args"][1:])
