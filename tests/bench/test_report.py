"""Rows as lines, tables and JSON."""

import json
from pathlib import Path

import pytest
import torch

from everygpu.bench import report
from everygpu.bench.report import COLUMNS, add_efficiency, describe_machine, describe_row, fill_columns
from everygpu.errors import OptionError


def row(peer, num_devices, samples, model="gpt2", **more):
    ms = 1e3 * 16 * num_devices / samples
    return {
        "model": model, "peer": peer, "precision": "bf16", "num_devices": num_devices, "rows_per_device": 16,
        "engine": "graphs" if peer == "step" else "",
        "ms": ms, "ms_min": ms * 0.9, "ms_max": ms * 1.2, "steps_per_s": 1e3 / ms, "samples_per_s": samples,
        "peak_gib": [3.0, 2.5][:num_devices], "startup_s": 4.25, **more,
    }  # fmt: skip


ROWS = [row("single", 1, 100.0), row("single_graph", 1, 125.0), row("ddp", 2, 200.0), row("step", 2, 240.0)]
FAILED = {"model": "gpt2", "peer": "dp", "precision": "bf16", "error": "Traceback\n  line\nValueError: mine"}


def test_efficiency_is_against_the_best_single_gpu():
    rows = add_efficiency([*ROWS, FAILED])
    assert [r.get("efficiency") for r in rows] == [0.8, 1.0, 0.8, 0.96, None]
    assert rows[-1] == FAILED


def test_no_single_gpu_no_efficiency():
    (only,) = add_efficiency(ROWS[2:3])
    assert only["efficiency"] is None
    assert fill_columns(only)[6] == "-"


def test_a_failed_single_gpu_is_no_measure():
    failed = {"model": "gpt2", "peer": "single", "error": "no result in 3 s"}
    assert add_efficiency([failed, ROWS[2]])[1]["efficiency"] is None


def test_each_model_has_a_measure_of_its_own():
    rows = add_efficiency([ROWS[0], row("single", 1, 10.0, model="tiny"), row("ours", 2, 15.0, model="tiny"), ROWS[2]])
    assert [r["efficiency"] for r in rows] == [1.0, 1.0, 0.75, 1.0]


def test_cells():
    cells = fill_columns(add_efficiency(ROWS)[2])
    assert cells == (
        "ddp", "-", "2", "160.00 (144.00 to 192.00)", "6.25", "200", "80.0%", "3.00 (2.50)", "4.2 s"
    )  # fmt: skip
    assert len(cells) == len(COLUMNS)
    assert fill_columns(ROWS[3])[:3] == ("step", "graphs", "2")


def test_lines_say_what_came():
    assert "160.00 (144.00 to 192.00) ms" in describe_row(ROWS[2])
    assert describe_row(ROWS[2]).endswith("200 samples/s  peak 3.00 (2.50) GiB  start-up 4.2 s")
    assert describe_row(ROWS[3]).endswith("  engine graphs")
    assert "peak" not in describe_row(row("single", 1, 5.0, peak_gib=[]))
    assert describe_row(FAILED).split() == ["dp", "ValueError:", "mine"]


MACHINE = {
    "date": "2026-01-02 03:04 UTC", "commit": "abc1234", "everygpu": "0.1", "torch": "2.11", "cuda": "13.0",
    "python": "3.12", "system": "Linux", "cpu_threads": 8, "gpus": ["NVIDIA H200"] * 2,
}  # fmt: skip


def test_markdown_has_a_table_for_each_model_and_names_where_it_ran():
    text = report.write_markdown(MACHINE, [*add_efficiency([*ROWS, FAILED]), row("ours", 2, 9.0, model="tiny")])
    assert text.startswith("# Ways to train, 2026-01-02 03:04 UTC\n")
    assert "2 x NVIDIA H200; 8 CPU threads" in text
    assert "torch 2.11, cuda 13.0" in text
    assert "Commit: abc1234." in text
    assert "## gpt2, 16 rows for each GPU, bf16\n" in text
    assert "| ddp | - | 2 | 160.00 (144.00 to 192.00) | 6.25 | 200 | 80.0% | 3.00 (2.50) | 4.2 s |\n" in text
    assert "* dp: ValueError: mine\n" in text
    assert text.count(f"| {' | '.join(COLUMNS)} |") == 2


def test_json_has_everything():
    assert json.loads(report.write_json(MACHINE, ROWS)) == {"machine": MACHINE, "rows": ROWS}


def test_this_machine():
    machine = describe_machine()
    assert machine["torch"] == torch.__version__
    assert len(machine["gpus"]) == torch.cuda.device_count()
    assert describe_machine(commit="abc")["commit"] == "abc"


def test_several_batches_are_told():
    text = report.write_markdown(MACHINE, add_efficiency([row("step", 2, 9.0, rows_per_device=4.5, num_batches=40)]))
    assert "## gpt2, 4.5 rows for each GPU, 40 batches in turn, bf16\n" in text


@pytest.fixture(scope="module")
def draw(tmp_path_factory):
    """Matplotlib keeps the files of its fonts open, from the first drawing on."""
    pytest.importorskip("matplotlib")
    from everygpu.bench.plot import draw

    draw(ROWS, tmp_path_factory.mktemp("first") / "rows.svg")
    return draw


class TestPlot:
    def test_a_file_of_another_kind_is_refused(self):
        from everygpu.bench.plot import check_plot

        with pytest.raises(OptionError, match="ends with one of .png, .svg, .pdf, got a.txt"):
            check_plot(Path("a.txt"))

    def test_without_matplotlib(self, monkeypatch):
        from everygpu.bench import plot

        monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(OptionError, match=r"needs matplotlib.*everygpu\[plots\]"):
            plot.check_plot(Path("a.png"))

    def test_picture(self, draw, tmp_path):
        draw([*add_efficiency([*ROWS, FAILED]), row("ours", 2, 9.0, model="tiny")], tmp_path / "rows.svg")
        text = (tmp_path / "rows.svg").read_text()
        assert all(f"<!-- {word} -->" in text for word in ("gpt2", "tiny", "single_graph", "step", "samples/s"))
        assert "<!-- dp -->" not in text
        assert "<!-- best single GPU times GPUs -->" in text
