"""b13: a replica, a helper process, a backward or a rank that stands still is named, and the run ends with code 6."""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import everygpu
from everygpu import CheckpointManager
from everygpu.checkpoint.background import Background
from everygpu.errors import OptionError
from everygpu.exit_codes import STUCK
from everygpu.progress import progress
from everygpu.watchdog.end import write_stacks
from everygpu.watchdog.stuck import Judge
from tests.cli.runs import command_of
from tests.faults.hanging import Net, make_batch, wait_for_ever
from tests.faults.inject import fork
from tests.ranks.harness import running
from tests.ranks.test_failures import be_stuck, end_of, join_soon

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
SOON_S = 0.3
LINE = wait_for_ever.__code__.co_firstlineno + 3


def run(folder: Path, work: Callable[[], object]) -> tuple[int, str]:
    """Do work in a process of its own; return its exit code, and what it has written to standard error."""
    path = folder / "stderr"

    def with_stderr() -> None:
        with path.open("w") as file:
            os.dup2(file.fileno(), 2)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - to the end of the process
        try:
            work()
        except BaseException:
            traceback.print_exc()
            raise

    code = os.waitstatus_to_exitcode(os.waitpid(fork(with_stderr), 0)[1])
    return code, path.read_text()


def train(engine: str, place: str, replica: int = 1, then: Callable[[], object] = int) -> None:
    """Train a step, and one in which a replica waits for ever."""
    net, x = Net(), make_batch()
    model = everygpu.DataParallel(net, ["cpu"] * 2, engine=engine)
    model(x).sum().backward()
    assert model.engine_in_use == engine
    net.place, net.replica = place, replica
    then()
    everygpu.watch(timeout=SOON_S)
    model(x).sum().backward()


def first_line(said: str) -> str:
    return said.partition("\n")[0]


@pytest.mark.parametrize("replica", [0, 1])
def test_b13_a_replica_in_a_thread(tmp_path: Path, replica: int) -> None:
    code, said = run(tmp_path, lambda: train("threads", "forward", replica))
    assert code == STUCK, said
    assert "a run must go on within 0.3 s, but this stands still: " in first_line(said)
    assert f"forward of replica {replica} on cpu, in thread " in first_line(said)
    assert f"hanging.py, line {LINE}, in wait_for_ever" in first_line(said)
    assert "the process ends with exit code 6" in first_line(said).lower()
    assert "so does" not in said, "a replica that waits for another one is none that is stuck"
    assert f'hanging.py", line {LINE} in wait_for_ever' in said
    assert 'test_b13_watchdog.py"' in said  # of the main thread


def test_b13_the_only_replica(tmp_path: Path) -> None:
    def work() -> None:
        everygpu.watch(timeout=SOON_S)
        net = Net()
        net.place = "forward"
        everygpu.DataParallel(net, ["cpu"])(make_batch()[2:])

    code, said = run(tmp_path, work)
    assert code == STUCK, said
    assert "forward of replica 0 on cpu, in thread MainThread" in first_line(said)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_b13_a_compiled_replica(tmp_path: Path) -> None:
    code, said = run(tmp_path, lambda: train("compile", "forward"))
    assert code == STUCK, said
    assert "forward of replica 1 on cpu" in first_line(said)


def stop_helpers() -> None:
    for pid in progress().helpers:
        os.kill(pid, signal.SIGSTOP)


@pytest.mark.usefixtures("warm_python")
def test_b13_a_helper_process_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The judge and what is written, without the process's end; that is among the slow ones."""
    net, x = Net(), make_batch()
    model = everygpu.DataParallel(net, ["cpu"] * 2, engine="processes")
    model(x).sum().backward()
    ((pid, helper),) = progress().helpers.items()
    assert helper.name == "the helper of replica 1 on cpu"
    with everygpu.watch(timeout=600):
        for place in ("forward", "backward", "stopped"):
            net.place, net.release = place, str(tmp_path / place)
            if place == "stopped":
                os.kill(pid, signal.SIGSTOP)
            thread = threading.Thread(target=lambda: model(x).sum().backward())
            thread.start()
            judge = Judge(progress())
            named = f"{'forward' if place == 'stopped' else place} of replica 1 on cpu, in its helper process {pid}"
            while not [p for p in judge.look(0) if named in str(p)]:
                time.sleep(0.02)
            judge.look(1)
            time.sleep(0.05)
            assert [(p.since_s, named in str(p)) for p in judge.look(9)] == [(0, True)]
            write_stacks()
            own = capfd.readouterr().err.partition(f"everygpu: process {pid}, the helper of replica 1 on cpu:\n")[2]
            assert own.startswith("it is stopped") if place == "stopped" else f"line {LINE} in wait_for_ever" in own
            Path(net.release).touch()
            os.kill(pid, signal.SIGCONT)
            thread.join()
    model.release()
    assert not progress().helpers


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "backward", "stopped"])
def test_b13_a_helper_process(tmp_path: Path, place: str) -> None:
    pids: Path = tmp_path / "pids"

    def note() -> None:
        pids.write_text(" ".join(map(str, progress().helpers)))
        if place == "stopped":
            stop_helpers()

    code, said = run(tmp_path, lambda: train("processes", place, then=note))
    assert code == STUCK, said
    (pid,) = map(int, pids.read_text().split())
    where = "forward" if place == "stopped" else place
    assert f"{where} of replica 1 on cpu, in its helper process {pid}" in first_line(said)
    own = said.partition(f"everygpu: process {pid}, the helper of replica 1 on cpu:\n")[2]
    if place == "stopped":
        assert own.startswith("it is stopped")
    else:
        assert f'hanging.py", line {LINE} in wait_for_ever' in own
    limit = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < limit, "the helper lives on"
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["loop", "step"])
def test_b13_a_backward(tmp_path: Path, how: str) -> None:
    def work() -> None:
        if how == "loop":
            train("threads", "backward")
        net = Net()
        net.place = "backward"
        step = everygpu.TrainStep(
            everygpu.DataParallel(net, ["cpu"] * 2), lambda y: y.sum(), torch.optim.SGD(net.parameters(), 0.1)
        )
        everygpu.watch(timeout=SOON_S)
        step(make_batch())

    code, said = run(tmp_path, work)
    assert code == STUCK, said
    assert f"stands still: backward{'' if how == 'loop' else ' on cpu'}, in thread MainThread" in first_line(said)
    assert f"hanging.py, line {LINE}, in wait_for_ever" in first_line(said)


def test_b13_a_save_is_finished_first(tmp_path: Path) -> None:
    def save(check: object) -> None:
        time.sleep(2 * SOON_S + 0.3)
        (tmp_path / "saved").touch()

    code, said = run(tmp_path, lambda: train("threads", "forward", then=lambda: Background().start(save)))
    assert code == STUCK, said
    assert (tmp_path / "saved").exists()
    assert "a checkpoint is being saved, which is finished first" in said


def wait_for_a_rank() -> None:
    group = join_soon()
    everygpu.watch(timeout=SOON_S)
    if group.rank == 1:
        be_stuck()
    group.barrier()


@pytest.mark.usefixtures("warm_python")
def test_b13_a_rank_that_waits_for_another(tmp_path: Path) -> None:
    with running(wait_for_a_rank, size=2, folder=tmp_path) as ranks:
        (code, said), (other, _) = [end_of(process) for process in ranks.processes]
    assert code == STUCK, said
    assert other == 1
    place = f"rank 0 (host {os.uname().nodename}, process {ranks.processes[0].pid})"
    assert f"everygpu: {place}: a run must go on within 0.3 s" in said
    assert "barrier over ranks, in thread MainThread" in said
    (line,) = [line for line in said.splitlines() if "a collective that is not done: " in line]
    assert "gloo:barrier, number " in line


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(("option", "timeout"), [([], "600.0"), (["--watchdog", "0"], "None")])
def test_b13_everygpu_run_watches(tmp_path: Path, option: list[str], timeout: str) -> None:
    lines = ["from everygpu.watchdog.watch import _watchdog", "found = _watchdog().watches"]
    (tmp_path / "train.py").write_text("\n".join([*lines, "print(found[0].timeout_s if found else None)"]))
    asked = command_of("run", "--cpu", *option, "train.py")
    done = subprocess.run(**asked, cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{timeout}\n", "")


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
def test_b13_everygpu_run_ends_it_and_starts_it_again(tmp_path: Path, restarts: int) -> None:
    (tmp_path / "train.py").write_text(HANGS_ONCE)
    asked = command_of("run", "--cpu", "--watchdog", SOON_S, "--restarts", restarts, "train.py")
    asked["env"]["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[2])
    done = subprocess.run(**asked, cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == ((0, "done\n") if restarts else (STUCK, "")), done.stderr
    assert "forward of replica 1 on cpu" in done.stderr
    again = "exit code 6, the watchdog ended it: started again from its newest checkpoint"
    assert (again in done.stderr) is (restarts > 0)


def step_for(seconds: float) -> None:
    """Train for a while on two replicas, and save now and then."""
    net, x = Net(), make_batch()
    model = everygpu.DataParallel(net, ["cpu"] * 2, engine="threads")
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        model(x).sum().backward()


@pytest.mark.parametrize("what", ["slow code", "stopped", "debugger", "threads", "over", "nested"])
def test_b13_no_false_alarm(tmp_path: Path, what: str) -> None:
    def work() -> None:
        if what == "over":
            with everygpu.watch(timeout=0.1):
                pass
            train_slowly(0.4)
        watch = everygpu.watch(timeout=SOON_S)
        if what == "slow code":
            time.sleep(2 * SOON_S)
        if what == "stopped":
            pid = os.getpid()
            if not os.fork():
                time.sleep(0.1)
                os.kill(pid, signal.SIGSTOP)
                time.sleep(2 * SOON_S)
                os.kill(pid, signal.SIGCONT)
                os._exit(0)
            train_slowly(0.2)
        if what == "debugger":
            exec(compile("def cmdloop(wait): wait()", "pdb.py", "exec"), debugger := {"__name__": "pdb"})
            train_slowly(0, lambda: debugger["cmdloop"](lambda: time.sleep(2 * SOON_S)))
        if what == "threads":
            threads = [threading.Thread(target=step_for, args=(2 * SOON_S,)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if what == "nested":
            with everygpu.watch(timeout=60):
                train_slowly(2 * SOON_S)
        watch.close()
        assert not any(thread.name.startswith("everygpu-watch") for thread in threading.enumerate())

    code, said = run(tmp_path, work)
    assert (code, said) == (0, "")


def train_slowly(seconds: float, wait: Callable[[], object] | None = None) -> None:
    """Run a forward that takes a while, without computing."""

    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(seconds) if wait is None else wait()
            return x

    everygpu.DataParallel(Slow(), ["cpu"])(torch.ones(2))


def test_b13_forked_processes_are_not_watched(tmp_path: Path) -> None:
    def work() -> None:
        everygpu.watch(timeout=SOON_S)
        child = fork(lambda: (train_slowly(2 * SOON_S), os._exit(7 if progress().is_watched else 0)))
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    assert run(tmp_path, work) == (0, "")


def test_b13_a_manager_in_use_and_an_end_in_peace(tmp_path: Path) -> None:
    def work() -> None:
        everygpu.watch(timeout=SOON_S)
        with CheckpointManager(tmp_path / "run", every=1, asynchronous=True) as checkpoints:
            for step in range(3):
                step_for(0.05)
                checkpoints.save(step + 1, model=Net())

    assert run(tmp_path, work) == (0, "")


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, "600", None])
def test_b13_timeouts_are_numbers(timeout: object) -> None:
    with pytest.raises(OptionError, match="watch: timeout must be more than 0 seconds"):
        everygpu.watch(timeout=timeout)  # type: ignore[arg-type]
    assert not progress().is_watched


def test_b13_watches_end_in_any_order() -> None:
    hook = sys.excepthook
    first, second = everygpu.watch(), everygpu.watch(timeout=5)
    assert repr(second) == "Watch(timeout=5)"
    first.close()
    assert progress().is_watched
    second.close()
    second.close()
    assert not progress().is_watched
    assert sys.excepthook is hook


HUNG_GPU = """
import sys, torch, everygpu
device = torch.device("cuda", int(sys.argv[1]))
everygpu.watch(timeout=3)
x = torch.ones(8, device=device)
with torch.cuda.device(device):
    torch.cuda._sleep(1 << 40)
print(x.sum().item())
"""


@pytest.mark.gpu
@pytest.mark.parametrize("index", [0, 1])
def test_b13_a_kernel_that_hangs(tmp_path: Path, index: int) -> None:
    if torch.cuda.device_count() <= index:
        pytest.skip(f"needs {index + 1} CUDA devices")
    (tmp_path / "train.py").write_text(HUNG_GPU)
    asked = [sys.executable, "train.py", str(index)]
    path = str(Path(__file__).parents[2] / "src")
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(asked, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == STUCK, done.stderr
    assert f"this stands still: cuda:{index}: its queue" in first_line(done.stderr)
    assert 'train.py", line 8 in <module>' in done.stderr
