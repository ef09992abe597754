"""Rows as lines and JSON."""

import json

import torch

from everygpu.bench.report import (
    COLUMNS,
    describe_machine,
    describe_row,
    describe_where,
    find_efficiency,
    table_line,
    write_json,
)


def row(peer, num_devices, samples, **more):
    ms = 1e3 * 16 * num_devices / samples
    return {
        "model": "gpt2", "peer": peer, "device_type": "cuda", "precision": "bf16", "num_devices": num_devices,
        "engine": "capture" if peer == "step" else "",
        "ms": ms, "ms_min": ms * 0.9, "ms_max": ms * 1.2, "steps_per_s": 1e3 / ms, "samples_per_s": samples,
        "peak_gib": [3.0, 2.5][:num_devices], "startup_s": 4.25, **more,
    }  # fmt: skip


SINGLE, DDP = row("single", 1, 100.0), row("ddp", 2, 160.0)
FAILED = {"model": "gpt2", "peer": "dp", "device_type": "cuda", "error": "Traceback\n  line\nValueError: mine"}


def test_efficiency_is_against_the_single_gpu():
    assert find_efficiency(SINGLE, []) == 1.0
    assert find_efficiency(DDP, [SINGLE]) == 0.8
    assert find_efficiency(FAILED, [SINGLE]) is None
    assert find_efficiency(DDP | {"device_type": "cpu"}, [SINGLE | {"device_type": "cpu"}]) is None  # it is shared
    for earlier in ([], [FAILED], [FAILED | {"peer": "single"}]):
        assert find_efficiency(DDP, earlier) is None


def test_lines_are_below_their_heads():
    head = table_line([name for name, _ in COLUMNS])
    line = describe_row(DDP | {"efficiency": 0.8})
    assert " ".join(line.split()) == "ddp - 200.00 (180.00 to 240.00) 160 80.0% 3.00 (2.50) 4.2 s"
    assert line.index("160") + 3 == head.index("samples/s") + len("samples/s")
    assert describe_row(row("step", 2, 9.0, peak_gib=[])).split()[:2] == ["step", "capture"]
    assert describe_row(FAILED).split() == ["dp", "ValueError:", "mine"]


def test_lines_fit_a_terminal():
    assert len(table_line([name for name, _ in COLUMNS])) == 80
    figures = {"ms": 123.456, "ms_min": 120.1, "ms_max": 130.0, "peak_gib": [139.9, 71.2], "startup_s": 99.9}
    line = describe_row(row("ours_ranks", 2, 1.6e6) | figures | {"engine": "threads", "efficiency": 1.004})
    assert len(line) == 80
    assert line.endswith(" 140 (71.2) 99.9 s")


def test_json_has_everything():
    machine = describe_machine()
    assert json.loads(write_json(machine, [SINGLE, FAILED])) == {"machine": machine, "rows": [SINGLE, FAILED]}


def test_this_machine():
    machine = describe_machine()
    assert machine["torch"] == torch.__version__
    assert len(machine["gpus"]) == torch.cuda.device_count()
    assert "not how fast" in describe_where(machine, 2, on_cpu=True)
    where = describe_where(machine | {"gpus": ["NVIDIA H200"] * 4, "cuda": "13.0"}, 2, on_cpu=False)
    assert where.startswith("2 of 4 x NVIDIA H200; everygpu ")
    assert where.endswith(", CUDA 13.0")
    amd = {"gpus": ["AMD Instinct"], "cuda": None, "rocm": "6.4"}
    assert describe_where(machine | amd, 1, on_cpu=False).endswith(", ROCm 6.4")
