"""Rows as lines."""

import torch

from everygpu.bench.report import (
    COLUMNS,
    compare_with_bare,
    describe_row,
    describe_versions,
    describe_where,
    find_card,
    table_line,
)


def row(way, num_devices, samples, **more):
    ms = 1e3 * 16 * num_devices / samples
    return {
        "commit": "a", "card": "NVIDIA H200", "model": "gpt2", "way": way, "num_devices": num_devices, "rows": None,
        "precision": "bf16", "engine": "capture" if way == "step" else "", "ms": ms, "ms_min": ms * 0.9,
        "ms_max": ms * 1.2, "samples_per_s": samples, "peak_gib": [3.0, 2.5][:num_devices], "last_loss": 2.0, **more,
    }  # fmt: skip


BARE, DDP = row("bare", 1, 100.0), row("ddp", 2, 160.0, last_loss=2.01)
FAILED = {**row("dp", 2, 1.0), "error": "Traceback\n  line\nValueError: mine"}
del FAILED["ms"]


def test_rows_are_compared_with_the_eager_gpu_of_the_same_run():
    assert compare_with_bare(BARE, [BARE]) == {"efficiency": 1.0, "loss_difference": 0.0}
    found = compare_with_bare(DDP, [BARE, DDP])
    assert found["efficiency"] == 0.8
    assert round(found["loss_difference"], 6) == 0.005
    nothing = {"efficiency": None, "loss_difference": None}
    for rows in ([], [DDP], [BARE | {"commit": "b"}], [BARE | {"model": "bert"}], [FAILED | {"way": "bare"}]):
        assert compare_with_bare(DDP, rows) == nothing
    assert compare_with_bare(FAILED, [BARE]) == nothing
    on_cpu = {"card": "CPU, x86_64"}  # its replicas share the cores
    assert compare_with_bare(DDP | on_cpu, [BARE | on_cpu])["efficiency"] is None


def test_lines_are_below_their_heads():
    head = table_line([name for name, _ in COLUMNS])
    line = describe_row(DDP, [BARE])
    assert " ".join(line.split()) == "ddp - 200.00 (180.00-240.00) 160 80.0% 3.00 (2.50) 0.50%"
    assert line.index("160") + 3 == head.index("samples/s") + len("samples/s")
    assert describe_row(row("step", 2, 9.0, peak_gib=[]), []).split()[:2] == ["step", "capture"]
    assert describe_row(FAILED, []).split() == ["dp", "ValueError:", "mine"]


def test_lines_fit_a_terminal():
    assert len(table_line([name for name, _ in COLUMNS])) == 80
    figures = {"ms": 123.456, "ms_min": 120.1, "ms_max": 130.0, "peak_gib": [139.9, 71.2], "engine": "threads"}
    line = describe_row(row("step_compiled", 2, 1.6e6) | figures, [BARE | {"samples_per_s": 8e5}])
    assert len(line) == 80
    assert "1,600,000 100.0% 140 (71.2)  0.00%" in line


def test_where():
    versions = describe_versions()
    assert versions["torch"] == torch.__version__
    assert find_card("cpu").startswith("CPU, ")
    assert "not how fast" in describe_where(find_card("cpu"), versions, 2)
    assert (
        describe_where("NVIDIA H200", {"torch": "2.11", "cuda": "13.0"}, 2) == "2 x NVIDIA H200; torch 2.11, cuda 13.0"
    )
