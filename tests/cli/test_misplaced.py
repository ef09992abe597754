"""Options that stand after the script: a note, and never an error."""

import sys

import pytest
from click.testing import CliRunner

from everygpu.cli import main

RUN = ("run", "--cpu", "--watchdog", "0")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command on a script, with arguments after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr("sys.argv", ["everygpu"])
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "DISABLE_CUPTI_LAZY_REINIT", "TEARDOWN_CUPTI"):
        monkeypatch.setenv(name, "0")  # put back after the commands have set them
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

    def invoke(text, *args, command=RUN):
        (tmp_path / "t.py").write_text(text)
        return CliRunner().invoke(main, [*command, "t.py", *args])

    return invoke


@pytest.mark.parametrize("args", [("--lr", "2"), ("2",), ("--", "--gpus", "2"), ("--local-rank=0",), ("--gpu",)])
def test_other_arguments_are_the_scripts(run, args):
    assert run("print('done')\n", *args).stderr == ""


@pytest.mark.parametrize("args", [("--cpu",), ("ts", "--gpus", "2"), ("--gpus=2",)])
def test_options_of_ours_after_the_script_are_told(run, args):
    name = next(arg for arg in args if arg.startswith("--")).partition("=")[0]
    said = run("print('done')\n", *args).stderr
    assert said.startswith(f"everygpu run: {name} stands after t.py and goes to it. Put it before the script")
