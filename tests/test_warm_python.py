"""The forks that tests use in place of a Python of their own are like one."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="tests fork on Linux alone")

SHOWN = """
import os, signal, sys, threading
handler = signal.getsignal(signal.SIGINT)
print(sys.argv, sys.orig_argv, sys.path[:2], os.getcwd(), os.environ["SEEN"], os.environ.get("HOME"), sys.stdin.read())
print(__name__, sys.modules["__main__"].__dict__ is globals(), os.getppid(), os.getsid(0) == os.getpid())
print(handler, threading.active_count(), sorted(map(int, os.listdir("/proc/self/fd")))[:3], file=sys.stderr)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shown.py").write_text(SHOWN)
    return tmp_path


def show(command, folder):
    environ = {"SEEN": "é", "PYTHONPATH": str(folder / "more")}
    options = {"cwd": folder, "env": environ, "input": "asked", "start_new_session": True, "check": True}
    done = subprocess.run([sys.executable, *command, "a b", "--c"], capture_output=True, text=True, **options)
    return done.stdout, done.stderr


@pytest.mark.parametrize("command", [["-c", SHOWN], ["-m", "shown"], ["shown.py"]], ids=["code", "module", "file"])
def test_sees_what_a_python_sees(command, folder, warm_server):
    plain = show(command, folder)
    with warm_server.serving():
        assert show(command, folder) == plain


@pytest.mark.parametrize("ending", ["sys.exit(3)", "raise KeyboardInterrupt", "1 / 0", "os.abort()", "os._exit(4)"])
def test_ends_as_a_python_does(ending, warm_server):
    code = f"import atexit, os, sys\natexit.register(print, 'at exit')\nprint('begun', flush=True)\n{ending}"
    command = [sys.executable, "-c", code]
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    with warm_server.serving():
        fork = subprocess.run(command, capture_output=True, text=True, check=False)
    assert fork.returncode == plain.returncode
    assert fork.stdout == plain.stdout
    assert fork.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


@pytest.mark.usefixtures("warm_python")
def test_is_a_child_that_has_imported_torch_and_gets_signals_and_files():
    ours, its = os.pipe()
    code = f"import os, sys, time; os.write({its}, b'torch' * ('torch' in sys.modules)); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], pass_fds=[its]) as process:
        os.close(its)
        assert os.read(ours, 9) == b"torch"
        process.send_signal(signal.SIGTERM)
    os.close(ours)
    assert process.returncode == -signal.SIGTERM


def test_options_of_the_interpreter_start_a_python(warm_server):
    command = [sys.executable, "-S", "-c", "import sys; print('torch' in sys.modules)"]
    with warm_server.serving():
        assert subprocess.run(command, capture_output=True).stdout == b"False\n"


@pytest.mark.usefixtures("warm_python")
def test_threads_start_forks_beside_each_other():
    def start(i):
        done = subprocess.run([sys.executable, "-c", f"print({i})"], capture_output=True, check=True)
        return int(done.stdout)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(start, range(8))) == list(range(8))
