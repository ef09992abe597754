"""What ``everygpu top`` shows in terminals of 200, 80 and 60 columns."""

import io
import re

import pytest
from rich.console import Console

from everygpu.cli.top_view import View, build_view
from everygpu.devices import nvml
from everygpu.devices.figures import Figures, Run
from everygpu.devices.reserve import Holder
from tests.devices.fake_nvml import GIB, FakeNvml, Gpu, mig_gpu, two_h200s

LONG = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"


@pytest.fixture
def view():
    """Two GPUs, one in two parts, and one with a long name; a long run, and one on the CPU."""
    busy = {"used": 70 * GIB, "utilization": 97, "processes": [(7, 60 * GIB), (1234567, None)], "power": 650_400}
    gpus = nvml.sample_devices(FakeNvml(*two_h200s(**busy), mig_gpu(), Gpu(name=LONG, uuid="GPU-3")))
    samples = [part for gpu in gpus for part in (gpu, *(gpu.mig_instances or ()))]
    uuids = tuple(sample.uuid for sample in samples[:2])
    figures = Figures(
        devices=uuids, num_steps=123456, steps_per_s=20.345, data_wait_pct=2.04, communication_pct=11.0,
        slowest_replica=0,
    )  # fmt: skip
    runs = [
        Run(pid=1234567, command="train_a_language_model_of_ours.py", figures=figures, age_s=0.2),
        Run(pid=8, command="train.py", figures=Figures(devices=("cpu",) * 2, num_steps=3), age_s=3.0),
    ]
    names = {7: "/usr/bin/python3", 1234567: "/opt/envs/training/bin/python3.12"}
    holders = {samples[0].uuid: Holder(pid=99, command="other.py")}
    return View(samples=samples, names=names, holders=holders, runs=runs)


def show(view, width):
    console = Console(width=width, file=io.StringIO(), markup=False, emoji=False)
    console.print(build_view(view))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    return lines


def cells(lines, first):
    """Give the cells of the line that begins so; in narrow views, two spaces lie between them."""
    line = next(line for line in lines if line.strip(" │").startswith(first))
    return [cell.strip() for cell in (line.split("│")[1:-1] if "│" in line else re.split(r"\s{2,}", line.strip()))]


def test_wide_terminals_show_all(view):
    lines = show(view, 200)
    assert cells(lines, "3")[:2] == ["3", LONG]
    assert cells(lines, "1")[2:5] == ["##########  97%", "#####.....  50% 70.0 GiB / 140.0 GiB", "650 / 700 W"]
    assert "train_a_language_model_of_ours.py" in cells(lines, "train_a")


def test_80_columns(view):
    lines = show(view, 80)
    assert cells(lines, "1") == ["1", "H200", "97%", "70.0 / 140.0 GiB", "650 W", "31 °C", "7 python3"]
    assert cells(lines, "2:1")[:2] == ["2:1", "A100 3g.20gb"]
    assert cells(lines, "3")[:3] == ["3", "RTX PRO 600…", "0%"]
    assert cells(lines, "60.0 GiB")
    assert cells(lines, "1234567 python3.12")
    assert cells(lines, "0")[-1] == "reserved by process"
    assert cells(lines, "train_a")[1:] == ["1234567", "0,1", "123456", "20.3", "2.0%", "11.0%", "0", "0 s"]
    assert cells(lines, "train.py")[1:3] == ["8", "2 x cpu"]


def test_60_columns(view):
    lines = show(view, 60)
    assert cells(lines, "1") == ["1", "H200", "97%", "70 / 140 GiB", "7 python3"]
    assert cells(lines, "train_a")[1:] == ["0,1", "123456", "20.3", "2.0%", "11.0%", "0"]
    assert sum("…" in line for line in lines) == 3  # two names of GPUs and one of a run


def show_run(width, pids, devices):
    samples = nvml.sample_devices(FakeNvml(*(Gpu(uuid=f"GPU-{n}") for n in range(8))))
    figures = Figures(devices=devices, num_steps=1)
    runs = [Run(pid=pid, command="train.py", figures=figures, age_s=3.0, meets_at="a:1") for pid in pids]
    return cells(show(View(samples=samples, names={}, holders={}, runs=runs), width), "train.py")


@pytest.mark.parametrize(
    ("labels", "shown"), [(range(8), "0-7"), ([3, 2, 1], "1-3"), ([0, 2, 4], "0,2,4"), ([0, 1], "0,1"), ([5], "5")]
)
def test_gpus_in_a_row_are_a_range_where_it_is_narrow(labels, shown):
    assert shown in show_run(60, [8], [f"GPU-{n}" for n in labels])


def test_ranks_of_one_run_are_counted_where_it_is_narrow():
    assert show_run(200, [11, 12, 13], ["cpu"])[1] == "11,12,13"
    assert show_run(70, [11, 12, 13], ["cpu"])[1:3] == ["11+2", "3 x cpu"]
