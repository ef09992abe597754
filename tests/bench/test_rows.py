"""benchmarks/rows.py: rows are measured alike, kept as they come, and compared; what ends a process ends one row."""

import json
import time

import pytest
from benchmarks import rows

from tests.scripts import run_script

FIELDS = {
    "commit", "hardware", "versions", "date", "workload", "row", "replicas", "ranks", "median_ms", "least_ms",
    "most_ms", "steps", "rounds", "note",
}  # fmt: skip
SMALL = ["--device", "cpu", "--tiny", "--windows", 2, "--window-s", 0.01]


@pytest.mark.usefixtures("warm_python")
def test_rows_of_a_model_have_one_loss_and_a_later_call_goes_on(tmp_path, capsys):
    out, other = tmp_path / "rows.json", tmp_path / "src/everygpu/__init__.py"
    other.parent.mkdir(parents=True)
    other.write_text("__version__ = 'another'")

    def measure(source, *options):
        run_script("benchmarks/rows.py", "--out", out, "--source", source, *SMALL, "--workloads", *options)
        return len(capsys.readouterr().out.splitlines())

    first = f"{rows.ROOT}=mine", "mlp", "--rows", "single", "step_x2"
    assert measure(*first) == 2
    with pytest.raises(SystemExit, match="is there already"):
        measure(*first)
    assert measure(*first, "--resume") == 0
    assert measure(f"{tmp_path}=other", "mlp", "moe", "--rows", "single", "loop", "--resume") == 4
    *good, lacking = sorted(rows.read_rows(out), key=lambda row: "error" in row)[:5]
    assert "AttributeError" in lacking["error"]
    assert [(row["commit"], row["workload"], row["row"]) for row in good] == [
        ("mine", "mlp", "single"), ("mine", "mlp", "step_x2"),
        ("other", "mlp", "single"), ("other", "moe", "single"),
    ]  # fmt: skip
    for row in good:
        assert row.keys() >= FIELDS
        assert 0 < row["least_ms"] <= row["median_ms"] <= row["most_ms"]
        assert row["last_loss"] < row["first_loss"]
        assert (row["versions"]["everygpu"] == "another") == (row["commit"] == "other")
    for name in ("first_loss", "last_loss"):
        assert [row[name] for row in good[1:3]] == pytest.approx([good[0][name]] * 2, rel=1e-4)


CHILD = """
import json, os, sys, time
for row in json.loads(sys.argv[1])["rows"]:
    print("ROW", json.dumps({"row": row}), flush=True)
    if row == "loop":
        raise ValueError("told")
    if row == "step":
        os._exit(3)
    if row == "loop_x2":
        time.sleep(60)
    print("ROW", json.dumps({"row": row, "windows_ms": [1.0]}), flush=True)
"""


def run(monkeypatch, tmp_path, names, limit_s=60):
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(rows, "CHILD", str(child))
    monkeypatch.setattr(rows, "LEAST_S", 0)
    return list(rows.run_job({"rows": names}, {}, time.monotonic() + limit_s))


def test_a_row_that_ends_its_process_says_why_and_the_others_are_measured(monkeypatch, tmp_path):
    assert run(monkeypatch, tmp_path, ["single", "loop", "step", "step_x2"]) == [
        {"row": "single", "windows_ms": [1.0]},
        {"row": "loop", "error": "ValueError: told"},
        {"row": "step", "error": "exit code 3"},
        {"row": "step_x2", "windows_ms": [1.0]},
    ]


def test_at_the_limit_the_row_that_runs_is_left_for_the_next_call(monkeypatch, tmp_path):
    begin = time.monotonic()
    assert run(monkeypatch, tmp_path, ["single", "loop_x2", "step_x2"], 2) == [{"row": "single", "windows_ms": [1.0]}]
    assert time.monotonic() - begin < 50


def test_the_reason_is_the_error_or_where_it_stood():
    hang = 'x\nTimeout (0:01:30)!\nThread 0x1 (most recent call first):\n  File "a.py", line 3 in f\n'
    assert rows.shorten(hang) == 'no result in 0:01:30: File "a.py", line 3 in f'
    rank = "[rank1]: ValueError: no\nTraceback:\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    assert rows.shorten(rank) == "ValueError: no"


def test_two_commits_side_by_side(tmp_path, capsys):
    def row(commit, name, ms, **more):
        key = {"commit": commit, "hardware": "H", "workload": "mlp", "row": name}
        times = {"median_ms": ms, "least_ms": ms, "most_ms": ms, "last_loss": 1.0, "note": "capture", "peak_gib": 0.1}
        return {**key, **times, **more} if ms else {**key, **more}

    found = [
        row("aaa1", "single", 2.0), row("aaa1", "loop", 4.0), row("aaa1", "step", 1.0),
        row("bbb1", "single", 2.0), row("bbb1", "loop", 5.0, last_loss=1.1, note="threads"),
        row("bbb1", "step", None, error="ValueError: no"),
    ]  # fmt: skip
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(found))
    run_script("benchmarks/rows.py", "--compare", path, "--before", "aaa", "--after", "bbb")
    _, _, single, loop, step, mean = (line.split() for line in capsys.readouterr().out.splitlines())
    assert single == ["mlp", "single", "2.000", "2.000", "1.000"]
    assert loop[:6] == ["mlp", "loop", "4.000", "5.000", "1.250", "apart;"]
    assert "1.00000 -> 1.10000; engine graphs -> threads" in " ".join(loop)
    assert " ".join(step) == "mlp step 1.000 - after: ValueError: no"
    assert mean == ["geometric", "mean", "1.118"]
