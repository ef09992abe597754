"""The group: its help, what it loads, and the commands as real processes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import everygpu


def run(*arguments, **variables):
    where = Path(everygpu.__file__).parents[1]  # PYTHONPATH may be relative, and the fixture changes directory
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, cwd=where, env=os.environ | variables
    )


def test_help_names_the_verbs(call):
    out = call("--help").stdout
    for words in ("Show the tensors", "Check a checkpoint", "Write the model in SRC to DST"):
        assert words in out
    assert call("no-such-verb").exit_code == 2


def test_the_command_line_loads_no_torch_before_a_verb_is_called():
    code = "import sys, everygpu.cli; print('torch' in sys.modules)"
    assert run("-c", code).stdout == "False\n"


def test_a_tilde_is_the_home_where_no_shell_has_replaced_it(call, here, monkeypatch):
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(here / "home"))
    shutil.copytree("ours", here / "home" / "last")
    for verb in (["show"], ["verify"], ["convert", "~/last"]):
        assert call(*verb, "~/new.pt" if "convert" in verb else "~/last").exit_code == 0
    assert (here / "home" / "new.pt").exists()


@pytest.mark.parametrize("verb", [["show"], ["verify"]])
def test_a_path_the_system_refuses_is_four(call, verb):
    result = call(*verb, "a" * 300)
    assert result.exit_code == 4
    assert "File name too long" in result.stderr


@pytest.mark.usefixtures("warm_python")
def test_as_a_process(here):
    done = run("-m", "everygpu", "checkpoint", "show", str(here / "none"))
    assert (done.returncode, done.stdout) == (4, "")
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("warm_python")
def test_names_are_shown_where_the_output_has_no_letters_for_them(here):
    torch.save({"poids.é✓": torch.ones(1)}, here / "é.pt")
    for verb in ("show", "verify"):
        done = run("-m", "everygpu", "checkpoint", verb, str(here / "é.pt"), PYTHONIOENCODING="ascii")
        assert done.returncode == 0, done.stderr
        assert r"\xe9.pt" in done.stdout
