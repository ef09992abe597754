"""benchmarks/feeding.py, as it is called."""

import json

import pytest

from tests.scripts import run_script


@pytest.mark.parametrize("model", ["tiny", "tests.bench.own:small_bert"])
def test_on_replicas(model, tmp_path, capsys):
    result = tmp_path / "rows.json"
    options = ["--models", model, "--rounds", 2, "--steps", 2, "--rows", 3]
    run_script("benchmarks/feeding.py", "--cpu", 2, *options, "--json", result)
    (row,) = json.loads(result.read_text())["rows"]
    assert (row["model"], row["num_devices"], row["rows_per_device"]) == (model, 2, 3)
    assert 0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert row["there_ms"] > 0
    assert "ratio" in capsys.readouterr().out
