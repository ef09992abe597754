"""benchmarks/feeding.py, as it is called."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.cli.runs import ROOT, command_of


def run(*options):
    command = command_of()
    command["args"] = [sys.executable, str(ROOT / "benchmarks" / "feeding.py"), *map(str, options)]
    command["env"]["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    return subprocess.run(**command, capture_output=True, check=False)


@pytest.mark.parametrize("model", ["tiny", "tests.bench.own:keywords"])
def test_on_replicas(model, tmp_path):
    result = tmp_path / "rows.json"
    options = ["--models", model, "--rounds", 2, "--steps", 2, "--rows", 3]
    done = run("--cpu", 2, *options, "--json", result)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(result.read_text())["rows"]
    assert (row["model"], row["num_devices"], row["rows_per_device"]) == (model, 2, 3)
    assert 0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert row["there_ms"] > 0
    assert "ratio" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_without_gpus_it_says_what_to_do():
    done = run("--models", "tiny")
    assert done.returncode == 1
    assert done.stderr.startswith("no GPU: --cpu 2")
