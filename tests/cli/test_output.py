"""What is printed: text, tables, and the bar of long work."""

import io
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from torch import nn

import everygpu
from everygpu.cli import main, output
from everygpu.cli.output import harmless, plain, show_bar, without_caller
from everygpu.devices import doctor
from everygpu.devices.doctor import Diagnosis
from tests.faults.inject import fork


def test_what_a_terminal_would_obey_is_escaped():
    assert harmless("läyer.0 ✓") == "läyer.0 ✓"
    assert harmless("\x1b[31m\x07\n\u202e") == r"\x1b[31m\x07\n\u202e"
    assert plain("\x9b2J").plain == r"\x9b2J"


def test_lines_are_kept_on_request_only():
    assert harmless("a\n\x1bb", keep="\n") == "a\n\\x1bb"


def test_half_a_surrogate_pair_can_be_printed():
    assert harmless("\udcff") == r"\udcff"


pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork") or not Path("/dev/full").exists(), reason="needs fork and /dev/full"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
METHODS = [
    "--help",
    "--version",
    "bench --cpu --way bare",
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


@pytest.mark.parametrize("arguments", METHODS)
def test_a_reader_that_has_left(folder, arguments):
    assert run_with(closed_pipe, arguments) == (1, "")


@pytest.mark.parametrize("arguments", [verb for verb in METHODS if "--help" not in verb and verb != "--version"])
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


HIDDEN, SHOWN, ERASED = "\x1b[?25l", "\x1b[?25h", "\x1b[2K"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    is_terminal = True

    def isatty(self):
        return self.is_terminal


@pytest.fixture
def terminal(monkeypatch):
    """Have bars write to a terminal."""
    stream = Terminal()

    def console(**_):
        return Console(file=stream, force_terminal=stream.isatty(), width=80, color_system=None)

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(output, "Console", console)
    return stream


def wait_for(terminal, words):
    def lines():
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "\n", terminal.getvalue())
        return [re.sub(r"[━╸╺ ]+", " ", line) for line in plain.split("\n")]

    deadline = time.monotonic() + 60
    while not any(words in line for line in lines()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert any(words in line for line in lines())


def test_it_shows_how_much_is_done_and_goes(terminal):
    with show_bar("hashing [/a]\x1b", 2**20) as count:
        count(2**19)
        wait_for(terminal, r"hashing [/a]\x1b 0.5/1.0 MiB")
    assert terminal.getvalue().startswith(HIDDEN)
    assert terminal.getvalue().endswith(f"{SHOWN}\r\x1b[1A{ERASED}")


def test_nothing_is_shown_in_a_pipe_or_when_asked(terminal):
    with show_bar("a", 2, quiet=True):
        pass
    terminal.is_terminal = False
    with show_bar("a", 2) as count:
        count(1)
    assert terminal.getvalue() == ""


def test_doctor_says_that_it_looks(terminal, monkeypatch):
    def diagnose(environ, *, test_peers):
        wait_for(terminal, "looking at drivers, torch and GPUs")
        return Diagnosis(findings=(), peers=None)

    monkeypatch.setattr(doctor, "diagnose", diagnose)
    assert CliRunner().invoke(main, ["doctor"]).exit_code == 0
