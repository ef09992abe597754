"""``everygpu bench``, on the CPU as a user types it."""

import json
import re
import subprocess
from multiprocessing import resource_tracker

import pytest
import torch
from click.testing import CliRunner

from everygpu.bench import runner
from everygpu.bench.measure import Conditions, measure_row
from everygpu.bench.runner import read_results
from everygpu.bench.ways import WAYS
from everygpu.bench.workloads import MODELS
from everygpu.child import python_command
from everygpu.cli import bench as cli_bench
from everygpu.cli import main
from everygpu.cli.bench import find_devices
from everygpu.errors import DeviceError
from tests.cli.runs import ROOT, command_of
from tests.devices.real_gpus import find_gpus

OWN = "tests.bench.own:"
QUICK = ("--cpu", "--seconds", "0")


def bench(*arguments, cwd=ROOT):
    """Run the command; what it starts knows the package by the same path."""
    return subprocess.run(**command_of("bench", *arguments), cwd=cwd, capture_output=True, check=False)


def invoke(*arguments):
    return CliRunner().invoke(main, ["bench", "--cpu", *arguments], catch_exceptions=False)


@pytest.fixture(autouse=True, scope="module")
def tracker():
    """Have the process that multiprocessing starts once, and keeps."""
    resource_tracker.ensure_running()


@pytest.fixture
def here(monkeypatch):
    """Measure rows in this process: each in one of its own, as a user has them, imports torch again."""

    def run(command, timeout):
        return measure_row(Conditions(**json.loads(command[-1])))

    precision, is_tuned = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    monkeypatch.setattr(runner, "run_command", run)
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = is_tuned


@pytest.mark.usefixtures("warm_python")
@pytest.mark.usefixtures("here")
def test_all_rows_of_a_machine_without_gpus(tmp_path):
    path = tmp_path / "rows.jsonl"
    done = invoke("--seconds", "0", "--results", str(path), "--commit", "mine")
    assert done.exit_code == 0, done.stderr
    assert "On the CPU: this shows that everything runs, not how fast." in done.stdout
    rows = {row["way"]: row for row in read_results(path)}
    assert list(rows) == ["bare", "ddp", "loop", "step"]
    assert all((row["model"], row["num_devices"]) == ("tiny", 1 + (way != "bare")) for way, row in rows.items())
    for row in rows.values():
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert row["last_loss"] == pytest.approx(rows["bare"]["last_loss"], rel=1e-2)
        assert (row["commit"], row["versions"]["torch"]) == ("mine", torch.__version__)
    printed = [line.split()[0] for line in done.stdout.splitlines()[3:]]
    assert printed == ["way", *rows]  # each once


@pytest.mark.usefixtures("warm_python")
def test_a_model_of_ones_own(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "def bench():\n"
        "    model = torch.nn.Linear(3, 1)\n"
        "    print('making the model', end='')\n"
        "    batch = torch.randn(5, 3), torch.randn(5, 1)\n"
        "    return model, torch.nn.MSELoss(), torch.optim.Adam(model.parameters()), batch\n"
    )
    (tmp_path / "random.py").write_text("raise SystemExit('trapped')")
    options = ["--model", "train:bench", "--way", "step", "--rows", "4", "--gpus", "3", "--precision", "fp32"]
    command = command_of() | {"args": python_command("everygpu", "bench", *QUICK, *options, "--results", "rows.jsonl")}
    done = subprocess.run(**command, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = read_results(tmp_path / "rows.jsonl")
    assert (row["model"], row["rows_per_device"], row["num_devices"]) == ("train:bench", 4, 3)


@pytest.mark.usefixtures("here")
def test_a_wrong_model_ends_it_with_one_message():
    done = invoke("--model", f"{OWN}three", "--way", "bare", "--way", "loop")
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: tests.bench.own:three() returns a tuple of 3.")
    assert "loop" not in done.stdout


def test_help_names_all_models_and_rows():
    words = set(re.findall(r"[\w-]+", invoke("--help").stdout))
    assert {*MODELS, *WAYS, "Batches"} <= words
    assert {*cli_bench.ONE_GPU, *cli_bench.WAYS} == set(WAYS)
    assert all(WAYS[way].num_devices(1) for way in cli_bench.ONE_GPU)


@pytest.fixture
def outcomes(monkeypatch):
    """Pretend what comes of each row, and note what was asked for."""
    asked = []

    def install(answers):
        def run(command, timeout):
            asked.append((json.loads(command[-1]), timeout))
            if answers[asked[-1][0]["way"]] is None:
                raise KeyboardInterrupt
            return dict(answers[asked[-1][0]["way"]])

        monkeypatch.setattr(runner, "run_command", run)
        return asked

    return install


FIGURES = {"ms": 2.0, "ms_min": 1.0, "ms_max": 3.0, "samples_per_s": 4000.0, "rows_per_device": 8, "engine": "",
           "peak_gib": [], "startup_s": 2.5, "first_loss": 1.0, "last_loss": 1.0}  # fmt: skip


def test_a_failed_row_does_not_keep_the_others(outcomes):
    asked = outcomes({"bare": {"error": "Traceback\nKeyError: 'mine'"}, "loop": FIGURES})
    done = invoke("--way", "bare", "--way", "loop", "--timeout", "7", "--rounds", "4")
    assert done.exit_code == 0
    assert "KeyError: 'mine'\n" in done.stdout
    assert "Traceback" not in done.stdout
    assert [(record["way"], record["num_rounds"], timeout) for record, timeout in asked] == [
        ("bare", 4, 7.0),
        ("loop", 4, 7.0),
    ]


def test_what_was_measured_is_kept_and_printed_again(outcomes, tmp_path):
    result = str(tmp_path / "rows.jsonl")
    asked = outcomes({"bare": FIGURES, "loop": None})
    assert invoke("--way", "bare", "--way", "loop", "--results", result).exit_code == 130
    asked.clear()
    done = invoke("--way", "bare", "--results", result)
    assert "4,000" in done.stdout
    assert not asked
    done = invoke("--way", "bare", "--way", "loop", "--results", result, "--limit", "1")
    assert "The time is up after 1 of 2 rows. The same command goes on.\n" in done.stdout


def test_no_row_at_all_is_a_failure(outcomes):
    outcomes({"dp": {"error": "needs a GPU"}})
    done = invoke("--way", "dp")
    assert done.exit_code == 1
    assert "No row could be measured" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--way", "fsdp"], "'fsdp' is not one of 'bare'"),
        (["--way", "ddp", "--gpus", "1"], "--way ddp trains on two GPUs or more. Leave it out, or pass --gpus 2"),
        (["--model", "typo"], "No model 'typo'. Pass one of gpt2"),
        (["--rounds", "2"], "2 is not in the range x>=3"),
        (["--results", "nowhere/rows.jsonl"], "No directory for nowhere/rows.jsonl"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(outcomes, arguments, words):
    asked = outcomes({})
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert re.search(words, done.stderr), done.stderr
    assert not asked


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert find_devices(None, False) == ("cuda", 4)
    assert find_devices(1, False) == ("cuda", 1)
    assert find_devices(None, True) == ("cpu", 2)
    assert find_devices(8, True) == ("cpu", 8)
    with pytest.raises(DeviceError, match="Found 4 of 5 requested GPUs"):
        find_devices(5, False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert find_devices(None, False) == ("cpu", 2)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.alone
def test_real_rows_are_all_measured(tmp_path):
    num_gpus = min(2, len(find_gpus(1)))
    path = tmp_path / "rows.jsonl"
    done = bench("--model", "tiny", "--seconds", "0.1", "--gpus", num_gpus, "--results", path)
    assert done.returncode == 0, done.stderr
    rows = read_results(path)
    assert [row for row in rows if "ms" not in row] == []
    assert all(len(row["peak_gib"]) == row["num_devices"] and min(row["peak_gib"]) > 0 for row in rows)
    losses = [row["last_loss"] for row in rows]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=2e-2)
