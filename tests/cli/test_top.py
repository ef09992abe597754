"""``everygpu top``: GPUs, processes and runs, once, again and again, and as JSON."""

import json
import os

import pytest
from click.testing import CliRunner

from everygpu.cli import live, main, top
from everygpu.devices import nvml
from everygpu.devices.figures import Figures, Publisher
from everygpu.devices.reserve import reserve
from tests.devices.fake_nvml import GIB, H200_UUIDS, FakeNvml, Gpu, mig_gpu, two_h200s

BUSY = {
    "used": 70 * GIB,
    "utilization": 97,
    "processes": [(7, 60 * GIB), (8, None)],
    "temperature": 61,
    "power": 650_400,
}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Look for runs and reservations where there are none of this machine's."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def show(monkeypatch):
    """Run the command on a machine with some GPUs."""

    def invoke(*arguments, library):
        monkeypatch.setattr(nvml, "_import_pynvml", lambda: library)
        result = CliRunner().invoke(main, ["top", *arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    return invoke


def rows_of(out):
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]


@pytest.fixture
def training():
    """A run on both H200s, in this process."""
    publisher = Publisher("train.py")
    publisher.publish(
        Figures(
            devices=H200_UUIDS[::-1],
            num_steps=1200,
            steps_per_s=20.345,
            data_wait_pct=2.04,
            communication_pct=11.0,
            slowest_replica=0,
        )
    )
    yield
    publisher.close()


def test_gpus_as_they_are(show):
    idle, busy, more = rows_of(show("--once", library=FakeNvml(*two_h200s(**BUSY))))
    assert idle == ["0", "NVIDIA H200", ".......... 0%".replace(" 0", "   0"), *idle[3:]]
    assert idle[3:] == [".......... " + "  0% 0 B / 140.0 GiB", "76 / 700 W", "31 °C", "-"]
    assert busy[2:] == [
        "##########  97%",
        "#####.....  50% 70.0 GiB / 140.0 GiB",
        "650 / 700 W",
        "61 °C",
        "7 python3 60.0 GiB",
    ]
    assert more[-1] == "8 ?"


def test_what_is_not_reported_has_a_sign(show):
    library = FakeNvml(Gpu(total=None, utilization=None, power=None, temperature=None, name="NVIDIA GB10"))
    assert rows_of(show("--once", library=library)) == [["0", "NVIDIA GB10", "-", "-", "-", "-", "-"]]


def test_mig_instances_follow_their_gpu(show):
    labels = [row[0] for row in rows_of(show("--once", library=FakeNvml(Gpu(), mig_gpu())))]
    assert labels == ["0", "1", "1:0", "1:1"]


@pytest.mark.usefixtures("training")
def test_runs_are_shown_with_what_holds_them_up(show):
    run = rows_of(show("--once", library=FakeNvml(*two_h200s())))[-1]
    assert run[:-1] == ["train.py", str(os.getpid()), "1,0", "1200", "20.3", "2.0%", "11.0%", "1"]
    assert run[-1].endswith("s ago")


def test_ranks_of_one_run_are_one_line(show):
    own = os.getpid()
    first, second, other = (Publisher("train.py", meets_at=f"box:{port}") for port in (1, 1, 2))
    first.publish(Figures(devices=("cpu",), num_steps=8, steps_per_s=2.0, data_wait_pct=1.0))
    second.publish(Figures(devices=("cpu",), num_steps=7, steps_per_s=3.0, data_wait_pct=5.0))
    other.publish(Figures(devices=("cpu",), num_steps=1))
    together, apart = rows_of(show("--once", library=None))
    assert together[:-1] == ["train.py", f"{own},{own}", "cpu,cpu", "7", "2", "5.0%", "-", "-"]
    assert apart[1:4] == [str(own), "cpu", "1"]
    for publisher in (first, second, other):
        publisher.close()


@pytest.mark.parametrize("slowest", [None, 5, -1])
def test_run_of_which_little_is_known(show, slowest):
    publisher = Publisher("cpu.py")
    publisher.publish(Figures(devices=("cpu", "cpu"), num_steps=3, slowest_replica=slowest))
    out = show("--once", library=None)
    assert "No NVIDIA GPU" in out
    assert rows_of(out)[0][2:-1] == ["cpu,cpu", "3", "-", "-", "-", "-"]
    publisher.close()


def test_reservations_are_shown_until_a_process_is_there(show):
    library = FakeNvml(*two_h200s())
    held = reserve(lambda holders: nvml.sample_devices(library))
    assert f"reserved by process {os.getpid()}" in show("--once", library=library)
    library = FakeNvml(*two_h200s(**BUSY))
    assert show("--once", library=library).count("reserved") == 1
    held.release()


@pytest.mark.usefixtures("training")
def test_json_has_everything_in_plain_units(show):
    shown = json.loads(show("--json", library=FakeNvml(*two_h200s(**BUSY))))
    idle, busy = shown["devices"]
    assert idle["processes"] == []
    assert busy["uuid"] == H200_UUIDS[1]
    assert (busy["used_memory_bytes"], busy["utilization_pct"], busy["power_w"]) == (70 * GIB, 97.0, 650.4)
    assert busy["processes"][0] == {"pid": 7, "name": "/usr/bin/python3", "used_memory_bytes": 60 * GIB}
    assert busy["reserved_by"] is None
    (run,) = shown["runs"]
    assert (run["pid"], run["figures"]["steps_per_s"]) == (os.getpid(), 20.345)


@pytest.mark.parametrize("code", [FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND, FakeNvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH])
def test_machine_without_a_driver_or_with_a_broken_one(show, code):
    assert "No NVIDIA GPU" in show("--once", library=FakeNvml(fail_init=code))
    assert json.loads(show("--json", library=FakeNvml(fail_init=code)))["devices"] == []


def test_live_view_is_renewed_until_interrupted(show, monkeypatch):
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        if len(waited) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(live.time, "sleep", sleep)
    out = show("--interval", "1", library=FakeNvml(Gpu()))
    assert len(rows_of(out)) == 2
    assert waited == [1.0, 1.0]


def test_a_terminal_is_redrawn_in_place(monkeypatch):
    shown, waited = [], []

    class Screen:
        def __init__(self, first, **options):
            shown.append(first)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            shown.append("closed")

        def update(self, view, *, refresh):
            assert refresh
            shown.append(view)

    def sleep(seconds):
        waited.append(seconds)
        if len(waited) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(live, "Live", Screen)
    monkeypatch.setattr(live.time, "sleep", sleep)
    monkeypatch.setenv("FORCE_COLOR", "1")  # how rich is told that it writes to a terminal
    views = iter("abcdef")
    live.show_live(lambda: next(views), 0.5)
    assert shown == ["a", "b", "c", "closed"]


def test_torch_is_not_needed():
    import subprocess
    import sys

    code = "import sys; sys.argv[1:] = ['top', '--once']\nfrom everygpu.cli import main\n"
    code += "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


@pytest.mark.gpu
def test_real_gpus(monkeypatch):
    view = top.look()
    assert view.samples
    shown = top.describe(view)["devices"]
    assert all(device["power_w"] > 0 and device["temperature_c"] > 0 for device in shown)


def test_names_of_others_are_shown_and_not_obeyed(show, monkeypatch):
    library = FakeNvml(*two_h200s(**BUSY))
    monkeypatch.setattr(library, "nvmlSystemGetProcessName", lambda pid: "/bin/a\x1b]0;owned\x07\nb")
    publisher = Publisher("train\x1b[2J\x9b1m\u202e.py")
    publisher.publish(Figures(devices=("GPU-\x1b[31m",), num_steps=3))
    out = show("--once", library=library)
    assert not any(letter in out for letter in "\x1b\x07\x9b\u202e")
    assert r"a\x1b]0;owned\x07\nb" in out.replace("\n", "")
    assert r"train\x1b[2J\x9b1m\u202e.py" in out
    publisher.close()
