"""The group: version, help, and errors as messages with an exit code each."""

import re
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from everygpu import __version__, exit_codes
from everygpu.cli import main
from everygpu.errors import (
    CheckpointDamagedError,
    CheckpointError,
    DeviceError,
    EveryGPUError,
    ModuleError,
    OptionError,
)
from tests.cli.runs import ROOT


@pytest.fixture
def failing_command():
    """Add a verb that raises what is put in the returned list."""
    errors: list[BaseException] = []

    @click.command("fail")
    def fail():
        raise errors[0]

    main.add_command(fail)
    yield errors
    del main.commands["fail"]


def test_version():
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"everygpu, version {__version__}\n"


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_names_the_verbs(flag):
    result = CliRunner().invoke(main, [flag])
    assert result.exit_code == 0
    assert "Run a script on chosen GPUs." in result.stdout
    assert "List the GPUs" in result.stdout
    assert "3    no such GPU, or too few that fit" in result.stdout


def test_exit_codes_are_those_of_one_table():
    said = CliRunner().invoke(main, ["--help"]).stdout
    page = (ROOT / "docs/devices.md").read_text(encoding="utf-8")
    table = page[page.index("| code | meaning |") : page.index("| others |")]
    documented = {int(code) for row in table.splitlines()[2:] for code in row.split("|")[1].split(",")}
    listed = {int(code) for code in re.findall(r"^ +(\d+) +\S", said[said.index("Exit codes") :], re.MULTILINE)}
    assert documented == listed | {0} == {code for code in vars(exit_codes).values() if type(code) is int} | {0}


@pytest.mark.parametrize("arguments", [["no-such-verb"], ["--no-such-option"], ["devices", "extra"]])
def test_wrong_usage_is_two(arguments):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


@pytest.mark.parametrize("number", ["-1", "soon", "1e30", "nan", "inf"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["devices", "--max-utilization"],
        ["bench", "--cpu", "--timeout"],
        ["run", "--max-utilization"],
        ["run", "--watchdog"],
        ["run", "--wait", "--timeout"],
    ],
)
def test_numbers_out_of_range_are_wrong_usage(tmp_path, arguments, number):
    (tmp_path / "script.py").write_text("raise SystemExit(99)")
    script = [str(tmp_path / "script.py")] if "run" in arguments else []
    result = CliRunner().invoke(main, [*arguments, number, *script])
    assert result.exit_code == 2
    assert arguments[-1].lstrip("-").replace("-", "_") in result.stderr.replace("-", "_")


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (OptionError, 2),
        (DeviceError, 3),
        (CheckpointError, 4),
        (CheckpointDamagedError, 4),
        (ModuleError, 1),
        (EveryGPUError, 1),
    ],
)
def test_errors_of_ours_are_messages(failing_command, kind, code):
    failing_command.append(kind("load: [red]needed[/red], got :0:.\n  a table  "))
    result = CliRunner().invoke(main, ["fail"])
    assert result.exit_code == code
    assert result.stderr == "Error: [red]needed[/red], got :0:.\n  a table  \n"
    assert result.stdout == ""


def test_errors_of_the_system_are_one_line(failing_command):
    failing_command.append(PermissionError(13, "Permission denied", "a/b.json"))
    result = CliRunner().invoke(main, ["fail"])
    assert (result.exit_code, result.stderr) == (1, "Error: Permission denied: a/b.json\n")


def test_errors_of_the_system_without_a_number_are_their_own_words(failing_command):
    failing_command.append(OSError("the hub is down"))
    assert CliRunner().invoke(main, ["fail"]).stderr == "Error: the hub is down\n"


def test_interrupt_is_130(failing_command):
    failing_command.append(KeyboardInterrupt())
    assert CliRunner().invoke(main, ["fail"]).exit_code == 130


def test_other_errors_are_not_hidden(failing_command):
    failing_command.append(ZeroDivisionError("a bug"))
    result = CliRunner().invoke(main, ["fail"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_python_dash_m():
    done = subprocess.run([sys.executable, "-m", "everygpu", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"everygpu, version {__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["checkpoint", "--help"], ["devices"], ["bench", "-h"]]
)
def test_help_and_the_list_of_devices_need_no_torch(arguments):
    code = f"""import sys
from everygpu.cli import main
try:
    main({arguments!r})
finally:
    assert "torch" not in sys.modules"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
