"""benchmarks/growth.py, as it is called."""

import json

import pytest

from tests.scripts import run_script

SMALL = ["--blocks", 1, "--length", 8, "--rounds", 2, "--steps", 1]


def test_every_combination_stands_beside_one_device(tmp_path, capsys):
    result = tmp_path / "rows.json"
    run_script("benchmarks/growth.py", "--cpu", 2, 1, "--widths", 32, 64, "--rows", 3, *SMALL, "--json", result)
    rows = json.loads(result.read_text())["rows"]
    found = [(row["width"], row["rows"], row["num_devices"]) for row in rows]
    assert found == [(w, r, n) for w in (32, 64) for r in (3,) for n in (1, 2)]
    for row in rows:
        (alone,) = (r for r in rows if (r["width"], r["rows"], r["num_devices"]) == (row["width"], row["rows"], 1))
        assert row["alone_ms"] == alone["ms"]
        assert row["efficiency"] == pytest.approx(alone["ms"] / row["ms"])
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
    assert rows[0]["num_params"] < rows[-1]["num_params"]
    assert capsys.readouterr().out.count("alone") == len(rows)


def test_widths_are_made_of_heads():
    with pytest.raises(SystemExit, match="^--widths must be multiples of 32"):
        run_script("benchmarks/growth.py", "--cpu", 1, "--widths", 40, *SMALL)
