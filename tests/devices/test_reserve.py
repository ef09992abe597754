"""Reservations between real processes, and every way they can't be had."""

import logging
import sys
import threading

import pytest
from filelock import FileLock

from everygpu.devices import reserve as reservations
from everygpu.devices.reserve import OWN, Holder, find_holders, name_command, reserve
from everygpu.errors import DeviceError
from tests.devices.fake_nvml import make_sample

BOX = [make_sample(index) for index in range(4)]


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Keep reservations in a folder of this test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "everygpu" / "reserved"


def take_free(count):
    """Choose the first free ones of the box."""

    def select(holders):
        free = [sample for sample in BOX if sample.uuid not in holders]
        if len(free) < count:
            raise DeviceError("too few")
        return free[:count]

    return select


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["/usr/bin/everygpu", "run", "--gpus", "2", "dir/train.py", "config.py"], "train.py"),
        (["/site-packages/everygpu/__main__.py", "run", "train.py"], "train.py"),
        (["dir/train.py", "other.py"], "train.py"),
        (["/usr/bin/everygpu", "run", "train"], "everygpu"),
        ([], "python"),
    ],
)
def test_run_is_named_by_its_script(monkeypatch, argv, name):
    monkeypatch.setattr(sys, "argv", argv)
    assert name_command() == name


def test_own_gpus_are_not_held_by_another():
    held = reserve(take_free(2))
    assert set(find_holders({OWN: BOX[0].uuid})) == {BOX[1].uuid}
    assert find_holders({OWN: f"{BOX[0].uuid},{BOX[1].uuid}"}) == {}
    held.release()
    assert find_holders({}) == {}


def test_failing_choice_reserves_nothing_and_ends_the_turn():
    with pytest.raises(DeviceError, match="too few"):
        reserve(take_free(5))
    assert find_holders({}) == {}
    reserve(take_free(4)).release()


def test_many_at_once_share_the_box_without_overlap():
    taken, refused = [], []
    start = threading.Barrier(6)

    def run():
        start.wait()
        try:
            taken.append(reserve(take_free(2)))
        except DeviceError:
            refused.append(1)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = sorted(device.index for reservation in taken for device in reservation.devices)
    for reservation in taken:
        reservation.release()
    # Never one each and both refused: choosing is done by one at a time.
    assert got == [0, 1, 2, 3]
    assert len(refused) == 4


def test_uuid_with_slashes_is_no_folder(folder):
    old = make_sample(0, uuid="MIG-GPU-5c89852c/1/0")
    held = reserve(lambda holders: [old])
    assert set(find_holders({})) == {old.uuid}
    assert {path.parent for path in folder.glob("**/*.lock")} == {folder}
    held.release()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "not json",
        '{"pid": "x", "command": "y"}',
        '{"pid": 1e999, "command": "y"}',
    ],
)
def test_holder_that_does_not_describe_itself(folder, text):
    reserve(take_free(1)).release()
    (path,) = folder.glob("*.lock")
    path.with_suffix(".json").write_text(text)
    with FileLock(path):
        (holder,) = find_holders({}).values()
    assert holder == Holder(pid=None, command=None)
    assert holder.reason == "reserved by another run"


def test_without_a_folder_the_choice_is_made_and_told(monkeypatch, caplog):
    def refuse():
        raise PermissionError("read-only")

    monkeypatch.setattr(reservations, "runtime_folder", refuse)
    held = reserve(take_free(1))
    assert (held.devices, held.locks) == ([BOX[0]], ())
    assert find_holders() == {}
    assert "GPUs can't be reserved (read-only)" in caplog.text


def test_file_system_without_locks_is_told(monkeypatch, caplog):
    def refuse(handle, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("filelock._unix.fcntl.flock", refuse)
    assert reserve(take_free(1)).locks == ()
    assert "No locks available" in caplog.text


def test_a_run_that_stops_while_choosing_does_not_stop_others(monkeypatch, folder, caplog):
    caplog.set_level(logging.WARNING)
    reserve(take_free(1)).release()
    monkeypatch.setattr(reservations, "_TURN_S", 0.05)
    with FileLock(folder / "choosing"):
        held = reserve(take_free(1))
    assert held.devices == [BOX[0]]
    assert "not waiting" in caplog.text
    held.release()
