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

from everygpu.checkpoint import directory, output
from everygpu.cli import bench, main, progress_bar
from everygpu.cli.progress_bar import Bar, clock, remaining_s, show_bar
from everygpu.devices import doctor
from everygpu.devices.doctor import Diagnosis
from tests.cli.checkpoint.conftest import call, here

__all__ = ["call", "here"]  # fixtures
HIDDEN, SHOWN, ERASED = "\x1b[?25l", "\x1b[?25h", "\x1b[2K"


class Terminal(io.StringIO):
    """A stream that says it is a terminal; ``lines`` has what was drawn, ``bars`` the bars."""

    def __init__(self):
        super().__init__()
        self.bars, self.is_terminal, self.width = [], True, 80

    def isatty(self):
        return self.is_terminal

    @property
    def lines(self):
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "\n", self.getvalue())
        lines = [re.sub(r"[━╸╺ ]+", " ", line).strip() for line in plain.split("\n")]
        return [line for line, _ in itertools.groupby(filter(None, lines))]


@pytest.fixture
def terminal(monkeypatch):
    """Have bars appear at once, be drawn at each change, and write to a terminal."""
    stream = Terminal()

    def console(**_):
        return Console(file=stream, force_terminal=stream.isatty(), width=stream.width, color_system=None)

    class DrawnBar(Bar):
        def __init__(self, *args):
            super().__init__(*args)
            stream.bars.append(self)

        def drawn(self):
            self.is_shown = True
            return super().drawn()

        def update(self, *args, **kwargs):
            super().update(*args, **kwargs)
            if hasattr(self, "is_shown") and self._measure is None:
                self.draw()

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress_bar, "Console", console)
    monkeypatch.setattr(progress_bar, "Bar", DrawnBar)
    monkeypatch.setattr(progress_bar, "DELAY_S", 60)  # the thread doesn't draw
    return stream


def test_it_shows_how_much_is_done_and_goes(terminal):
    with show_bar("hashing [/a]\x1b", 4, unit="files") as bar:
        bar.advance()
        bar.update("reading", completed=3)
    assert terminal.lines[0] == r"hashing [/a]\x1b 1 of 4 files 0:00 left"
    assert terminal.lines[-1] == "reading 3 of 4 files 0:00 left"
    assert terminal.getvalue().startswith(HIDDEN)
    assert terminal.getvalue().endswith(f"{SHOWN}\r\x1b[1A{ERASED}")


def test_it_goes_before_something_is_printed(terminal):
    with show_bar("a", 2, unit="rows") as bar:
        bar.advance()
        with bar.paused():
            assert terminal.getvalue().endswith(f"{SHOWN}\r\x1b[1A{ERASED}")
        bar.advance()
        assert terminal.lines[-1].startswith("a 2 of 2 rows")


def test_an_interrupt_leaves_the_terminal_as_it_was(terminal):
    def work():
        with show_bar("a", 2) as bar:
            bar.advance()
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
        bar.advance()
    assert terminal.getvalue() == ""


def test_forced_colours_make_no_terminal_of_a_pipe(monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(progress_bar, "DELAY_S", 0)
    with show_bar("a", 2):
        time.sleep(0.05)
    assert capfd.readouterr().err == ""


def test_it_is_drawn_while_the_work_waits(terminal, monkeypatch):
    monkeypatch.setattr(progress_bar, "DELAY_S", 0)
    with show_bar("a"):
        deadline = time.monotonic() + 60
        while not terminal.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert re.fullmatch(r"a 0:0\d", terminal.lines[0])


@pytest.mark.parametrize(
    ("completed", "total", "at_s", "now_s", "left_s"),
    [
        (1, 4, 10, 10, 30),
        (1, 4, 10, 25, 15),
        (1, 4, 10, 99, 0),
        (4, 4, 9, 9, 0),
        (0, 4, 0, 9, None),
        (3, None, 9, 9, None),
    ],
)
def test_what_is_left_is_estimated_from_what_is_done(completed, total, at_s, now_s, left_s):
    assert remaining_s(completed, total, at_s, now_s) == left_s


@pytest.mark.parametrize(
    ("width", "line"), [(60, r"a long .*… 1.0 GiB of 3.0 GiB 0:00 left"), (38, r"a.*1.0 GiB of 3.0 GiB 0:00 left")]
)
def test_a_narrow_terminal_cuts_what_matters_least(terminal, width, line):
    terminal.width = width
    with show_bar("a long name " * 9, 3 * 2**30) as bar:
        bar.update(completed=2**30)
    assert re.fullmatch(line, terminal.lines[-1])


def test_durations():
    assert [clock(5.4), clock(65), clock(7265)] == ["0:05", "1:05", "2:01:05"]


@pytest.mark.parametrize(("name", "what"), [("ours", "verifying ours"), ("a.pt", "verifying a.pt")])
def test_verify_counts_bytes(terminal, call, name, what):
    assert call("verify", name).exit_code == 0
    done = [re.fullmatch(rf"{what} (\S+ K?i?B) of (\S+ KiB) 0:00 left", line) for line in terminal.lines]
    assert len(done) > 1
    assert all(done)
    assert done[0][1] != done[-1][1]


@pytest.mark.parametrize("target", ["b.safetensors", "b.pt", "b", "dcp2 --to dcp"])
def test_convert_counts_bytes_that_are_written(terminal, call, monkeypatch, target):
    for module in (output, directory):
        sync = module.sync_path
        monkeypatch.setattr(module, "sync_path", lambda path, sync=sync: (terminal.bars[0].draw(), sync(path)))
    assert call("convert", "ours", *target.split()).exit_code == 0
    name = target.split()[0]
    assert re.fullmatch(rf"writing {name} (\d+) B of \1 B 0:00 left", terminal.lines[0]), terminal.lines


def test_diff_counts_tensors(terminal, call):
    assert call("diff", "ours", "a.pt").exit_code == 0
    assert terminal.lines[-1].startswith("comparing 7 of 7 tensors")


def test_bench_counts_rows(terminal, monkeypatch):
    monkeypatch.setattr(bench, "run_row", lambda model, peer, *_: {"model": model, "peer": peer, "error": "none"})
    CliRunner().invoke(main, ["bench", "--cpu", "--peer", "single", "--peer", "step"])
    assert [line.rsplit(" ", 2)[0] for line in terminal.lines][-2:] == [
        "tiny: step 1 of 2 rows",
        "tiny: step 2 of 2 rows",
    ]


def test_doctor_counts_pairs_of_gpus(terminal, monkeypatch):
    def diagnose(environ, *, test_peers, on_pair):
        on_pair(0, 6)
        on_pair(1, 6)
        return Diagnosis(findings=(), peers=None)

    monkeypatch.setattr(doctor, "diagnose", diagnose)
    assert CliRunner().invoke(main, ["doctor"]).exit_code == 0
    assert terminal.lines == ["copying between GPUs 0 of 6 pairs 0:00", "copying between GPUs 1 of 6 pairs 0:00 left"]


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
        if "0 of 1 row" in said and not has_pressed:
            os.write(terminal, b"\x03")
            has_pressed = True
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 130
    os.close(terminal)
    assert said.endswith(f"{SHOWN}\r\x1b[1A{ERASED}")
    assert "Traceback" not in said
