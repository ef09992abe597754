"""``everygpu bench``, on the CPU as a user types it."""

import json
import re
import subprocess
from multiprocessing import resource_tracker

import pytest
import torch
from click.testing import CliRunner

from everygpu.bench import timing
from everygpu.bench.rows import ROWS, Conditions, measure_row
from everygpu.bench.workloads import MODELS
from everygpu.child import python_command
from everygpu.cli import main
from everygpu.cli.bench import PEERS, find_devices
from everygpu.errors import DeviceError
from tests.cli.runs import ROOT, command_of
from tests.devices.real_gpus import find_gpus

OWN = "tests.bench.own:"
QUICK = ("--cpu", "--steps", "1")


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
    monkeypatch.setattr(timing, "run_command", run)
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = is_tuned


@pytest.mark.usefixtures("warm_python")
@pytest.mark.usefixtures("here")
def test_all_rows_of_a_machine_without_gpus(tmp_path):
    done = invoke("--steps", "1", "--json", str(tmp_path / "rows.json"))
    assert done.exit_code == 0, done.stderr
    assert "On the CPU: this shows that everything runs, not how fast." in done.stdout
    found = json.loads((tmp_path / "rows.json").read_text())
    rows = {row["peer"]: row for row in found["rows"]}
    assert list(rows) == ["single", "ddp", "ours", "step"]
    assert all((row["model"], row["num_devices"]) == ("tiny", 1 + (peer != "single")) for peer, row in rows.items())
    for row in rows.values():
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert row["samples_per_s"] == pytest.approx(row["rows_per_device"] * row["num_devices"] * row["steps_per_s"])
        assert row["efficiency"] is None  # replicas share the CPU
    assert found["machine"]["torch"] == torch.__version__
    printed = [line.split()[0] for line in done.stdout.splitlines()[3:]]
    assert printed == ["row", *rows]  # each once


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
    options = ["--model", "train:bench", "--peer", "step", "--rows", "4", "--gpus", "3", "--precision", "fp32"]
    command = command_of() | {"args": python_command("everygpu", "bench", *QUICK, *options, "--json", "rows.json")}
    done = subprocess.run(**command, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (row["model"], row["rows_per_device"], row["num_devices"]) == ("train:bench", 4, 3)
    assert row["efficiency"] is None


@pytest.mark.usefixtures("here")
def test_a_wrong_model_ends_it_with_one_message():
    done = invoke("--model", f"{OWN}three", "--peer", "single", "--peer", "ours")
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: tests.bench.own:three() returns a tuple of 3.")
    assert "ours" not in done.stdout


def test_help_names_all_models_and_rows():
    words = set(re.findall(r"[\w-]+", invoke("--help").stdout))
    assert {*MODELS, *ROWS, "Batches"} <= words
    assert set(PEERS) == set(ROWS)


@pytest.fixture
def outcomes(monkeypatch):
    """Pretend what comes of each row, and note what was asked for."""
    asked = []

    def install(answers):
        def run(command, timeout):
            asked.append((json.loads(command[-1]), timeout))
            return answers[asked[-1][0]["peer"]]

        monkeypatch.setattr(timing, "run_command", run)
        return asked

    return install


FIGURES = {"ms": 2.0, "ms_min": 1.0, "ms_max": 3.0, "steps_per_s": 500.0, "samples_per_s": 4000.0,
           "rows_per_device": 8, "num_devices": 1, "engine": "", "peak_gib": [], "startup_s": 2.5}  # fmt: skip


def test_a_failed_row_does_not_keep_the_others(outcomes):
    asked = outcomes({"single": {"error": "Traceback\nKeyError: 'mine'"}, "ours": FIGURES})
    done = invoke("--peer", "single", "--peer", "ours", "--timeout", "7", "--rounds", "4")
    assert done.exit_code == 0
    assert "KeyError: 'mine'\n" in done.stdout
    assert "Traceback" not in done.stdout
    assert [(record["peer"], record["num_rounds"], timeout) for record, timeout in asked] == [
        ("single", 4, 7.0),
        ("ours", 4, 7.0),
    ]


def test_an_interrupt_keeps_what_was_measured(outcomes, monkeypatch, tmp_path):
    outcomes({"single": FIGURES})
    measured = timing.run_command

    def run(command, timeout):
        if json.loads(command[-1])["peer"] != "single":
            raise KeyboardInterrupt
        return measured(command, timeout)

    monkeypatch.setattr(timing, "run_command", run)
    result = tmp_path / "rows.json"
    done = invoke("--peer", "single", "--peer", "ours", "--json", str(result))
    assert done.exit_code == 130
    assert [row["peer"] for row in json.loads(result.read_text())["rows"]] == ["single"]


def test_no_row_at_all_is_a_failure(outcomes):
    outcomes({"dp": {"error": "needs a GPU"}})
    done = invoke("--peer", "dp")
    assert done.exit_code == 1
    assert "No row could be measured" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peer", "fsdp"], "'fsdp' is not one of 'single'"),
        (["--model", "typo"], "No model 'typo'. Pass one of gpt2"),
        (["--rounds", "2"], "2 is not in the range x>=3"),
        (["--json", "nowhere/rows.json"], "No directory for nowhere/rows.json"),
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
    done = bench("--model", "tiny", "--steps", "3", "--gpus", num_gpus, "--json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row for row in rows if "ms" not in row] == []
    assert all(len(row["peak_gib"]) == row["num_devices"] and min(row["peak_gib"]) > 0 for row in rows)
