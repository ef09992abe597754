"""Several runs at once: each takes GPUs of its own, waits for them, or is told who has them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from everygpu.cli import choose as planning
from everygpu.cli import main
from everygpu.cli.choose import plan_run
from everygpu.cli.script import torchrun_arguments
from everygpu.devices import nvml
from everygpu.devices.reserve import OWN
from everygpu.devices.select import Demand
from tests.cli.runs import command_of, everygpu, install_driver
from tests.devices.fake_nvml import GIB, H200_UUIDS, make_sample
from tests.devices.real_gpus import FILL, find_gpus, using

A, B = H200_UUIDS
SAY = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); "


@pytest.fixture
def box(tmp_path):
    """Two idle H200s, and scripts that say which they got."""
    install_driver(tmp_path, "*two_h200s()")
    (tmp_path / "say.py").write_text(SAY)
    (tmp_path / "stay.py").write_text(f"{SAY} import sys; sys.stdin.read()")
    return tmp_path


@contextlib.contextmanager
def staying(box, *options):
    """Start a run that stays; gives the process and what it said."""
    command = command_of("run", *options, box / "stay.py", fake_gpus=box)
    with subprocess.Popen(**command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def say(box, *options):
    return everygpu("run", *options, box / "say.py", fake_gpus=box)


def test_two_started_together_take_different_ones(box):
    commands = [command_of("run", "--gpus", "1", box / "stay.py", fake_gpus=box) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        runs = [stack.enter_context(subprocess.Popen(**command, **pipes)) for command in commands]
        assert {run.stdout.readline().strip() for run in runs} == {A, B}
        third = say(box, "--gpus", "1")
        assert third.returncode == 3
        for run in runs:
            assert f"reserved by process {run.pid} (stay.py)" in third.stderr
            run.stdin.close()


def test_filled_gpu_is_passed_over(box):
    install_driver(box, "Gpu(used=139 * GIB, processes=[(4711, 139 * GIB)]), *two_h200s()[1:]")
    assert say(box, "--gpus", "1").stdout == f"{B}\n"
    assert say(box, "--min-free", "1GiB").stdout == f"{B}\n"


def test_auto_takes_what_others_left_and_does_not_fall_to_the_cpu(box):
    with staying(box, "--gpus", "1") as (process, theirs):
        assert theirs == A
        assert say(box).stdout == f"{B}\n"
        with staying(box):
            refused = say(box)
            assert (refused.returncode, refused.stdout) == (3, "")
            assert f"process {process.pid}" in refused.stderr
            assert "--wait" in refused.stderr
            assert say(box, "--share").stdout == f"{A},{B}\n"


def test_reservation_ends_with_the_run_however_it_ends(box):
    with staying(box, "--gpus", "2") as (process, _):
        assert say(box, "--gpus", "1").returncode == 3
        process.kill()
        process.wait()
        assert say(box, "--gpus", "2").stdout == f"{A},{B}\n"


def test_wait_starts_when_the_gpu_is_free(box):
    with staying(box, "--gpus", "2") as (first, _):
        command = command_of("run", "--gpus", "1", "--wait", box / "say.py", fake_gpus=box)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(**command, **pipes) as second:
            assert "waiting for GPUs" in second.stderr.readline()
            first.kill()
            out, error = second.stdout.read(), second.stderr.read()
    assert (out, second.returncode) == (f"{A}\n", 0)
    assert error.count("reserved by process") == 2


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_waiting_is_left_by_an_interrupt(box):
    with staying(box, "--gpus", "2"):
        command = command_of("run", "--wait", box / "say.py", fake_gpus=box)
        with subprocess.Popen(**command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as second:
            second.stderr.readline()
            second.send_signal(signal.SIGINT)
            assert second.stdout.read() == ""
            assert "Traceback" not in second.stderr.read()
    assert second.returncode == 130


def test_waiting_for_what_cannot_be_is_refused_at_once(box):
    done = say(box, "--gpus", "1", "--min-free", "1TiB", "--wait")
    assert done.returncode == 3
    assert "waiting" not in done.stderr
    assert "--wait" not in done.stderr


def test_run_inside_a_run_has_its_gpus(box):
    (box / "outer.py").write_text(
        "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-m', 'everygpu', 'run', sys.argv[1]]))"
    )
    done = everygpu("run", "--gpus", "1", box / "outer.py", box / "say.py", fake_gpus=box)
    assert (done.returncode, done.stdout) == (0, f"{A}\n")


def test_devices_shows_and_avoids_what_is_reserved(box):
    with staying(box, "--gpus", "1") as (process, _):
        chosen = everygpu("devices", "--select", "1", "--format", "visible", fake_gpus=box)
        assert chosen.stdout == f"{B}\n"
        records = json.loads(everygpu("devices", "--json", fake_gpus=box).stdout)["devices"]
    assert [record["reserved_by"] for record in records] == [{"pid": process.pid, "command": "stay.py"}, None]


# ---- on real GPUs -------------------------------------------------------------------------------------

SAY_TWICE = """
import os, sys, torch
print(os.environ["CUDA_VISIBLE_DEVICES"], *(f"GPU-{torch.cuda.get_device_properties(i).uuid}"
      for i in range(torch.cuda.device_count())), flush=True)
"""


@pytest.fixture
def real_box(tmp_path):
    """Scripts that say which real GPUs they were given, and which torch sees; reservations of their own."""
    (tmp_path / "say.py").write_text(SAY_TWICE)
    (tmp_path / "stay.py").write_text(f"{SAY_TWICE}\nsys.stdin.read()")
    return tmp_path


def run_real(real_box, *options):
    """Run a script; returns the UUIDs it was given."""
    done = everygpu("run", *options, real_box / "say.py", XDG_RUNTIME_DIR=str(real_box))
    assert done.returncode == 0, done.stderr
    return said(done.stdout)


def said(line):
    given, *seen = line.split()
    assert given.split(",") == seen  # torch sees what was given
    return seen


@pytest.mark.gpu
@pytest.mark.alone
def test_real_gpu_that_another_process_has_filled_is_passed_over(real_box):
    samples = find_gpus(2)
    (favourite,) = run_real(real_box, "--gpus", "1")
    with using(favourite, FILL):
        (taken,) = run_real(real_box, "--gpus", "1")
        assert taken != favourite
        fitting = run_real(real_box, "--min-free", "2GiB")
    assert favourite not in fitting
    assert set(fitting) <= {sample.uuid for sample in samples}


@pytest.mark.gpu
@pytest.mark.alone
def test_real_runs_started_together_take_different_gpus(real_box):
    samples = find_gpus(2)
    command = command_of("run", "--gpus", "1", real_box / "stay.py", XDG_RUNTIME_DIR=str(real_box))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(subprocess.Popen(**command, **pipes)) for _ in samples]
        taken = [uuid for run in runs for uuid in said(run.stdout.readline())]
        assert sorted(taken) == sorted(sample.uuid for sample in samples)
        refused = everygpu("run", "--gpus", "1", real_box / "say.py", XDG_RUNTIME_DIR=str(real_box))
        assert refused.returncode == 3
        assert all(f"reserved by process {run.pid} (stay.py)" in refused.stderr for run in runs)
        for run in runs:
            run.stdin.close()


# ---- without processes --------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Let waiting take no time, and count it."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(planning, "time", type("Clock", (), {"sleep": sleep, "monotonic": lambda: now[0]}))
    return now


def test_waiting_asks_the_driver_again(clock, monkeypatch):
    def sample():
        return [make_sample(0, free=(90 if clock[0] > 5 else 1) * GIB)]

    monkeypatch.setattr(nvml, "sample_devices", sample)
    told = []
    demand = Demand(count=1, min_free_memory="50GiB")
    plan = plan_run(demand, {}, wait_s=100, report=told.append)
    assert plan.environ["CUDA_VISIBLE_DEVICES"] == plan.environ[OWN] == make_sample(0).uuid
    assert clock[0] == 6.0
    assert len(told) == 1
    assert "free memory 1.0 GiB, below 50.0 GiB" in told[0]
    plan.locks[0].release()


# ---- several processes --------------------------------------------------------------------------------

PASSED_ON = ["--local-ranks-filter", "0", "--max-restarts", "2"]


def test_torchrun_starts_a_process_for_each_chosen_gpu(box, monkeypatch):
    given = []

    def note(arguments):
        given.extend([arguments, *(os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "EVERYGPU_SPLIT"))])
        return 7, "process 1 ended with exit code 7."

    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", OWN, "EVERYGPU_SPLIT", "EVERYGPU_WATCHDOG"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(box))
    monkeypatch.setattr(nvml, "sample_devices", lambda: [make_sample(0), make_sample(1)])
    monkeypatch.setattr("everygpu.cli.run.launch", note)
    script = str(box / "say.py")
    done = CliRunner().invoke(main, ["run", "--processes", "auto", "--split", "weighted", *PASSED_ON, script, "-x"])
    assert (done.exit_code, done.stderr) == (7, "everygpu run: process 1 ended with exit code 7.\n")
    uuids = ",".join(make_sample(i).uuid for i in range(2))
    assert given == [torchrun_arguments(2, dict(zip(PASSED_ON[::2], PASSED_ON[1::2])), script, ["-x"]), uuids, "auto"]


@pytest.mark.parametrize(
    "args", [["--n", "1"], ["--", "--n", "1"], ["--help"], ["a", "--", "b"], ["--master", "x", "--no-python"], []]
)
def test_options_of_the_script_are_none_of_torchruns(args):
    from torch.distributed.run import parse_args

    for is_module in (False, True):
        read = parse_args(torchrun_arguments(2, {"--max-restarts": "2"}, "ok.py", args, is_module))
        assert read.training_script_args == ["--rank", *(["-m"] if is_module else []), "ok.py", *args]
        assert (read.module, read.training_script, read.nproc_per_node) == (True, "everygpu", "2")
        assert (read.standalone, read.max_restarts, read.no_python) == (True, 2, False)


FAIL = """
import os, sys, time
from everygpu.errors import NonFiniteError
assert os.environ["EVERYGPU_SPLIT"] == "even" and __name__ == "__main__"
if os.environ["RANK"] == "1":
    {}
time.sleep(200)
"""


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    ("ending", "code"), [("sys.exit(int(sys.argv[2]))", 7), ("raise NonFiniteError('nan')", 5)], ids=["own", "nan"]
)
def test_exit_code_of_the_process_that_failed_is_passed_on(box, ending, code):
    (box / "fail.py").write_text(FAIL.format(ending))
    begin = time.monotonic()
    done = everygpu("run", "--cpu", "--processes", "2", "--split", "even", box / "fail.py", "-x", "7", fake_gpus=box)
    assert done.returncode == code, done.stderr
    assert f"process 1 ended with exit code {code}" in done.stderr
    assert time.monotonic() - begin < 120
