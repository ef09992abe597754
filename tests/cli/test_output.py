"""Where the output can't be written: one line and an exit code for every verb, and never a traceback."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import everygpu
from everygpu.cli import main
from everygpu.cli.output import without_caller
from tests.faults.inject import fork

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork") or not Path("/dev/full").exists(), reason="needs fork and /dev/full"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
VERBS = [
    "--help",
    "--version",
    "bench --cpu --peer single",
    "checkpoint convert a.pt b.pt",
    "checkpoint show a.pt",
    "checkpoint verify ours",
    "devices",
    "doctor --quick",
]
TRAIN = "import torch\nfor x in torch.utils.data.DataLoader(torch.arange(9)): pass"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    torch.save(model.state_dict(), "a.pt")
    everygpu.save("ours", model=model)
    Path("train.py").write_text(TRAIN)
    return tmp_path


def run_with(open_output, arguments):
    """Run a command whose output is another file; return its exit code and what it says on stderr."""

    def work():
        error = os.open("stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(error, 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        os.dup2(open_output(), 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as the interpreter has it
        try:
            main(arguments.split(), prog_name="everygpu")
        except SystemExit as stop:
            sys.stderr.flush()
            os._exit(stop.code)

    _, status = os.waitpid(fork(work), 0)
    return os.waitstatus_to_exitcode(status), Path("stderr").read_text()


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("arguments", VERBS)
def test_a_reader_that_has_left(folder, arguments):
    assert run_with(closed_pipe, arguments) == (1, "")


@pytest.mark.parametrize("arguments", [verb for verb in VERBS if "--help" not in verb and verb != "--version"])
def test_a_full_disk(folder, arguments):
    code, said = run_with(lambda: os.open("/dev/full", os.O_WRONLY), arguments)
    assert (code, said) == (1, "Error: No space left on device: the output\n")


def test_no_output(folder, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as stop:
        main(["devices"], prog_name="everygpu")
    assert stop.value.code == 1
    assert capfd.readouterr().err.startswith("Error: The output is closed.")


def test_a_script_may_do_without(folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "stdout", None)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "-1")
    with pytest.raises(SystemExit) as stop:
        main(["run", "--cpu", "train.py"])
    assert stop.value.code == 0


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("load: it must exist.", "it must exist."),
        ("Feeder.load_state_dict: needs one: this.", "needs one: this."),
        ("no function: this stays.", "no function: this stays."),
    ],
)
def test_names_of_functions_are_left_out(message, said):
    assert without_caller(message) == said
