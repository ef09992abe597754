"""What is believed of copies between GPUs, what is remembered of it, and what is made of the test's words and end."""

import json
import logging
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from everygpu.child import python_command
from everygpu.devices import p2p
from everygpu.devices.p2p import (
    HANGING,
    MODULE,
    VARIABLE,
    PairReport,
    child_environ,
    examine,
    examine_and_keep,
    judge,
    keep,
    look_up,
    trusted_peers,
)
from everygpu.errors import OptionError
from tests.devices.fake_nvml import FakeNvml, two_h200s

UUIDS = ["aaaa", "bbbb", "cccc"]
RIGHT = PairReport(verdict="right")
WRONG = PairReport(verdict="wrong", detail="4104 bytes by a kernel")
HANGS = PairReport(verdict="hangs", detail="no answer")


def cuda(*indices):
    return [torch.device("cuda", index) for index in indices]


def reports(**broken):
    """Make reports of three GPUs, right but for those named: ``reports(_01=WRONG)``."""
    pairs = {(i, j): RIGHT for i in range(3) for j in range(3) if i != j}
    return pairs | {(int(name[1]), int(name[2])): report for name, report in broken.items()}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Three GPUs with peer access, whose test says what is put into the returned object."""
    state = SimpleNamespace(reports=reports(), commands=[], peers=True, delay_s=0.0)

    def examine(command, environ, num_devices, limit_s):
        state.commands.append(command)
        time.sleep(state.delay_s)
        return state.reports

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / "boot_id").write_text("boot\n")
    monkeypatch.setattr(p2p, "BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(p2p, "examine", examine)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: state.peers)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=UUIDS[i]))
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*two_h200s()))
    p2p._broken_pairs.cache_clear()
    yield state
    p2p._broken_pairs.cache_clear()


def forget_this_process():
    p2p._broken_pairs.cache_clear()


CPU = torch.device("cpu")


@pytest.mark.parametrize("devices", [[], cuda(1), cuda(1, 1), [CPU] * 4, [CPU, *cuda(2)]])
def test_one_gpu_and_the_cpu_are_not_tested(machine, devices):
    assert trusted_peers(devices)
    assert machine.commands == []


def test_sound_machine_is_trusted_and_tested_once(machine, caplog):
    assert trusted_peers(cuda(0, 1, 2))
    assert trusted_peers(cuda(2, 0))
    forget_this_process()
    assert trusted_peers(cuda(0, 1))
    assert len(machine.commands) == 1
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("report", "words"),
    [(WRONG, "arrive wrong (4104 bytes by a kernel)"), (HANGS, "never arrive")],
)
def test_broken_pair_is_not_trusted_and_told_once(machine, caplog, report, words):
    machine.reports = reports(_20=report)
    assert not trusted_peers(cuda(0, 1, 2))
    assert not trusted_peers(cuda(0, 2))
    assert trusted_peers(cuda(0, 1))
    (record,) = caplog.records
    assert f"Direct copies from cuda:2 to cuda:0 {words}" in record.message
    assert "host memory" in record.message
    forget_this_process()
    assert not trusted_peers(cuda(0, 2))
    assert len(machine.commands) == 1
    keep(UUIDS, dict.fromkeys(reports(), report))
    forget_this_process()
    assert not trusted_peers(cuda(0, 1))
    assert "as between 5 more pair(s)" in caplog.text


def test_without_peer_access_the_driver_stages_and_nothing_is_tested(machine):
    machine.peers = False
    assert trusted_peers(cuda(0, 1))
    assert machine.commands == []


def test_what_could_not_be_tested_is_trusted_and_tested_again(machine):
    machine.reports = dict.fromkeys(reports(), PairReport(verdict="untested"))
    assert trusted_peers(cuda(0, 1))
    forget_this_process()
    trusted_peers(cuda(0, 1))
    assert len(machine.commands) == 2


def test_another_driver_or_boot_is_tested_again(machine, monkeypatch, tmp_path):
    """Settings of IOMMU and ACS change with a boot."""
    trusted_peers(cuda(0, 1))
    forget_this_process()
    monkeypatch.setattr(FakeNvml, "nvmlSystemGetDriverVersion", lambda self: "999.1")
    trusted_peers(cuda(0, 1))
    forget_this_process()
    machine.reports = reports(_01=WRONG)
    (tmp_path / "boot_id").write_text("another\n")
    assert not trusted_peers(cuda(0, 1))
    assert len(machine.commands) == 3


def test_machines_that_share_a_home_keep_their_verdicts(machine, tmp_path):
    theirs = ["dddd", "eeee"]
    keep(UUIDS, reports(_01=WRONG))
    (tmp_path / "boot_id").write_text("another\n")
    keep(theirs, {(0, 1): HANGS, (1, 0): RIGHT})
    assert look_up(theirs) == {(0, 1): HANGS, (1, 0): RIGHT}
    assert look_up(UUIDS) is None
    (tmp_path / "boot_id").write_text("boot\n")
    assert look_up(UUIDS) == reports(_01=WRONG)
    assert look_up(theirs) is None


def test_new_gpu_is_tested_and_verdicts_belong_to_gpus_not_to_their_order(machine):
    keep(UUIDS[:2], {(0, 1): RIGHT, (1, 0): WRONG})
    assert look_up(UUIDS) is None
    assert look_up(UUIDS[1::-1]) == {(0, 1): WRONG, (1, 0): RIGHT}
    trusted_peers(cuda(0, 1))
    assert len(machine.commands) == 1


@pytest.mark.parametrize(("policy", "trusted"), [("trust", True), ("staged", False)])
def test_variable_decides_without_a_test(machine, monkeypatch, policy, trusted):
    machine.reports = reports(_01=WRONG)
    monkeypatch.setenv(VARIABLE, policy)
    assert trusted_peers(cuda(0, 1)) == trusted
    assert machine.commands == []
    monkeypatch.setenv(VARIABLE, "no")
    forget_this_process()
    with pytest.raises(OptionError, match="='no' is unknown. Set 'test', 'trust' or 'staged'"):
        trusted_peers(cuda(0, 1))


def test_folder_that_cannot_be_written_is_no_harm(machine, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert trusted_peers(cuda(0, 1))


def test_threads_that_ask_at_once_wait_for_one_test(machine):
    machine.delay_s = 0.1
    threads = [threading.Thread(target=trusted_peers, args=(cuda(0, 1),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(machine.commands) == 1


@pytest.mark.usefixtures("machine")
def test_process_sees_the_same_devices_in_the_same_order():
    environ = child_environ(UUIDS, {"CUDA_VISIBLE_DEVICES": "7", "X": "y"})
    assert environ["CUDA_VISIBLE_DEVICES"] == "GPU-aaaa,GPU-bbbb,GPU-cccc"
    assert environ["X"] == "y"


def test_devices_without_a_uuid_are_known_by_their_place(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(name="old ROCm"))
    assert p2p.list_uuids() == ["0", "1", "2"]
    assert trusted_peers(cuda(0, 1))
    assert len(machine.commands) == 1


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.cards(2)
def test_real_gpus_are_tested_in_seconds(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    count = torch.cuda.device_count()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
    began = time.monotonic()
    found = examine_and_keep(uuids)
    assert time.monotonic() - began < 40  # with the start of a process that loads torch from a cold disk
    assert {report.verdict for report in found.values()} == {"right"}, found
    began = time.monotonic()
    assert look_up(uuids) is not None
    assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"machine": ["580.159.03", "boot"], "pairs": {"aaaa bbbb": {"verdict": "right", "detail": ""}}}',
        '{"pairs": {"aaaa bbbb": 3}}',
        '{"pairs": 3}',
        '{"pairs": {"aaaa bbbb": {"machine": ["580.159.03", "boot"], "verdict": "right"}}}',
        "[" * 100_000,
        None,
    ],
)
def test_damaged_memory_is_made_anew_or_done_without(machine, tmp_path, caplog, text):
    keep(UUIDS, reports())
    (path,) = tmp_path.rglob("p2p.json")
    if text is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_text(text)
    assert trusted_peers(cuda(0, 1))
    assert len(machine.commands) == 1
    assert text is None or look_up(UUIDS) == reports()
    assert caplog.text == ""


UNTESTED = PairReport(verdict="untested")
SKIPPED = PairReport(verdict="hangs", detail="not tried any more")


def state(*pairs, ready=(0, 1), now=None):
    """Write a line of the test."""
    return json.dumps({"ready": ready, "pairs": pairs, "now": now})


def test_what_the_test_says_between_what_others_write():
    noise = 'hello\n[1]\n{"x": 1}\n5\n\xff\n'
    done = state((0, 1, None), (1, 0, "4104 bytes"))
    assert judge(f"{noise}{state(now=[0, 1])}\n{noise}{done}\n{noise}", "exit code 0", 2) == {
        (0, 1): RIGHT,
        (1, 0): PairReport(verdict="wrong", detail="4104 bytes"),
    }


@pytest.mark.parametrize(("output", "ending"), [("", HANGING), (f"\n{HANGING}0:00:04)!", "exit code 1")])
def test_a_pair_that_hangs_is_named_and_those_after_it_count_for_no_better(output, ending):
    pairs = judge(state((0, 1, None), ready=[0, 1, 2], now=[1, 0]) + output, ending, 4)
    assert [pairs[pair] for pair in ((0, 1), (1, 0), (2, 1), (2, 3))] == [RIGHT, HANGS, SKIPPED, UNTESTED]


def test_an_end_in_the_middle_of_a_pair_is_a_fault():
    pairs = judge(state(now=[0, 1]), "exit code 3", 2)
    assert pairs[0, 1] == PairReport(verdict="wrong", detail="the test ended with exit code 3")
    assert pairs[1, 0].verdict == "wrong"


def run(code, limit_s):
    return examine([sys.executable, "-S", "-c", f"import sys, time\n{code}"], {}, 2, limit_s)


def test_without_a_first_pair_there_is_no_verdict():
    assert set(judge("", "exit code 3", 2).values()) == {UNTESTED}
    assert set(examine(["/no/such/python"], {}, 2, 60).values()) == {UNTESTED}
    assert set(run("time.sleep(100)", 0.3).values()) == {UNTESTED}
    pairs = judge(state((0, 2, None), (2, 0, None), ready=[0, 2]), "exit code 0", 3)
    assert {pair for pair, report in pairs.items() if report == UNTESTED} == {(0, 1), (1, 0), (1, 2), (2, 1)}


def test_process_that_cannot_be_killed_does_not_hold_us_up(monkeypatch, caplog):
    processes = []

    class Stuck(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            processes.append(self)

        def kill(self):
            pass

    monkeypatch.setattr(subprocess, "Popen", Stuck)
    monkeypatch.setattr(p2p, "_END_S", 0.1)
    run("time.sleep(100)", 0.1)
    assert "can't be ended" in caplog.text
    (process,) = processes
    super(Stuck, process).kill()
    process.communicate()


@pytest.mark.usefixtures("warm_python")
def test_module_runs_as_a_program():
    done = subprocess.run(python_command(MODULE, "0"), env={}, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"ready": [], "pairs": [], "now": None}
    assert done.stderr == ""
