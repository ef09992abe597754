"""Another Python, started where files lie that are named like modules of Python."""

import os
import subprocess

import pytest
import torch

import everygpu
from everygpu import child
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


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, 16),
        ("0::/\n", {"cpu.max": "250000 100000"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/\n", {}, 16),
        ("0::/job/step\n", {"job/step/cpu.max": "max 100000", "job/cpu.max": "400000 100000"}, 4),
        ("0::/job\n", {"job/cpu.max": "6400000 100000"}, 16),
        ("3:cpu,cpuacct:/a\n0::/\n", {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"}, 3),
        ("3:cpu:/host/path\n", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
        (None, {}, 16),
    ],
)
def test_cores_are_those_that_the_process_may_use(monkeypatch, tmp_path, cgroup, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    texts = {"proc/self/cgroup": cgroup} if cgroup is not None else {}
    for name, text in (texts | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert child.count_cores(tmp_path) == cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads can't be bound to cores")
def test_ranks_of_launch_share_the_cores_that_this_process_may_use():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(before)])
    try:
        assert everygpu.launch(torch.get_num_threads, processes=1) == [1]
    finally:
        os.sched_setaffinity(0, before)
