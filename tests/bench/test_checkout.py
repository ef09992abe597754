"""The commit in a report is that of the package's source, wherever the command runs."""

import os
import shutil
import subprocess

import pytest

import everygpu
from everygpu.bench.report import describe_machine

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder, *command):
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", *author, *command], cwd=folder, env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Import the package from a folder within a repository, and work in another; returns the first's commit."""

    def make(package):
        for name, file in (("first", f"{package}/__init__.py"), ("second", "train.py")):
            path = tmp_path / name / file
            path.parent.mkdir(parents=True)
            path.write_text(f"# {name}")
            git(tmp_path / name, "init", "-q")
            git(tmp_path / name, "add", ".")
            git(tmp_path / name, "commit", "-q", "-m", name)
        monkeypatch.setattr(everygpu, "__file__", str(tmp_path / "first" / package / "__init__.py"))
        monkeypatch.chdir(tmp_path / "second")
        return git(tmp_path / "first", "rev-parse", "HEAD")

    return make


def test_of_a_checkout_it_is_the_commit(install, tmp_path, monkeypatch):
    commit = install("src/everygpu")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "second" / ".git"))
    found = describe_machine()["commit"]
    assert len(found) >= 7
    assert commit.startswith(found)
    (tmp_path / "first/src/everygpu/__init__.py").write_text("# changed")
    assert describe_machine()["commit"] == f"{found}-dirty"


@pytest.mark.parametrize("package", [".venv/lib/site-packages/everygpu", "lib/everygpu", "third_party/src/everygpu"])
def test_inside_of_another_project_it_is_the_version(install, package):
    install(package)
    assert describe_machine()["commit"] == everygpu.__version__


def test_without_git_it_is_the_version(install, monkeypatch):
    install("src/everygpu")
    monkeypatch.setenv("PATH", "")
    assert describe_machine()["commit"] == everygpu.__version__
