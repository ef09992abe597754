"""Random command lines and values of variables: each ends with an exit code, never with a traceback of ours."""

import random
import sys

import pytest
from click.testing import CliRunner

from everygpu import exit_codes
from everygpu.cli import main
from tests.devices.fake_nvml import FakeNvml, two_h200s

VALUES = (
    "", " ", "0", "1", "2", "-1", "0,1", "1,0", "0,", "auto", "nan", "inf", "-inf", "1e400", "1.5", "0x10", "1_000",
    "²", "\uff11", "9" * 5000, "9" * 5000 + "GiB", "1GiB", "8gb", "NaNGiB", "0.0000001B", "GPU-", "GPU-a5013c05",
    "MIG-1", "é", "\udcff", "\x1b[31m", "[red]", "--", "-", ":", "a:b:c", "nowhere.py:f", "/dev/full",
)  # fmt: skip
FILTERS = ("--min-free", "--max-utilization", "--name", "--exclude")
METHODS = {
    "devices": ("--select", "--format", "--json", *FILTERS),
    "run": ("--gpus", "--timeout", "--share", "--split", "--watchdog", "--processes", "--cpu", "--nnodes", *FILTERS),
    "plan": ("--gpus", "--memory", "--precision"),
    "bench": ("--rows", "--rounds", "--timeout", "--gpus", "--model"),
}
FLAGS = ("--json", "--share", "--cpu")
CODES = {0, 1, 2, 3, 4, exit_codes.BAD_NUMBERS, exit_codes.STUCK, exit_codes.INTERRUPTED, exit_codes.STOPPED}


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Run a command on a machine with two GPUs and programs of odd names on one; scripts aren't run."""
    library = FakeNvml(*two_h200s(processes=[(7, 3), (8, None)]), process_names={7: b"\xff\x1b[31m", 8: b""})
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("everygpu.cli.run.run_script", lambda *_: 0)
    monkeypatch.setattr("everygpu.cli.run.launch", lambda _: (0, None))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "script.py").touch()
    ends = {"run": [str(tmp_path / "script.py")], "bench": ["--way", "none"], "plan": ["nowhere.py:f"]}

    def run(seed):
        rng = random.Random(seed)
        verb = rng.choice(list(METHODS))
        arguments = [verb]
        for option in rng.choices(METHODS[verb], k=rng.randint(0, 4)):
            arguments += [option] if option in FLAGS else [option, rng.choice(VALUES)]
        names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "EVERYGPU_RESERVED")
        for name in (*names, "EVERYGPU_SPLIT", "EVERYGPU_WATCHDOG"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)  # put back after the command has set it
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", rng.choice(VALUES)) if rng.random() < 0.3 else None
        done = CliRunner().invoke(main, arguments + ends.get(verb, []))
        assert done.exception is None or isinstance(done.exception, SystemExit), (arguments, done.exception)
        assert done.exit_code in CODES, arguments
        return done.exit_code

    return run


def test_some_command_lines(call):
    assert {call(seed) for seed in range(150)} == {0, 2, 3}


@pytest.mark.slow
def test_many_command_lines(call):
    assert {call(seed) for seed in range(150, 4_000)} == {0, 2, 3}
