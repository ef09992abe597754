"""benchmarks/growth.py, as it is called."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.cli.runs import ROOT, command_of


def run(*options):
    command = command_of()
    command["args"] = [sys.executable, str(ROOT / "benchmarks" / "growth.py"), *map(str, options)]
    command["env"]["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    return subprocess.run(**command, capture_output=True, check=False)


SMALL = ["--blocks", 1, "--length", 8, "--rounds", 2, "--steps", 1]


def test_every_combination_stands_beside_one_device(tmp_path):
    result = tmp_path / "rows.json"
    done = run("--cpu", 2, 1, "--widths", 32, 64, "--rows", 1, 3, *SMALL, "--json", result)
    assert done.returncode == 0, done.stderr
    rows = json.loads(result.read_text())["rows"]
    found = [(row["width"], row["rows"], row["num_devices"]) for row in rows]
    assert found == [(w, r, n) for w in (32, 64) for r in (1, 3) for n in (1, 2)]
    for row in rows:
        (alone,) = (r for r in rows if (r["width"], r["rows"], r["num_devices"]) == (row["width"], row["rows"], 1))
        assert row["alone_ms"] == alone["ms"]
        assert row["efficiency"] == pytest.approx(alone["ms"] / row["ms"])
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
    assert rows[0]["num_params"] < rows[-1]["num_params"]
    assert done.stdout.count("alone") == len(rows)


def test_without_one_device_there_is_no_efficiency():
    done = run("--cpu", 2, "--widths", 32, "--rows", 1, *SMALL)
    assert done.returncode == 0, done.stderr
    assert "alone" not in done.stdout


def test_widths_are_made_of_heads():
    done = run("--cpu", 1, "--widths", 40, *SMALL)
    assert done.returncode == 1
    assert done.stderr.startswith("--widths must be multiples of 32")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_without_gpus_it_says_what_to_do():
    done = run()
    assert done.returncode == 1
    assert done.stderr.startswith("no GPU: --cpu 1 2")
