"""Options that stand after the script: a note where it surely has no use for them, and never an error."""

import sys

import pytest
from click.testing import CliRunner

from everygpu.cli import main
from everygpu.cli.misplaced import reads_no_arguments

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


def test_a_script_that_reads_no_arguments(run):
    done = run("import torch\nprint('done')\n", "--gpus=2")
    assert done.stdout == "done\n"
    assert done.stderr.splitlines() == [
        "main run: --gpus stands after t.py, which reads no arguments: put it before the script."
    ]


@pytest.mark.parametrize("args", [("--lr", "2"), ("2",), ("--", "--gpus", "2"), ("--local-rank=0",), ("--gpu",)])
def test_other_arguments_are_the_scripts(run, args):
    assert run("print('done')\n", *args).stderr == ""


@pytest.mark.parametrize(("command", "option"), [(RUN, "--cpu"), (("trace",), "--steps"), (("tune",), "--json")])
def test_a_script_that_refuses_them(run, command, option):
    done = run(READS, option, command=command)
    assert (
        f"{option} stands after t.py and goes to it, which ended with exit code 2. Put it before the script"
        in done.stderr
    )


def test_a_script_that_takes_them_or_fails_otherwise(run):
    for ending in ("", "raise SystemExit(3)"):
        assert run(READS.replace("--lr", "--split") + ending, "--split", "even").stderr == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch, os.path\nfrom everygpu import DataParallel\n", True),
        ("target = large = 1\n", True),
        ("import sys\nprint(sys.argv)\n", False),
        (READS, False),
        ("import options\n", False),  # perhaps a file beside the script
        ("from . import options\n", False),
        ("def f():\n    from mine import main\n", False),
        ("import transformers\ntransformers.HfArgumentParser(Options)\n", False),
        ("this is no Python\n", False),
    ],
)
def test_only_what_surely_reads_none(tmp_path, text, expected):
    (tmp_path / "t.py").write_text(text)
    assert reads_no_arguments(str(tmp_path / "t.py")) == expected
