"""``everygpu run --restarts``: which ends a run is started again after, and what it is told."""

import os
import signal
import subprocess
from types import SimpleNamespace

import pytest

from everygpu.cli.restarts import Command, reason_of, run_again
from everygpu.devices import nvml
from tests.cli.runs import command_of

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs POSIX signals")


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """The indices of the GPUs that answer, before and after each try; the last ones go on to."""
    answers = [[]]

    def sample_devices():
        indices = answers.pop(0) if len(answers) > 1 else answers[0]
        return [SimpleNamespace(uuid=f"GPU-{index}", index=index) for index in indices]

    monkeypatch.setattr(nvml, "sample_devices", sample_devices)
    return answers


class Shell:
    """Runs these lines of a shell one after the other, each in place of one try."""

    def __init__(self, *lines):
        self.lines, self.commands, self.said = list(lines), [], []

    def start(self, arguments):
        self.commands.append(arguments)
        return subprocess.Popen(["sh", "-c", self.lines.pop(0)])

    def run(self, num_restarts, **asked):
        command = Command(options=["--cpu"], script=["train.py", "-x"], start=self.start, **asked)
        return run_again(command, num_restarts, self.said.append)


def test_again_after_5_6_and_a_kill():
    shell = Shell("exit 5", "exit 6", "kill -KILL $$", "exit 0")
    assert shell.run(3) == 0
    assert [line.partition(":")[0] for line in shell.said] == [
        "exit code 5, its numbers are not finite, or its replicas differ",
        "exit code 6, the watchdog ended it",
        "killed by SIGKILL",
    ]
    assert shell.said[2].endswith("restart 3 of 3.")
    assert all(command[-6:] == ["run", "--cpu", "--restarts", "0", "train.py", "-x"] for command in shell.commands)


def test_not_more_often():
    shell = Shell("exit 5", "kill -KILL $$")
    assert shell.run(1) == 137
    assert shell.said[1] == "killed by SIGKILL: not started again, 1 restart(s) are used up."


@pytest.mark.parametrize(
    ("line", "code"),
    [("exit 0", 0), ("exit 1", 1), ("exit 130", 130), ("exit 143", 143), ("kill -TERM $$", 143), ("exit 141", 141)],
)
def test_other_ends_are_the_end(line, code):
    shell = Shell(line)
    assert shell.run(3) == code
    assert shell.said == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_passed_on_and_ends_the_run(number):
    name = number.name.removeprefix("SIG")
    shell = Shell(f"trap 'exit 5' {name}; kill -{name} $PPID; while :; do sleep 0.01; done")
    before = signal.getsignal(number)
    assert shell.run(3) == 5
    assert shell.said == []
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(
    ("asked", "more"),
    [({}, []), ({"count": 3}, ["--min-count", "1"]), ({"indices": (2, 1, 0)}, ["--gpus", "2,0,"])],
)
def test_without_a_lost_gpu(gpus, asked, more):
    gpus[:] = [[0, 1, 2], [0, 2]]
    shell = Shell("exit 1", "exit 0")
    assert shell.run(3, **asked) == 0
    assert shell.said == ["exit code 1, GPU 1 is lost: started again from its newest checkpoint, restart 1 of 3."]
    assert shell.commands[1][-len(more) - 4 :] == ["--restarts", "0", *more, "train.py", "-x"]


def test_not_without_any_gpu(gpus):
    gpus[:] = [[0], []]
    shell = Shell("exit 1")
    assert shell.run(3) == 1


def test_a_crash_is_a_reason():
    assert reason_of(128 + signal.SIGSEGV, {}) == "killed by SIGSEGV"


@pytest.mark.usefixtures("warm_python")
def test_the_command(tmp_path):
    lines = ["import os, sys", "again = os.path.exists('again')", "open('again', 'w').close()"]
    (tmp_path / "train.py").write_text("\n".join([*lines, "print(sys.argv)", "sys.exit(0 if again else 5)"]))
    arguments = ("run", "--cpu", "--restarts", "2", "--", "train.py", "--restarts", "7")
    done = subprocess.run(**command_of(*arguments), cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, "['train.py', '--restarts', '7']\n" * 2)
    assert done.stderr.count("exit code 5, its numbers are not finite, or its replicas differ: started again") == 1
    refused = ("run", "--restarts", "2", "--processes", "1", "--nnodes", "2", "--rdzv-endpoint", "a:1", "train.py")
    done = subprocess.run(**command_of(*refused), cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 2
    assert "--max-restarts" in done.stderr
