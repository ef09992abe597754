"""``everygpu devices``: the table, the JSON, and the words for a machine without GPUs."""

import io
import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from everygpu.cli import devices, main
from everygpu.devices.reserve import Holder
from tests.cli.runs import everygpu
from tests.devices.fake_nvml import GIB, make_sample
from tests.devices.real_gpus import find_gpus


def as_visible(position, sample, **changes):
    return replace(sample, **({"device": torch.device("cuda", position)} | changes))


BOX = [make_sample(0), make_sample(1, free=3 * GIB, utilization_pct=97.0, processes=((7, 5 * GIB), (8, None)))]


@pytest.fixture
def invoke(monkeypatch):
    """Run the command on a machine where NVML sees some GPUs, some are reserved, and torch sees ``visible``."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)

    def run(samples, *arguments, visible=(), holders=None, names=None):
        monkeypatch.setattr(devices, "visible_devices", lambda: list(visible))
        monkeypatch.setattr(devices.nvml, "sample_devices", lambda: samples)
        monkeypatch.setattr(devices.nvml, "name_processes", lambda pids: names or {})
        monkeypatch.setattr(devices, "find_holders", lambda: holders or {})
        return CliRunner().invoke(main, ["devices", *arguments])

    return run


@pytest.fixture
def show(invoke):
    """The same, of which the output is wanted."""

    def succeed(*arguments, **options):
        result = invoke(*arguments, **options)
        assert result.exit_code == 0, result.output
        return result.stdout

    return succeed


@pytest.mark.parametrize("samples", [None, []])
def test_no_gpu_is_said_plainly(show, samples):
    assert show(samples) == "No NVIDIA GPU found. For other accelerators pass --torch.\n"
    assert show(samples, "--torch") == "No GPU found.\n"


def cells(out):
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]


def test_table_shows_logical_and_physical(show, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    out = show(BOX, names={7: "/usr/bin/python3"})
    assert cells(out) == [
        ["cuda:0", "1", "NVIDIA H200", "3.0 GiB / 140.0 GiB", "97%", "python3 7 (5.0 GiB)", BOX[1].uuid],
        ["", "", "", "", "", "? 8 (?)", ""],
        ["cuda:1", "0", "NVIDIA H200", "100.0 GiB / 140.0 GiB", "0%", "-", BOX[0].uuid],
    ]
    assert "hidden" not in out


def test_torch_itself_is_asked_when_it_is_wanted(show):
    rows = cells(show(BOX, "--torch", visible=[as_visible(0, BOX[1]), as_visible(1, BOX[0])]))
    assert [(row[0], row[1]) for row in rows if row[0]] == [("cuda:0", "1"), ("cuda:1", "0")]


def test_hidden_gpus_are_listed_with_the_reason(show, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    out = show(BOX)
    assert "1 GPU is hidden by CUDA_VISIBLE_DEVICES='1'." in out
    assert out.index(BOX[1].uuid) < out.index(BOX[0].uuid)


@pytest.mark.parametrize(
    ("samples", "arguments", "words"),
    [
        (BOX, ["--torch"], "2 GPUs are out of torch's reach. `everygpu doctor` says why."),
        ([make_sample(0, name="[bold]x")], [], "[bold]x"),
        ([make_sample(0, is_mig=True)], [], "NVIDIA H200 (MIG mode)"),
        (None, ["--json"], '"devices": []'),
    ],
)
def test_what_is_said(show, samples, arguments, words):
    assert words in show(samples, *arguments)


def test_unlike_gpus_have_no_names_before_cuda_is_asked(show, monkeypatch):
    box = [make_sample(0, name="NVIDIA T400"), BOX[1]]
    out = show(box)
    assert out.count("cuda:?") == 2
    assert "CUDA numbers unlike GPUs fastest first" in out
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert "cuda:1" in show(box)


def test_json_has_bytes_and_hidden_devices(show, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    records = json.loads(show(BOX, "--json"))["devices"]
    assert records[0] == {
        "device": "cuda:0",
        "index": 1,
        "name": "NVIDIA H200",
        "uuid": BOX[1].uuid,
        "total_memory_bytes": 140 * GIB,
        "free_memory_bytes": 3 * GIB,
        "utilization_pct": 97.0,
        "fault": None,
        "processes": [{"pid": 7, "used_memory_bytes": 5 * GIB}, {"pid": 8, "used_memory_bytes": None}],
        "reserved_by": None,
    }
    assert (records[1]["device"], records[1]["index"]) == (None, 0)


def test_what_is_not_known_has_a_sign(show):
    unknown = dict.fromkeys(["index", "uuid", "free_memory_bytes", "total_memory_bytes", "utilization_pct"])
    mps = as_visible(0, BOX[0], device=torch.device("mps"), name="MPS", **unknown)
    assert cells(show(None, "--torch", visible=[mps])) == [["mps", "-", "MPS", "? / ?", "-", "-", "-"]]


def test_narrow_terminal_loses_nothing_of_the_uuid():
    stream = io.StringIO()
    Console(file=stream, width=80).print(devices.build_table([("cuda:0", BOX[0])], {}))
    column = [line.split("│")[7].strip() for line in stream.getvalue().splitlines() if "│" in line]
    assert "".join(column) == BOX[0].uuid


HOLDERS = {BOX[0].uuid: Holder(pid=12, command="train.py")}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--select", "2"], [0, 1]),
        (["--select", "1"], [0]),
        (["--select", "1,0"], [1, 0]),
        (["--select", "auto", "--exclude", "0"], [1]),
        (["--exclude", "0,7"], [1]),
        (["--exclude", "7, 0"], [1]),
        (["--max-utilization", "50"], [0]),
        (["--name", "h200"], [0, 1]),
        ([], [0, 1]),
    ],
)
def test_visible_format_is_a_value_for_the_variable(show, arguments, expected):
    out = show(BOX, *arguments, "--format", "visible")
    assert out == ",".join(BOX[index].uuid for index in expected) + "\n"


@pytest.mark.parametrize("arguments", [["--select", "3"], ["--min-free", "101GiB"], ["--name", "A100"]])
def test_selection_that_cannot_be_met_is_three_and_prints_nothing_to_stdout(invoke, arguments):
    result = invoke(BOX, *arguments, "--format", "visible")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "GPU 1   NVIDIA H200" in result.stderr
    options = {option for parameter in main.commands["devices"].params for option in parameter.opts}
    assert set(re.findall(r"--[a-z-]+", result.stderr)) <= options


def test_selected_rows_come_in_the_order_of_the_choice(show):
    records = json.loads(show(BOX, "--select", "1,0", "--json"))["devices"]
    assert [record["device"] for record in records] == ["cuda:1", "cuda:0"]
    table = show(BOX, "--select", "1")
    assert "cuda:0" in table
    assert "cuda:1" not in table


@pytest.mark.parametrize(
    "arguments",
    [["--watch", "--json"], ["--watch", "--format=visible"], ["--select", "x"]],
)
def test_wrong_usage_is_two(invoke, arguments):
    assert invoke(BOX, *arguments).exit_code == 2


@pytest.fixture
def sleeps(monkeypatch):
    """Interrupt at the third pause; gives the lengths of the pauses."""
    times = []

    def sleep(seconds):
        times.append(seconds)
        if len(times) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(devices.time, "sleep", sleep)
    return times


def test_watch_asks_again_until_interrupted(show, sleeps):
    assert show(BOX[:1], "--watch").count("NVIDIA H200") == 3
    assert sleeps == [2.0] * 3


def test_watch_of_a_machine_without_gpus_ends(show, sleeps):
    assert show([], "--watch") == "No NVIDIA GPU found. For other accelerators pass --torch.\n"
    assert sleeps == []


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 80 columns, and what is written to it."""
    stream = io.StringIO()

    def make():
        return Console(file=stream, force_terminal=True, width=80, color_system=None)

    monkeypatch.setattr(devices, "make_console", make)
    return stream


@pytest.mark.usefixtures("sleeps")
@pytest.mark.parametrize(("kind", "is_redrawn"), [("dumb", False), ("xterm", True)])
def test_watch_shows_something_on_every_terminal(invoke, terminal, monkeypatch, kind, is_redrawn):
    monkeypatch.setenv("TERM", kind)
    assert invoke(BOX[:1], "--watch").exit_code == 0
    assert terminal.getvalue().count("NVIDIA") == 3
    assert ("\x1b" in terminal.getvalue()) == is_redrawn


@pytest.mark.usefixtures("sleeps")
def test_watch_has_a_line_a_device_with_runs_and_programs(show):
    out = show(BOX, "--watch", holders=HOLDERS, names={7: "/usr/bin/python3"})
    assert cells(out)[:2] == [
        ["cuda:0", "0", "NVIDIA H200", "100.0 GiB / 140.0 GiB", "0%", "reserved by process 12 (train.py)"],
        ["cuda:1", "1", "NVIDIA H200", "3.0 GiB / 140.0 GiB", "97%", "python3 7 (5.0 GiB), ? 8 (?)"],
    ]


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs nvidia-smi")
def test_real_figures_are_those_of_nvidia_smi_and_hidden_gpus_are_listed_too():
    samples = find_gpus(1)
    command = ["nvidia-smi", "--query-gpu=uuid,index,name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    smi = {uuid: row for uuid, *row in (line.split(", ") for line in lines)}
    hiding = {"CUDA_VISIBLE_DEVICES": samples[-1].uuid}
    records = json.loads(everygpu("devices", "--json", **hiding).stdout)["devices"]
    assert [(record["device"], record["uuid"]) for record in records[:1]] == [("cuda:0", samples[-1].uuid)]
    assert all(record["device"] is None for record in records[1:])
    assert {record["uuid"] for record in records} == set(smi)
    for record in records:
        index, name, total, free = smi[record["uuid"]]
        assert (record["index"], record["name"]) == (int(index), name)
        assert record["total_memory_bytes"] // 2**20 == int(total)
        # Asking takes some memory, too, where it is the first to wake the GPU.
        assert abs(record["free_memory_bytes"] / 2**20 - int(free)) < 1024
