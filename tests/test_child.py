"""Another Python, started where files lie that are named like modules of Python."""

import os
import subprocess

import pytest

from everygpu.child import python_command

PYTHONPATHS = [{}, {"PYTHONSAFEPATH": "1"}]


@pytest.fixture
def trap(tmp_path):
    """Make a folder with files that the child would import first, were they on its path."""
    for name in ("argparse", "everygpu", "json", "random", "runpy", "tempfile", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('trapped')")
    return tmp_path


@pytest.mark.parametrize("more", PYTHONPATHS)
def test_files_of_the_working_directory_are_not_run(trap, more):
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = python_command("everygpu", "--version")
    done = subprocess.run(command, cwd=trap, env=environ | more, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("everygpu, version ")


def test_python_path_goes_on_working(tmp_path):
    (tmp_path / "click.py").touch()
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "__init__.py").touch()
    (tmp_path / "probe" / "__main__.py").write_text("import click; print(click.__file__)")
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(python_command("probe"), env=environ, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{tmp_path / 'click.py'}\n", "")
