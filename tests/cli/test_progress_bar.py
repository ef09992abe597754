"""The bars of long work: what they show on a terminal, that they go, and that nothing is shown elsewhere."""

import io
import itertools
import os
import pty
import re
import select
import sys
import time

import pytest
from click.testing import CliRunner
from rich.console import Console

from everygpu.cli import main, progress_bar
from everygpu.cli.progress_bar import show_bar
from everygpu.devices import doctor
from everygpu.devices.doctor import Diagnosis

HIDDEN, SHOWN, ERASED = "\x1b[?25l", "\x1b[?25h", "\x1b[2K"


class Terminal(io.StringIO):
    """A stream that says it is a terminal; ``lines`` has what was drawn."""

    is_terminal = True

    def isatty(self):
        return self.is_terminal

    @property
    def lines(self):
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "\n", self.getvalue())
        lines = [re.sub(r"[━╸╺ ]+", " ", line).strip() for line in plain.split("\n")]
        return [line for line, _ in itertools.groupby(filter(None, lines))]


@pytest.fixture
def terminal(monkeypatch):
    """Have bars appear at once, and write to a terminal."""
    stream = Terminal()

    def console(**_):
        return Console(file=stream, force_terminal=stream.isatty(), width=80, color_system=None)

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress_bar, "Console", console)
    monkeypatch.setattr(progress_bar, "DELAY_S", 0)
    return stream


def wait_for(terminal, words):
    deadline = time.monotonic() + 60
    while not any(words in line for line in terminal.lines) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert any(words in line for line in terminal.lines), terminal.lines


def test_it_shows_how_much_is_done_and_goes(terminal):
    with show_bar("hashing [/a]\x1b", 4, unit="files") as bar:
        bar.advance_by()
        wait_for(terminal, r"hashing [/a]\x1b 1/4 files")
        bar.say("reading", completed=3)
        wait_for(terminal, "reading 3/4 files")
    assert terminal.getvalue().startswith(HIDDEN)
    assert terminal.getvalue().endswith(f"{SHOWN}\r\x1b[1A{ERASED}")


def test_it_shows_what_a_function_measures(terminal):
    with show_bar("reading") as bar, bar.measured("writing", 2**20, lambda: 2**19):
        wait_for(terminal, "writing 0.5/1.0 MiB")


def test_it_goes_before_something_is_printed(terminal):
    with show_bar("a", 2, unit="rows") as bar:
        wait_for(terminal, "a 0/2 rows")
        with bar.paused():
            assert terminal.getvalue().endswith(f"{SHOWN}\r\x1b[1A{ERASED}")
        bar.advance_by()
        wait_for(terminal, "a 1/2 rows")


def test_an_interrupt_leaves_the_terminal_as_it_was(terminal):
    def work():
        with show_bar("a", 2):
            wait_for(terminal, "a 0/2 bytes")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert terminal.getvalue().endswith(f"{SHOWN}\r\x1b[1A{ERASED}")


def test_nothing_is_shown_in_a_pipe_of_short_work_or_when_asked(terminal, monkeypatch):
    monkeypatch.setattr(progress_bar, "DELAY_S", 60)
    with show_bar("a", 2, quiet=True):
        pass
    with show_bar("a", 2):  # is over before DELAY_S
        pass
    terminal.is_terminal = False
    with show_bar("a", 2) as bar, bar.measured("b", 3, lambda: 1.0), bar.paused():
        bar.advance_by()
    assert terminal.getvalue() == ""


def test_forced_colours_make_no_terminal_of_a_pipe(monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(progress_bar, "DELAY_S", 0)
    with show_bar("a", 2):
        time.sleep(0.05)
    assert capfd.readouterr().err == ""


def test_doctor_says_that_it_looks(terminal, monkeypatch):
    def diagnose(environ, *, test_peers):
        wait_for(terminal, "looking at drivers, torch and GPUs")
        return Diagnosis(findings=(), peers=None)

    monkeypatch.setattr(doctor, "diagnose", diagnose)
    assert CliRunner().invoke(main, ["doctor"]).exit_code == 0


@pytest.mark.slow
def test_ctrl_c_in_a_terminal():
    process, terminal = pty.fork()
    if process == 0:
        os.environ["TERM"] = "xterm"
        os.execv(
            sys.executable, [sys.executable, "-m", "everygpu", "bench", "--cpu", "--peer", "single", "--steps", "1000"]
        )
    said, has_pressed = "", False
    while select.select([terminal], [], [], 60)[0]:
        try:
            said += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # the terminal's other end is closed
            break
        if "0/1 rows" in said and not has_pressed:
            os.write(terminal, b"\x03")
            has_pressed = True
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 130
    os.close(terminal)
    assert said.endswith(f"{SHOWN}\r\x1b[1A{ERASED}")
    assert "Traceback" not in said
