"""Options that stand after the script: a note, and never an error."""

import sys

import pytest
from click.testing import CliRunner

from everygpu.cli import main

RUN = ("run", "--cpu", "--watchdog", "0")
READS = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\nparser.parse_args()\n"


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


def test_trace_says_so_at_once(run):
    first = run("print('done')\n", "--json", command=("trace",)).stderr.splitlines()[0]
    assert first.startswith("main trace: --json stands after t.py and goes to it. Put it before the script")


@pytest.mark.parametrize("args", [("--lr", "2"), ("2",), ("--", "--gpus", "2"), ("--local-rank=0",), ("--gpu",)])
def test_other_arguments_are_the_scripts(run, args):
    assert run("print('done')\n", *args).stderr == ""


def test_run_says_so_where_the_script_refuses_them(run):
    done = run(READS, "--cpu")
    assert done.stderr.endswith(
        "--cpu stands after t.py and goes to it. Put it before the script if it is this command's.\n"
    )


def test_a_script_that_takes_them_or_fails_otherwise(run):
    for ending in ("", "raise SystemExit(3)"):
        assert run(READS.replace("--lr", "--split") + ending, "--split", "even").stderr == ""
