"""Locks between real processes: one holder, free when it ends, however it ends."""

import os
import subprocess
import sys
import textwrap
import time

import pytest

from everygpu.locks import is_locked, try_lock, wait_for_lock

HOLD = """
    import sys, time
    from pathlib import Path
    from everygpu.locks import try_lock
    lock = try_lock(Path(sys.argv[1]))
    print("none" if lock is None else "held", flush=True)
    {then}
"""


def start(path, then="time.sleep(60)"):
    """Start a process that takes the lock and says whether it got it."""
    code = textwrap.dedent(HOLD).format(then=then)
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def stop(process):
    process.kill()
    process.wait()
    process.stdout.close()


def test_one_holder_in_one_process(tmp_path):
    path = tmp_path / "a.lock"
    lock = try_lock(path)
    assert try_lock(path) is None
    assert is_locked(path)
    lock.release()
    assert not is_locked(path)
    with try_lock(path):
        assert is_locked(path)
    assert not is_locked(path)


def test_release_twice(tmp_path):
    lock = try_lock(tmp_path / "a.lock")
    lock.release()
    with try_lock(tmp_path / "a.lock"):
        lock.release()
        assert is_locked(tmp_path / "a.lock")


def test_text_of_the_holder_can_be_read_by_others(tmp_path):
    path = tmp_path / "a.lock"
    with try_lock(path) as lock:
        lock.write("a long text")
        lock.write("short")
        assert path.read_text() == "short"
    lock.write("after release nothing is written")
    assert path.read_text() == "short"


def test_asking_makes_no_file(tmp_path):
    assert not is_locked(tmp_path / "a.lock")
    assert os.listdir(tmp_path) == []


def test_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        try_lock(tmp_path / "none" / "a.lock")


def test_another_process_holds_it_until_it_is_killed(tmp_path):
    path = tmp_path / "a.lock"
    process, said = start(path)
    try:
        assert said == "held"
        assert try_lock(path) is None
        second, said = start(path, then="")
        stop(second)
        assert said == "none"
    finally:
        stop(process)
    with try_lock(path) as lock:
        assert lock is not None


def test_waiting_ends_when_the_holder_does(tmp_path):
    path = tmp_path / "a.lock"
    process, _ = start(path, then="time.sleep(0.2)")
    lock = wait_for_lock(path, timeout_s=60)
    stop(process)
    assert lock is not None
    lock.release()


def test_waiting_ends_with_the_time(tmp_path):
    path = tmp_path / "a.lock"
    with try_lock(path):
        begin = time.monotonic()
        assert wait_for_lock(path, timeout_s=0.1) is None
        assert time.monotonic() - begin < 60


def test_started_programs_do_not_keep_it(tmp_path):
    path = tmp_path / "a.lock"
    then = "import subprocess; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(5)'], stdout=-3)"
    process, said = start(path, then=then)
    assert said == "held"
    process.wait()
    stop(process)
    assert not is_locked(path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_process_that_lets_go_leaves_it_to_its_parent(tmp_path):
    path = tmp_path / "a.lock"
    then = (
        "import os; pid = os.fork();"
        "lock.release() if pid == 0 else (os.waitpid(pid, 0), print('forked', flush=True), time.sleep(60))"
    )
    process, _ = start(path, then=then)
    assert process.stdout.readline() == "forked\n"
    try:
        assert is_locked(path)
    finally:
        stop(process)


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="links are followed here")
def test_link_is_no_lock_and_its_target_stays(tmp_path):
    path, target = tmp_path / "a.lock", tmp_path / "precious"
    target.write_text("kept")
    path.symlink_to(target)
    for ask in (try_lock, is_locked):
        with pytest.raises(OSError):
            ask(path)
    assert target.read_text() == "kept"
    path.unlink()
    path.symlink_to(tmp_path / "new")
    with pytest.raises(OSError):
        try_lock(path)
    assert not (tmp_path / "new").exists()
