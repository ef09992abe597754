"""A replica, a backward or a rank that stands still is named, and the run ends with code 6."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
import torch

import everygpu
from everygpu._watchdog import Threads
from everygpu.checkpoint.background import Background
from everygpu.errors import OptionError
from everygpu.exit_codes import REASON_FILE, STUCK
from everygpu.progress import progress, running
from everygpu.ranks.group import init_group
from tests.cli.runs import command_of
from tests.faults.hanging import Net, make_batch, wait_for_ever
from tests.faults.inject import fork
from tests.ranks.harness import running as running_ranks

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes as Linux shows them"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
SOON_S = 0.5
CALM_S, LONG_S = 2.0, 2.6
LINE = wait_for_ever.__code__.co_firstlineno + 2


class Child:
    """Work in a process of its own, which has begun.

    Args:
        path: Where its standard error goes.
        work: Done there.
    """

    def __init__(self, path: Path, work: Callable[[], object]) -> None:
        self._path = path
        self._pid = fork(lambda: self._run(work))

    def _run(self, work: Callable[[], object]) -> None:
        with self._path.open("w") as file:
            os.dup2(file.fileno(), 2)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - to the end of the process
        try:
            work()
        except BaseException:
            traceback.print_exc()
            raise

    def end(self) -> tuple[int, str]:
        """Wait for it; return its exit code, and what it has written to standard error."""
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]), self._path.read_text()


def train(engine: str, place: str, replica: int = 1, then: Callable[[], object] = int) -> None:
    """Train a step, and one in which a replica waits for ever."""
    net, x = Net(), make_batch()
    model = everygpu.DataParallel(net, ["cpu"] * 2, engine=engine)
    model(x).sum().backward()
    assert model.engine_in_use == engine
    net.place, net.replica = place, replica
    then()
    everygpu.watchdog(timeout=SOON_S)
    model(x).sum().backward()


def train_by_step(place: str = "backward") -> None:
    net = Net()
    net.place = place
    model = everygpu.DataParallel(net, ["cpu"] * 2)
    step = everygpu.TrainStep(model, lambda y: y.sum(), torch.optim.SGD(net.parameters(), 0.1))
    with everygpu.watchdog(timeout=SOON_S if place else 600):
        step(make_batch())


def train_alone() -> None:
    net = Net()
    net.place = "forward"
    everygpu.watchdog(timeout=SOON_S)
    everygpu.DataParallel(net, ["cpu"])(make_batch()[2:])


def train_with_a_barrier() -> None:
    """Train while the first replica waits for the other at a synchronised layer."""
    net = Net()
    net.layer, net.place = everygpu.SyncBatchNorm(4), "forward"
    everygpu.watchdog(timeout=SOON_S)
    everygpu.DataParallel(net, ["cpu"] * 2, engine="threads")(make_batch())


def wait_for_ranks_beside_a_forward() -> None:
    """Stand still at two places at once."""
    everygpu.watchdog()

    def wait_for_ranks() -> None:
        with running("barrier over ranks", waits_for="ranks"):
            wait_for_ever()

    threading.Thread(target=wait_for_ranks, daemon=True).start()
    with running("forward"):
        while len(progress().operations) < 2:
            time.sleep(0.01)
        everygpu.watchdog(timeout=SOON_S)
        wait_for_ever()


def train_while_saving(folder: Path) -> None:
    def save() -> None:
        time.sleep(3 * SOON_S)
        (folder / "saved").touch()

    train("threads", "forward", then=lambda: Background().start(save))


Ends = dict[str, tuple[int, str]]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """How each of these ends: all wait at once."""
    folder = tmp_path_factory.mktemp("ends")
    works: dict[str, Callable[[], object]] = {
        "replica 0": lambda: train("threads", "forward", 0),
        "replica 1": lambda: train("threads", "forward", 1),
        "alone": train_alone,
        "loop": lambda: train("threads", "backward"),
        "step": train_by_step,
        "barrier": train_with_a_barrier,
        "both": wait_for_ranks_beside_a_forward,
        "save": lambda: train_while_saving(folder),
        "idle pool": wait_beside_an_idle_pool,
        "closed": lambda: without_stderr(folder / "a script's"),
    }
    train_by_step("")  # torch imports its rest, once for all forks
    children = {name: Child(folder / name, work) for name, work in {**works, **CALM}.items()}
    found = {name: child.end() for name, child in children.items()}
    assert (folder / "saved").exists()
    assert (folder / "a script's").read_text() == ""
    return found


def first_line(said: str) -> str:
    return said.partition("\n")[0]


WHERE = f'hanging.py", line {LINE} in wait_for_ever'
NAMED: dict[str, tuple[str, tuple[str, ...]]] = {
    "replica 0": ("forward of replica 0 on cpu in thread ", (WHERE, 'test_watchdog.py"')),  # of the main thread, too
    "replica 1": ("forward of replica 1 on cpu in thread ", (WHERE, 'test_watchdog.py"')),
    "alone": ("forward of replica 0 on cpu in thread MainThread", ()),
    "loop": ("backward in thread MainThread. ", (WHERE,)),
    "step": ("backward on cpu in thread MainThread. ", (WHERE,)),
    "barrier": ("forward of replica 1 on cpu in thread ", ()),  # and not that which waits for it
    "both": ("forward in thread MainThread; barrier over ranks in thread ", ()),
    "save": ("forward of replica 1 on cpu in thread ", ("a checkpoint is being saved, which is finished first",)),
    "idle pool": ("forward of replica 0 on cpu in thread MainThread", ()),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_stands_still_is_named(ends: Ends, name: str) -> None:
    code, said = ends[name]
    named, others = NAMED[name]
    assert code == STUCK, said
    assert f"everygpu: No progress for {SOON_S:g} s: {named}" in first_line(said)
    assert "The process ends with exit code 6." in first_line(said)
    assert all(other in said for other in others), said


def test_a_closed_stderr_hides_nothing(ends: Ends) -> None:
    assert ends["closed"][0] == STUCK


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_a_compiled_replica(tmp_path: Path) -> None:
    code, said = Child(tmp_path / "stderr", lambda: train("compile", "forward")).end()
    assert code == STUCK, said
    assert "forward of replica 1 on cpu" in first_line(said)


def wait_for_a_rank() -> None:
    group = init_group()
    group.gather(None)
    everygpu.watchdog(timeout=SOON_S)
    if group.rank == 1:
        ctypes.CDLL(None).sleep(600)  # as in a call in C++ that never ends
    group.gather(None)


@pytest.mark.usefixtures("warm_python")
def test_a_rank_that_waits_for_another(tmp_path: Path) -> None:
    with running_ranks(wait_for_a_rank, size=2, folder=tmp_path) as ranks:
        said = ranks.processes[0].communicate(timeout=60)[1].decode()
        code = ranks.processes[0].returncode
    assert code == STUCK, said
    place = f"rank 0 (host {os.uname().nodename}, process {ranks.processes[0].pid})"
    assert f"everygpu: {place}: No progress for {SOON_S:g} s: gather over ranks in thread MainThread. " in said


HANGS_ONCE = """
import os, everygpu
from tests.faults.hanging import Net, make_batch
net = Net()
net.place = "" if os.path.exists("again") else "forward"
open("again", "w").close()
everygpu.DataParallel(net, ["cpu"] * 2)(make_batch())
print("done")
"""


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("restarts", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_everygpu_run_ends_it_and_torchrun_starts_it_again(tmp_path: Path, restarts: int) -> None:
    (tmp_path / "train.py").write_text(HANGS_ONCE)
    again = ["--processes", 1, "--max-restarts", restarts] if restarts else []
    asked = command_of("run", "--cpu", "--watchdog", SOON_S, *again, "train.py")
    asked["env"]["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[2])
    asked["env"][REASON_FILE] = "reason"
    done = subprocess.run(**asked, cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == ((0, "done\n") if restarts else (STUCK, "")), done.stderr
    for said in (done.stderr, (tmp_path / "reason").read_text()):
        assert "forward of replica 1 on cpu" in said


def step_for(seconds: float) -> None:
    """Train for a while on two replicas."""
    net, x = Net(), make_batch()
    model = everygpu.DataParallel(net, ["cpu"] * 2, engine="threads")
    limit = time.monotonic() + seconds
    model(x).sum().backward()
    while time.monotonic() < limit:
        model(x).sum().backward()
        time.sleep(0.01)


def train_slowly(wait: Callable[[], object]) -> None:
    """Run a forward that waits, without computing."""

    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wait()
            return x

    everygpu.DataParallel(Slow(), ["cpu"])(torch.ones(2))


def slow_code() -> None:
    everygpu.watchdog(timeout=CALM_S)
    time.sleep(LONG_S)


def stopped() -> None:
    def wait() -> None:
        pid, (reading, writing) = os.getpid(), os.pipe()
        if not os.fork():
            os.write(writing, b"!")
            time.sleep(0.05)
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
                time.sleep(0.01)  # until it sleeps
            os.kill(pid, signal.SIGSTOP)
            time.sleep(1.5 * CALM_S)
            os.kill(pid, signal.SIGCONT)
            os.write(writing, b"!")
            os._exit(0)
        os.read(reading, 1)  # a fork may take its time
        os.read(reading, 1)

    everygpu.watchdog(timeout=CALM_S)
    train_slowly(wait)


def in_many_threads() -> None:
    everygpu.watchdog(timeout=CALM_S)
    threads = [threading.Thread(target=step_for, args=(LONG_S,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def over() -> None:
    with everygpu.watchdog(timeout=CALM_S):
        pass
    assert not any(thread.name.startswith("everygpu-watch") for thread in threading.enumerate())
    train_slowly(lambda: time.sleep(LONG_S))


def nested() -> None:
    everygpu.watchdog(timeout=CALM_S)
    with everygpu.watchdog(timeout=60):
        train_slowly(lambda: time.sleep(LONG_S))


def forked() -> None:
    hook = sys.excepthook
    everygpu.watchdog(timeout=CALM_S)

    def work() -> None:
        train_slowly(lambda: time.sleep(LONG_S))
        assert not progress().is_watched
        assert sys.excepthook is hook
        with everygpu.watchdog():
            assert "everygpu-watch" in [thread.name for thread in threading.enumerate()]

    assert os.waitpid(fork(work), 0)[1] == 0


def waits_for_a_pool(pool: Any, get: str) -> None:
    def work() -> None:
        for _ in range(int(100 * LONG_S)):
            time.sleep(0.01)

    everygpu.watchdog(timeout=CALM_S)
    with pool:
        train_slowly(lambda: getattr((pool.submit if get == "result" else pool.apply_async)(work), get)())


def for_a_pool_of_threads() -> None:
    waits_for_a_pool(ThreadPoolExecutor(1), "result")


def for_multiprocessings_pool() -> None:
    waits_for_a_pool(ThreadPool(1), "get")


def wait_beside_an_idle_pool() -> None:
    pool = ThreadPoolExecutor(2)
    pool.submit(int).result()
    train_alone()


def without_stderr(file: Path) -> None:
    """Stand still where standard error is closed, and its number a file's."""
    sys.__stderr__ = None
    with file.open("w") as script:
        os.dup2(script.fileno(), 2)
    train_alone()


CALM: dict[str, Callable[[], object]] = {
    work.__name__: work
    for work in (
        slow_code,
        stopped,
        in_many_threads,
        over,
        nested,
        forked,
        for_a_pool_of_threads,
        for_multiprocessings_pool,
    )
}


@pytest.mark.parametrize("name", CALM)
def test_no_false_alarm(ends: Ends, name: str) -> None:
    assert ends[name] == (0, "")


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, "600", None])
def test_timeouts_are_numbers(timeout: object) -> None:
    with pytest.raises(OptionError, match="is not a number of seconds above 0"):
        everygpu.watchdog(timeout=timeout)  # type: ignore[arg-type]
    assert not progress().is_watched


def test_watches_end_in_any_order() -> None:
    hook = sys.excepthook
    first, second = everygpu.watchdog(), everygpu.watchdog(timeout=5)
    assert repr(second) == "Watch(timeout=5)"
    first.close()
    assert progress().is_watched
    second.close()
    second.close()
    assert not progress().is_watched
    assert sys.excepthook is hook


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_while_frames_of_threads_are_read(collects: bool) -> None:
    amid: list[str] = []
    is_there, is_over = threading.Event(), threading.Event()

    def wait(depth: int) -> None:
        if depth:
            wait(depth - 1)
        else:
            is_there.set()
            is_over.wait()

    def note(phase: str, info: dict[str, int]) -> None:
        frames = [frame for frame, _ in traceback.walk_stack(sys._getframe())]
        amid.extend(f.f_code.co_name for f in frames if f.f_globals.get("__name__") == "everygpu._watchdog")

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    try:
        gc.set_threshold(1)
        if not collects:
            gc.disable()
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(wait, 50)
            is_there.wait()
            Threads()
            is_over.set()
            done.result()
        assert gc.isenabled() is collects
    finally:
        gc.callbacks.remove(note)
        gc.enable()
        gc.set_threshold(*thresholds)
    assert not amid


HUNG_GPU = """
import sys, torch, everygpu
device = torch.device("cuda", int(sys.argv[1]))
everygpu.watchdog(timeout=3)
x = torch.ones(8, device=device)
with torch.cuda.device(device):
    torch.cuda._sleep(1 << 40)
print(x.sum().item())
"""


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.cards(2))])
def test_a_kernel_that_hangs(tmp_path: Path, index: int) -> None:
    (tmp_path / "train.py").write_text(HUNG_GPU)
    asked = [sys.executable, "train.py", str(index)]
    path = str(Path(__file__).parents[2] / "src")
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(asked, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == STUCK, done.stderr
    assert f"No progress for 3 s: the queue of cuda:{index}" in first_line(done.stderr)
    assert 'train.py", line 8 in <module>' in done.stderr
