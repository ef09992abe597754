"""The examples, as their command lines say, judged by what they print."""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scripts import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
EPOCH = re.compile(r"epoch +(\d+)  loss (\S+)  accuracy (\S+)")
Run = Callable[..., str]


@pytest.fixture(autouse=True, scope="module")
def sklearn_is_imported() -> None:
    """Have scikit-learn set its variables of the environment here, and not in the test that first needs it."""
    importlib.import_module("sklearn.datasets")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``run(script, *options)`` gives what an example prints."""

    def run_example(script: str, *options: object) -> str:
        run_script(f"examples/{script}", *options)
        return capsys.readouterr().out

    return run_example


def epochs(output: str) -> dict[int, tuple[str, str]]:
    """Loss and accuracy as printed, by epoch."""
    return {int(epoch): (loss, accuracy) for epoch, loss, accuracy in EPOCH.findall(output)}


def interrupt_in_epoch_3(*options: object) -> None:
    """Start training and kill the process without warning once it has begun the third epoch."""
    # One thread: the same additions in the same order, whatever else the machine is doing.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(EXAMPLES / "digits.py"), *map(str, options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("epoch  2"):
                break
        process.kill()


class TestDigits:
    def test_reaches_its_accuracy_and_says_so_last(self, run: Run, tmp_path: Path) -> None:
        output = run("digits.py", "--replicas", 2, "--epochs", 6, "--checkpoint", tmp_path / "c")
        last = re.fullmatch(r"test accuracy (0\.\d+|1\.0+)", output.strip().splitlines()[-1])
        assert last is not None
        assert float(last[1]) >= 0.98

    @pytest.mark.usefixtures("warm_python")
    def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(self, run: Run, tmp_path: Path) -> None:
        options = ("--replicas", 3, "--epochs", 3)
        whole = epochs(run("digits.py", *options, "--checkpoint", tmp_path / "whole"))
        interrupt_in_epoch_3(*options, "--checkpoint", tmp_path / "cut")
        resumed = epochs(run("digits.py", *options, "--checkpoint", tmp_path / "cut", "--resume"))
        assert set(whole) == {1, 2, 3}
        assert {3} <= set(resumed) < set(whole)
        assert resumed == {epoch: whole[epoch] for epoch in resumed}
        files = [(tmp_path / name / "step-00000003" / "model.safetensors").read_bytes() for name in ("whole", "cut")]
        assert files[0] == files[1]


class TestTutorial:
    @pytest.mark.parametrize(
        ("replicas", "of_30", "of_10"),
        [(2, [15] * 2, [5] * 2), (3, [10] * 3, [4, 4, 2]), (8, [4] * 7 + [2], [2] * 5)],
    )
    def test_sizes(self, run: Run, replicas: int, of_30: list[int], of_10: list[int]) -> None:
        sizes = re.findall(
            r"(In model|Outside): input size \((\d+), 5\) output size \((\d+), 2\)",
            run("tutorial.py", "--replicas", replicas),
        )
        expected = [*[("In model", n) for n in of_30], ("Outside", 30)] * 3
        expected += [*[("In model", n) for n in of_10], ("Outside", 10)]
        assert sizes == [(where, str(n), str(n)) for where, n in expected]


class TestCharLM:
    def test_learns_and_writes(self, run: Run) -> None:
        output = run("charlm.py", "--replicas", 2, "--steps", 60)
        losses = [float(loss) for loss in re.findall(r"step +\d+  loss (\S+)", output)]
        assert len(losses) == 10
        assert losses[0] > 3.5 > 3.0 > losses[-1]
        test_loss, sample = output.split("test loss ")[1].split("\n", 1)
        assert float(test_loss) < 3.0
        assert sample.startswith("The ")
        assert len(sample.replace("\n", "")) > 300
