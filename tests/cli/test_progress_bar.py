"""The bars of long work: what they show on a terminal, that they go, and that nothing is shown elsewhere."""

import io
import re
import time

import pytest
from click.testing import CliRunner
from rich.console import Console

from everygpu.cli import main, output
from everygpu.cli.output import show_bar
from everygpu.devices import doctor
from everygpu.devices.doctor import Diagnosis

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
