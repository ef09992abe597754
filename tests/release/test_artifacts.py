"""The wheel and the sdist in ``dist/``, as a user gets them: ``make dist`` runs this, in an environment without torch.

Each is installed into a fresh environment; the examples are those of the sdist's tree.
"""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CONSTRAINTS = REPOSITORY / "constraints.txt"
OF_A_CHECKOUT = (".ci/", ".github/")
"""What only a checkout has."""
MADE = {"PKG-INFO"}
"""What only an sdist has."""

RANKS = """
import torch, everygpu
from everygpu.ranks.group import current_group
model = everygpu.DataParallel(torch.nn.Linear(2, 1, bias=False), ["cpu"])
model(torch.tensor([[0.0, 2.0], [2.0, 0.0]]) if everygpu.is_main() else torch.ones(2, 2)).mean().backward()
found = current_group().gather(model.module.weight.grad[0].tolist())
if everygpu.is_main():
    print(found)
"""
USE = """
import sys, importlib.metadata
import everygpu
assert "torch" not in sys.modules, "import everygpu imports torch"
for name in everygpu.__all__:
    getattr(everygpu, name)
import torch
assert not torch.cuda.is_initialized()
model = everygpu.DataParallel(torch.nn.Linear(4, 2), ["cpu"] * 2)
step = everygpu.TrainStep(model, torch.nn.functional.mse_loss, torch.optim.AdamW(model.parameters()))
step(torch.ones(4, 4), torch.ones(4, 2))
print(everygpu.__file__, everygpu.__version__, importlib.metadata.version("everygpu"), sep="\\n")
"""


def find(pattern: str) -> Path:
    """Give the one file in ``dist/`` of a kind."""
    (found,) = (REPOSITORY / "dist").glob(pattern)
    return found


def tracked(*folders: str) -> set[str]:
    """List the files that git knows."""
    command = ["git", "ls-files", "-z", "--", *folders]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split("\0") if name}


def run(*command: str | Path, cwd: Path) -> str:
    """Run a program without GPUs, and give what it prints."""
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cwd)}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An environment that has one of the two."""

    programs: Path
    artifact: Path
    folder: Path
    """Has none of our files."""

    def run(self, program: str, *arguments: str | Path) -> str:
        return run(self.programs / program, *arguments, cwd=self.folder)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the sdist unpacks to."""
    folder = tmp_path_factory.mktemp("tree")
    with tarfile.open(find("*.tar.gz")) as archive:
        archive.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    return top


@pytest.fixture(scope="module", params=["*.whl", "*.tar.gz"], ids=["wheel", "sdist"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A fresh environment with torch, and with everygpu and what that asks for."""
    folder, artifact = tmp_path_factory.mktemp("installed"), find(request.param)
    run(sys.executable, "-m", "venv", folder / "environment", cwd=folder)
    made = Installed(
        programs=folder / "environment" / ("Scripts" if sys.platform == "win32" else "bin"),
        artifact=artifact,
        folder=folder,
    )
    made.run("python", "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, "torch")
    made.run("python", "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, artifact)
    return made


def test_the_wheel_has_the_package_and_nothing_else() -> None:
    with zipfile.ZipFile(find("*.whl")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == {name.removeprefix("src/") for name in tracked("src")}
    assert "everygpu/py.typed" in names


def test_the_sdist_has_all_that_git_has(tree: Path) -> None:
    names = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    assert names - MADE == {name for name in tracked() if not name.startswith(OF_A_CHECKOUT)}


def test_links_of_the_readme_lead_to_files_of_the_sdist(tree: Path) -> None:
    links = set(re.findall(r"\]\((?!\w+:)([^)#]+)", (tree / "README.md").read_text(encoding="utf-8")))
    assert links
    assert {link for link in links if not (tree / link).exists()} == set()


def test_it_trains_as_installed(installed: Installed) -> None:
    place, version, of_metadata = installed.run("python", "-I", "-W", "error", "-c", USE).splitlines()
    assert Path(place).is_relative_to(installed.folder)
    assert installed.artifact.name.startswith(f"everygpu-{version}")
    assert of_metadata == version


def test_two_ranks_train_as_installed(installed: Installed) -> None:
    script = installed.folder / "ranks.py"
    script.write_text(RANKS, encoding="utf-8")
    printed = installed.run("torchrun", "--nproc-per-node", "2", script)
    assert "[[1.0, 1.0], [1.0, 1.0]]" in printed.splitlines()


def test_requirements_fit_together(installed: Installed) -> None:
    assert "No broken requirements" in installed.run("python", "-m", "pip", "check")


def test_the_command_is_there(installed: Installed) -> None:
    version = installed.run("everygpu", "--version")
    assert version == installed.run("python", "-m", "everygpu", "--version")
    assert "Run a script on chosen GPUs." in installed.run("everygpu", "--help")
    assert "torch: torch 2." in installed.run("everygpu", "doctor", "--quick")


def test_examples_run(installed: Installed, tree: Path) -> None:
    examples = tree / "examples"
    installed.run("python", "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, f"{installed.artifact}[demo]")
    assert "Outside: input size" in installed.run("python", examples / "tutorial.py", "--replicas", "2")
    command = [examples / "digits.py", "--replicas", "2", "--epochs", "1", "--checkpoint", installed.folder / "run"]
    assert "test accuracy" in installed.run("python", *command)
    run_on = installed.run("everygpu", "run", "--cpu", examples / "charlm.py", "--replicas", "2", "--steps", "10")
    assert "test loss" in run_on
