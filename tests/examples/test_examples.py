"""The examples, as their command lines say, judged by what they print."""

import importlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

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


class TestImages:
    LINE = re.compile(r"epoch (\d+)  loss (\S+)  [\d,]+ rows/s  \d+% waiting for data  accuracy (\S+)")

    @pytest.mark.slow
    def test_learns(self, run: Run) -> None:
        *_, last = self.LINE.finditer(run("images.py", "--replicas", 3, "--epochs", 3))
        assert float(last[2]) < 0.3
        assert float(last[3]) > 0.9

    def test_on_a_terminal_each_device_has_a_line(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
        output = re.sub(r"\x1b\[[\d;?]*\w", "", run("images.py", "--replicas", 3, "--epochs", 2, "--images", 96))
        for shown in ("96/96 rows", "waiting for data", "replica 0 on cpu  22 rows", "replica 2 on cpu  20 rows"):
            assert shown in output
        assert [epoch for epoch, *_ in self.LINE.findall(output)] == ["1", "2"]


class TestTrainer:
    EPOCH = re.compile(r"^epoch .*$", re.MULTILINE)

    @pytest.mark.usefixtures("warm_python")
    def test_two_processes_and_a_resumed_run_train_as_one_process(self, run: Run, tmp_path: Path) -> None:
        whole = run("trainer.py", "--epochs", 4, "--folder", tmp_path / "whole")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        options = ["--epochs", "4", "--folder", str(tmp_path / "ranks")]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = subprocess.run(
            [*command, EXAMPLES / "trainer.py", *options], env=env, stdout=subprocess.PIPE, text=True, check=True
        )
        resumed = run("trainer.py", *options[:1], 5, *options[2:])
        assert self.EPOCH.findall(ranks.stdout) == self.EPOCH.findall(whole)  # printed once, with the same losses
        assert [line[:8] for line in self.EPOCH.findall(resumed)] == ["epoch  5"]
        assert len((tmp_path / "ranks" / "log.csv").read_text().splitlines()) == 5
        assert torch.load(tmp_path / "ranks" / "best.pt").keys() == {
            f"{i}.{n}" for i in (0, 2, 4) for n in ("weight", "bias")
        }

    def test_stops_early(self, run: Run, tmp_path: Path) -> None:
        output = run("trainer.py", "--epochs", 60, "--patience", 1, "--folder", tmp_path)
        losses = [float(loss) for loss in re.findall(r"test loss (\S+)", output)]
        assert 6 < len(losses) < 60  # three drops of the rate, each after two epochs without a better loss
        assert losses[-1] >= min(losses[:-1])


class TestGan:
    def test_both_models_are_trained(self, run: Run) -> None:
        output = run("gan.py", "--replicas", 2, "--steps", 20)
        losses = re.findall(r"step +\d+  discriminator (\S+)  generator (\S+)", output)
        assert len(losses) == 10
        assert losses[-1] != losses[0]

    @pytest.mark.slow
    def test_finds_the_ring(self, run: Run) -> None:
        share, spots = re.findall(r"(\d+)% of the points near a spot, (\d) of 8", run("gan.py", "--replicas", 2))[0]
        assert int(share) > 60
        assert int(spots) >= 7


class TestLengths:
    @staticmethod
    def padding(output: str) -> int:
        return int(re.findall(r"(\d+)% of a batch is padding", output)[-1])

    @pytest.mark.slow
    def test_learns_with_less_padding(self, run: Run) -> None:
        output = run("lengths.py", "--replicas", 2, "--epochs", 3)
        at_random = run("lengths.py", "--replicas", 2, "--epochs", 1, "--random-order")
        assert float(re.findall(r"test accuracy (\S+);", output)[0]) > 0.45
        assert 1.5 * self.padding(output) < self.padding(at_random)

    def test_padding_changes_nothing(self) -> None:
        example = runpy.run_path(str(EXAMPLES / "lengths.py"))
        model = example["Classifier"](50).eval()
        short, long = (torch.arange(1, length) for length in (4, 30))
        alone, beside = model(example["pad"]([(short, 0)])[0]), model(example["pad"]([(short, 0), (long, 1)])[0])
        torch.testing.assert_close(alone[0], beside[0])

    def test_batches_have_each_sentence_once(self) -> None:
        sampler = runpy.run_path(str(EXAMPLES / "lengths.py"))["SimilarLengths"]([*range(50), *range(50)], 8)
        batches = list(sampler)
        assert len(batches) == len(sampler) == 13
        assert sorted(index for batch in batches for index in batch) == list(range(100))


class TestResume:
    STEP = re.compile(r"step +(\d+)  loss (\S+)")

    def test_all_steps_are_done_once(self, run: Run, tmp_path: Path) -> None:
        options = ("--replicas", 2, "--pause", 0, "--folder", tmp_path / "run", "--steps")
        whole = dict(self.STEP.findall(run("resume.py", *options, 40)))
        assert list(whole) == [str(step) for step in range(5, 41, 5)]
        assert "going on after step 40\nall 40 steps are done" in run("resume.py", *options, 40)

    @pytest.mark.slow
    def test_ctrl_c_changes_no_loss(self, run: Run, tmp_path: Path) -> None:
        options = ("--replicas", 2, "--steps", 120, "--folder")
        whole = dict(self.STEP.findall(run("resume.py", *options, tmp_path / "whole", "--pause", 0)))
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(EXAMPLES / "resume.py"), *map(str, options), str(tmp_path / "cut")]
        seen: dict[str, str] = {}
        for last in ("step  35", "step  90"):  # a later one each time
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
                assert process.stdout is not None
                lines = []
                for line in process.stdout:
                    lines.append(line)
                    if line.startswith(last):
                        process.send_signal(signal.SIGINT)
            assert (process.returncode, lines[-1]) == (130, "stopped: start it again to go on\n")
            seen |= self.STEP.findall("".join(lines))
        rest = run("resume.py", *options, tmp_path / "cut", "--pause", 0)
        assert "going on after step 80" in rest
        assert seen | dict(self.STEP.findall(rest)) == whole


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("script", "options", "last"),
    [
        ("images.py", ["--epochs", 2], r"epoch 2 .* accuracy 0\.\d+"),
        ("gan.py", ["--steps", 200], r"\d+% of the points near a spot, \d of 8 spots found"),
        ("lengths.py", ["--epochs", 2], r"test accuracy 0\.\d+; \d+ shapes of batches"),
        ("resume.py", ["--steps", 60, "--pause", 0], "all 60 steps are done, .*"),
    ],
)
def test_on_all_gpus(run: Run, script: str, options: list, last: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.fullmatch(last, run(script, *options).strip().splitlines()[-1])


class TestNotebook:
    """tests/clients has it run by Jupyter's own kernel, where that is installed."""

    @pytest.mark.slow
    def test_its_cells_train(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        cells = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        exec("\n".join(code), {})
        assert re.findall(r"accuracy (\S+)", capsys.readouterr().out)[-1] in ("0.99", "1.00")


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


def test_same_bits_compares_hashes(run: Run) -> None:
    lines = run("same_bits.py", "--steps", 5).splitlines()
    assert len({line.split()[-1] for line in lines[:3]}) == 1
    assert lines[3:] == ["The same bits."]
