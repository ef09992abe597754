"""A helper's life: it ends with the main process; its death is an error that names the signal, and a new one starts."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import everygpu
from everygpu.errors import WorkerError
from everygpu.parallel.engines.processes import child, helper_process
from everygpu.parallel.engines.processes.child import HelperChild
from everygpu.parallel.engines.processes.connection import connected
from everygpu.parallel.engines.processes.ends import describe_end
from everygpu.progress import progress
from tests.parallel.engines.processes.pool import PooledHelper

SHARED = Path("/dev/shm")
CPU = torch.device("cpu")
X = torch.arange(12.0).reshape(4, 3)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="helpers run on Linux only")


class Mortal(nn.Module):
    """Ends its process, if that is a helper, in forward or backward."""

    def __init__(self, main: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.main = main
        self.dies_in = ""
        self.by = 0
        self.interrupts = False

    def forward(self, x: Tensor) -> Tensor:
        self.die("forward")
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.die("backward"))
            y.register_hook(self.interrupt)
        return y

    def interrupt(self, _: Tensor) -> None:
        if os.getpid() != self.main and self.interrupts:
            time.sleep(0.1)
            os.kill(self.main, signal.SIGINT)
            time.sleep(0.1)

    def die(self, where: str) -> None:
        if os.getpid() != self.main and where == self.dies_in:
            os.kill(os.getpid(), self.by)
            time.sleep(60)


def helpers_of(pid: int) -> list[int]:
    """The processes that a process has started as helpers, but for those that tests share."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            command = path.joinpath("cmdline").read_text()
            is_fork = "warm_server" in command and os.getsid(int(path.name)) == int(path.name)
        except OSError:
            continue
        if parent == pid and ("engines.processes" in command or is_fork) and int(path.name) not in PooledHelper.pids:
            found.append(int(path.name))
    return found


def wait_for(is_so: Callable[[], object], limit_s: float = 5.0) -> float:
    """Wait; return how long it took."""
    start = time.monotonic()
    while not is_so():
        assert time.monotonic() - start < limit_s, "it took too long"
        time.sleep(0.01)
    return time.monotonic() - start


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def runs(pid: int) -> bool:
    """Tell whether a process runs: one without a parent stays until the system takes note of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def step(model: everygpu.DataParallel) -> list[Tensor]:
    """Output and gradients, as one process gives them."""
    model.zero_grad()
    y = model(X)
    y.sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]


def check_death(model: everygpu.DataParallel, where: str, by: signal.Signals) -> None:
    """Have the helper die; see the error, and the step after it."""
    wanted = step(model)
    before = [p.detach().clone() for p in model.parameters()]
    (pid,) = helpers_of(os.getpid())
    model.module.dies_in, model.module.by = where, by
    start = time.monotonic()
    with pytest.raises(WorkerError, match=rf"ended by {by.name}\. What this step .* a new helper starts"):
        step(model)
    assert time.monotonic() - start < 5
    assert not is_there(pid)
    model.module.dies_in = ""
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    torch.testing.assert_close(step(model), wanted)
    assert len(helpers_of(os.getpid())) == 1


def check_loans(model: everygpu.DataParallel) -> None:
    """Take gradients of inputs alone: those of parameters, which the helper computes all the same, are given back."""
    model(X)
    (pid,) = helpers_of(os.getpid())
    num_files = []
    for _ in range(12):
        x = X.clone().requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        num_files.append(len(list(Path(f"/proc/{pid}/fd").iterdir())))  # memory that is lent has one each
    assert num_files[-1] <= num_files[3]


def check_interrupt(model: everygpu.DataParallel) -> None:
    """Send Ctrl-C to the main process while it waits for the helper's gradients."""
    wanted = step(model)
    model.module.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        step(model)
    model.module.interrupts = False
    torch.testing.assert_close(step(model), wanted)


def check_signals(model: everygpu.DataParallel) -> None:
    """Send the helper the signals with which schedulers end a job: the main process's save comes after this step."""
    wanted = step(model)
    (pid,) = helpers_of(os.getpid())
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(pid, number)
    torch.testing.assert_close(step(model), wanted)
    assert helpers_of(os.getpid()) == [pid]


def check_threads(model: everygpu.DataParallel) -> None:
    """Have three threads use the model at once."""
    wanted, wrong = step(model), []
    weights = list(model.parameters())

    def use(index: int) -> None:
        for _ in range(60):
            with torch.set_grad_enabled(index > 0):
                y = model(X)
            found = [y.detach(), *(torch.autograd.grad(y.sum(), weights) if index else [])]
            wrong.extend(1 for a, b in zip(found, wanted) if not torch.allclose(a, b))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(use, range(3), timeout=60))
    assert not wrong


@pytest.mark.usefixtures("warm_python")
def test_loans_interrupts_threads_and_deaths(caplog):
    model = everygpu.DataParallel(Mortal(os.getpid()), ["cpu"] * 2, engine="processes")
    check_loans(model)
    check_interrupt(model)
    check_signals(model)
    check_threads(model)
    check_death(model, "forward", signal.SIGKILL)
    check_death(model, "backward", signal.SIGSEGV)
    y = model(X)
    (pid,) = helpers_of(os.getpid())
    caplog.clear()
    os.kill(pid, signal.SIGABRT)
    wait_for(lambda: "SIGABRT" in caplog.text)  # it is said at once
    with pytest.raises(WorkerError, match="SIGABRT"):
        model(X)
    assert not helpers_of(os.getpid())
    model.release()
    with pytest.raises(WorkerError, match=r"run from forward to backward, .* Run forward again"):
        y.sum().backward()


SCRIPT = """
    # No guard: helpers don't run this again.
    import atexit, os, signal, sys, threading, time
    from pathlib import Path
    import torch
    import everygpu
    import local_module

    with open("runs", "a") as file:
        print("run", file=file)

    class Net(local_module.Base):
        def forward(self, x):
            if self.is_slow:
                Path(f"in-forward-{os.getpid()}").touch()
                time.sleep(2)
            return self.linear(x) * SCALE

    SCALE = 2
    net = Net()
    model = everygpu.DataParallel(net, ["cpu"] * 2, engine="processes")
    x = torch.ones(4, 3)
    assert torch.equal(model(x), net(x))
    net.is_slow = True

    def interrupt():
        while len(list(Path().glob("in-forward-*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    try:
        model(x)
        raise SystemExit("not interrupted")
    except KeyboardInterrupt:
        pass
    net.is_slow = False
    os.chdir("elsewhere")
    found = []
    thread = threading.Thread(target=lambda: found.append(model(x)))
    thread.start()
    thread.join()
    child = os.fork()  # as a loader's workers are
    if child == 0:
        sys.exit()  # with all exit handlers
    os.waitpid(child, 0)
    found.append(model(x))
    assert all(torch.equal(y, net(x)) for y in found)
    assert Path("where").read_text() == os.getcwd()
    print("done", flush=True)
    raise SystemExit(7)
"""

LOCAL_MODULE = """
    import os
    import torch

    class Base(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 2)
            self.is_slow = False
            self.main = os.getpid()

        def __call__(self, x):
            if os.getpid() != self.main:
                print("from the helper")
                with open("where", "w") as file:
                    file.write(os.getcwd())
            return super().__call__(x)
"""


@pytest.mark.slow
def test_a_script_from_stdin_is_interrupted_goes_on_and_ends(tmp_path):
    tmp_path.joinpath("local_module.py").write_text(textwrap.dedent(LOCAL_MODULE))
    tmp_path.joinpath("elsewhere").mkdir()
    ended = subprocess.run(
        [sys.executable, "-"], input=textwrap.dedent(SCRIPT), cwd=tmp_path, text=True, capture_output=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (7, "")
    assert ended.stdout.split("\n") == ["from the helper"] * 4 + ["done", ""]
    assert tmp_path.joinpath("runs").read_text() == "run\n"


KILLED = """
    import os, time, torch, everygpu
    model = everygpu.DataParallel(torch.nn.Linear(3, 2), ["cpu"] * 2, engine="processes")
    model(torch.ones(4, 3))
    worker = os.fork()  # it has the main process's end of the socket, too
    if worker == 0:
        time.sleep(20)
        os._exit(0)
    print(worker, flush=True)
    while True:
        model(torch.ones(64, 3)).sum().backward()
"""


@pytest.mark.usefixtures("warm_python")
def test_helpers_end_with_a_main_process_that_is_killed_whose_forks_live_on():
    main = subprocess.Popen([sys.executable, "-c", textwrap.dedent(KILLED)], stdout=subprocess.PIPE)
    worker = int(main.stdout.readline())
    (helper,) = helpers_of(main.pid)
    time.sleep(0.03 * torch.rand(()).item())
    main.kill()
    main.wait()
    main.stdout.close()
    wait_for(lambda: not runs(helper))
    os.kill(worker, signal.SIGKILL)
    assert not [*SHARED.glob(f"torch_{main.pid}_*"), *SHARED.glob(f"torch_{helper}_*")]


def test_a_connection_that_is_interrupted_within_a_message_is_given_up():
    with connected() as (mine, its):
        its.send(bytes(5))  # a part of a message
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            mine.receive()
        timer.join()
        assert its.recv(1) == b""  # it is told
        with pytest.raises(EOFError, match="given up"):
            mine.receive()
        with pytest.raises(EOFError, match="given up"):
            mine.send("more")
        mine.close()


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Have another program started in a helper's place."""
    monkeypatch.setattr(child, "python_command", lambda *_: list(words))


def test_a_start_that_fails_is_an_error_with_the_last_words(monkeypatch):
    command(monkeypatch, sys.executable, "-c", "import sys; sys.exit('libnothing.so: cannot open')")
    model = everygpu.DataParallel(nn.Linear(3, 2), ["cpu"] * 2, engine="processes")
    with pytest.raises(WorkerError, match=r"must start, but it ended with exit status 1.*\n.*libnothing\.so: cannot"):
        model(X)
    model.release()


@pytest.mark.parametrize("words", [["sleep", "60"], ["/there/is/no/such/program"]])
def test_a_start_that_hangs_or_cannot_be_tried_is_made_up_for_by_threads(monkeypatch, caplog, words):
    command(monkeypatch, *words)
    monkeypatch.setattr(helper_process, "START_S", 0.2)
    model = everygpu.DataParallel(nn.Linear(3, 2), ["cpu"] * 2, engine="processes")
    torch.testing.assert_close(model(X), model.module(X))
    wanted = "didn't start within 0 s" if words[0] == "sleep" else "no helper process can be started"
    assert wanted in caplog.text
    model.release()


def test_starts_and_ends_leave_nothing(monkeypatch):
    command(monkeypatch, "sleep", "60")
    for _ in range(200):
        HelperChild("a test", CPU).end()
    gc.collect()  # what is left, the fixtures of all tests find


def test_a_helper_that_has_ended_before_its_watch_is_started_is_forgotten(monkeypatch):
    command(monkeypatch, "true")
    start = threading.Thread.start

    def start_and_see_out(thread):
        start(thread)
        thread.join()

    monkeypatch.setattr(threading.Thread, "start", start_and_see_out)
    child = HelperChild("a test", CPU)
    assert child.pid not in progress().helpers
    child.end()


@pytest.mark.parametrize(
    ("code", "words"),
    [(None, "doesn't answer"), (3, "exit status 3"), (-9, "SIGKILL"), (-36, "signal 36")],
)
def test_ends_are_described(code, words):
    assert words in describe_end(code)
