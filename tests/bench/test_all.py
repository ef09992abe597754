"""benchmarks/all.py: which parts there are, what is run when, and the report against the goals."""

import argparse
import json
import sys

import pytest
import torch
from benchmarks import all as every
from benchmarks.goals import check, write_report

MACHINE = {
    "date": "2026-01-01 00:00 UTC", "commit": "abc", "everygpu": "1", "torch": "2", "cuda": None, "python": "3",
    "system": "Linux", "cpu_threads": 1, "gpus": [],
}  # fmt: skip


def options(folder, **changed):
    return argparse.Namespace(**{"folder": folder, "minutes": 9.5, "again": False, **changed})


def part(name, code, seconds=30):
    return every.Part(name=name, command=["-c", code, "{rows}"], seconds=seconds)


def row(peer, samples, devices=8, peaks=(2.0, 2.0)):
    times = {"ms": 1.0, "ms_min": 1.0, "ms_max": 1.0, "steps_per_s": 1.0, "startup_s": 1.0}
    size = {"precision": "bf16", "rows_per_device": 16, "num_devices": devices, "peak_gib": list(peaks)}
    return {"model": "gpt2", "peer": peer, "samples_per_s": samples, **times, **size}


def put(folder, name, rows, end="done"):
    (folder / f"{name}.json").write_text(json.dumps({"name": name, "end": end, "seconds": 1, "machine": MACHINE}))
    (folder / f"{name}.rows.json").write_text(json.dumps({"rows": rows}))


def found(folder, name, rows):
    put(folder, name, rows)
    record = {"name": name, "end": "done", "rows": rows}
    return {goal.what: goal.is_met for goal in check(record)}


def test_a_part_fits_into_a_call_and_has_a_name_of_its_own():
    for box in (every.Box(count=8, on_cpu=False), every.Box(count=3, on_cpu=False), every.Box(count=2, on_cpu=True)):
        parts = list(every.list_parts(box))
        assert len({p.name for p in parts}) == len(parts)
        assert all(0 < p.seconds <= 9.5 * 60 for p in parts)
        assert ("step_ranks_of_2" in parts[0].command) == (box.count == 8)


def test_a_call_goes_on_where_the_last_one_stopped(tmp_path, capsys):
    parts = [part("good", "print('fine')"), part("bad", "raise SystemExit(3)"), part("long", "", seconds=500)]
    every.run_all(parts, options(tmp_path, minutes=2), {}, {"machine": MACHINE})
    assert "fine" in capsys.readouterr().out
    ends = {p.name: json.loads((tmp_path / f"{p.name}.json").read_text()) for p in parts[:2]}
    assert [(r["end"], r["exit"]) for r in ends.values()] == [("done", 0), ("failed", 3)]
    assert not (tmp_path / "long.json").exists()
    every.run_all(parts, options(tmp_path, minutes=2), {}, {"machine": MACHINE})
    assert capsys.readouterr().out.strip() == "left for another call: long"
    every.run_all(parts, options(tmp_path, minutes=2, again=True), {}, {"machine": MACHINE})
    assert "== bad: failed" in capsys.readouterr().out


@pytest.mark.slow  # it needs time enough to start
def test_a_part_that_hangs_is_ended_with_what_it_started(tmp_path, capsys):
    wait = "import time; time.sleep(60)"
    start = f"print(subprocess.Popen([sys.executable, '-c', {wait!r}]).pid, flush=True)"
    record = every.run_part(part("hangs", f"import subprocess, sys; {start}; {wait}", seconds=5), tmp_path, {}, {})
    assert record["end"] == "timed out"
    assert record["seconds"] < 50
    assert not runs(int(capsys.readouterr().out))


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_figures_go_beside_the_record(tmp_path):
    record = every.run_part(part("rows", "import sys; open(sys.argv[1], 'w').write('{}')"), tmp_path, {}, {})
    assert record["end"] == "done"
    assert (tmp_path / "rows.rows.json").read_text() == "{}"


def test_the_first_visible_gpus_are_chosen(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert every.choose_gpus(2) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,1")
    assert every.choose_gpus(2) == {"CUDA_VISIBLE_DEVICES": "5,3"}


def test_goals_are_of_the_rows_of_one_run(tmp_path):
    rows = [row("single", 500, 1), row("dp", 300), row("ddp", 3300), row("ours", 3250), row("step", 3200)]
    goals = found(tmp_path, "gpt2", [*rows, row("step_compiled", 3990, peaks=(2.0, 2.2))])
    assert goals.pop("ours / ddp")
    assert not goals.pop("step / ddp")
    assert goals.pop("step_compiled / 8 x best single")
    assert goals.pop("ours / dp")
    assert goals.pop("step_compiled, samples/s")
    assert set(goals) == {"ends well", "ours: memory, most / least", "step: memory, most / least"}
    assert all(goals.values())


def test_a_missing_row_and_uneven_memory_miss_their_goals(tmp_path):
    rows = [
        row("ddp", 100, 2),
        {**row("ours", 100, 2), "peak_gib": [2.2, 2.0]},
        {"model": "x", "peer": "dp", "error": "no"},
    ]
    goals = found(tmp_path, "vit", rows)
    assert not goals["dp"]
    assert not goals["ours: memory, most / least"]


def test_the_report_has_tables_goals_and_what_was_printed(tmp_path):
    put(tmp_path, "gpt2", [row("single", 500, 1), row("ddp", 3300), row("step", 3200)])
    put(tmp_path, "doctor", [], end="failed")
    (tmp_path / "doctor.txt").write_text("ok\nnot ok\n")
    text = write_report(tmp_path)
    assert "## gpt2, 16 rows for each GPU, bf16" in text
    assert "| gpt2 | step / ddp | >= 1.000 | 0.970 | **no** |" in text
    assert "| doctor | ends well | done | failed | **no** |" in text
    assert "```text\nok\nnot ok\n```" in text
    with pytest.raises(SystemExit, match="no records"):
        write_report(tmp_path / "empty")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_without_gpus_it_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["all.py", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit, match="--cpu 2"):
        every.main()
