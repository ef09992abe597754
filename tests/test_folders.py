"""The user's own folders, and files that are never seen half written."""

import json
import os
import stat
import sys
import tempfile
from types import SimpleNamespace

import pytest

from everygpu import folders
from everygpu.devices.figures import Figures, Publisher
from everygpu.devices.reserve import reserve
from everygpu.folders import cache_folder, open_own, read_json, runtime_folder, write_whole

pwd = pytest.importorskip("pwd")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the folders of POSIX systems")


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """Stand in for /tmp."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_runtime_folder_is_where_the_session_says(tmp_path):
    folder = runtime_folder({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert folder == tmp_path / "everygpu"
    assert folder.is_dir()
    assert mode(folder) == 0o700


def test_what_is_written_is_for_this_user_alone(tmp_path, monkeypatch):
    """Whatever umask says; so SECURITY.md tells it."""
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    before = os.umask(0)
    try:
        held = reserve(lambda holders: [SimpleNamespace(uuid="GPU-1")])
        publisher = Publisher()
        publisher.publish(Figures(devices=("GPU-1",), num_steps=1))
        written = list((tmp_path / "everygpu").rglob("*"))
        modes = {path.relative_to(tmp_path).parts[1]: mode(path) for path in written if path.is_dir()}
        files = {mode(path) for path in written if path.is_file()}
    finally:
        os.umask(before)
        held.release()
        publisher.close()
    assert modes == {"reserved": 0o700, "figures": 0o700}
    assert len(written) > 6
    assert files == {0o600}


@pytest.mark.parametrize("told", [None, "", "/no/such/folder"])
def test_runtime_folder_without_a_session_is_private_in_the_shared_one(shared, told):
    environ = {} if told is None else {"XDG_RUNTIME_DIR": told}
    folder = runtime_folder(environ)
    assert folder == shared / f"everygpu-{os.getuid()}"
    assert mode(folder) == 0o700
    assert runtime_folder(environ) == folder


@pytest.mark.parametrize("trap", ["link", "file", "open to all"])
def test_somebody_elses_folder_is_not_used(shared, tmp_path, trap):
    bait = shared / f"everygpu-{os.getuid()}"
    if trap == "link":
        (tmp_path / "theirs").mkdir()
        bait.symlink_to(tmp_path / "theirs")
    elif trap == "file":
        bait.touch()
    else:
        bait.mkdir()
        bait.chmod(0o777)
    cache = tmp_path / "cache"
    assert runtime_folder({"XDG_CACHE_HOME": str(cache)}) == cache / "everygpu" / "run"


@pytest.mark.parametrize("told", [None, "", "relative/path"])
def test_cache_folder_by_default(tmp_path, monkeypatch, told):
    monkeypatch.setenv("HOME", str(tmp_path))
    environ = {} if told is None else {"XDG_CACHE_HOME": told}
    assert cache_folder(environ) == tmp_path / ".cache" / "everygpu"
    assert (tmp_path / ".cache" / "everygpu").is_dir()


def test_folder_that_cannot_be_made_is_an_os_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(OSError):
        cache_folder({"XDG_CACHE_HOME": str(tmp_path / "file")})


def test_write_whole_replaces(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, "old")
    write_whole(path, "ne\u00fc")
    assert path.read_text(encoding="utf-8") == "ne\u00fc"
    assert os.listdir(tmp_path) == ["a.json"]
    assert mode(path) == 0o600


def test_write_that_fails_leaves_the_old_text_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_whole(path, "old")

    def refuse(*args):
        raise PermissionError("in use")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("trap", ["link", "file", "open to all", "of another user", "relative"])
def test_session_folder_of_others_is_not_used(shared, tmp_path, monkeypatch, trap):
    told = tmp_path / "session"
    if trap == "link":
        (tmp_path / "theirs").mkdir()
        told.symlink_to(tmp_path / "theirs")
    elif trap == "file":
        told.touch()
    else:
        told.mkdir()
    if trap == "open to all":
        told.chmod(0o777)
    elif trap == "of another user":
        (shared / f"everygpu-{os.geteuid()}").mkdir(mode=0o700)
        own = folders._is_own
        monkeypatch.setattr(folders, "_is_own", lambda found: not os.path.samestat(found, told.stat()) and own(found))
    monkeypatch.chdir(tmp_path)
    environ = {"XDG_RUNTIME_DIR": "session" if trap == "relative" else str(told)}
    assert runtime_folder(environ) == shared / f"everygpu-{os.geteuid()}"
    assert not told.is_dir() or not any(told.iterdir())


def test_folder_of_ours_that_others_could_write_to_is_not_used(shared, tmp_path):
    (tmp_path / "everygpu").mkdir()
    (tmp_path / "everygpu").chmod(0o777)
    assert runtime_folder({"XDG_RUNTIME_DIR": str(tmp_path)}) == shared / f"everygpu-{os.getuid()}"


def test_without_a_home_the_cache_is_in_the_shared_folder(shared, monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])  # as for a uid that is not in passwd
    folder = cache_folder({})
    assert folder == shared / f"everygpu-{os.getuid()}" / "cache"
    assert mode(folder) == 0o700


@pytest.mark.parametrize("fault", ["none", "read-only"])
def test_home_that_cannot_be_written_is_not_used(shared, tmp_path, monkeypatch, fault):
    home = tmp_path / "home"
    home.mkdir()
    if fault == "read-only":
        (home / ".cache" / "everygpu").mkdir(parents=True)
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: home not in path.parents and access(path, mode))
    else:
        (home / ".cache").touch()
    monkeypatch.setenv("HOME", str(home))
    assert cache_folder({}) == shared / f"everygpu-{os.getuid()}" / "cache"


def test_json_of_ours_is_read(tmp_path):
    write_whole(tmp_path / "a.json", '{"a": [1, "\u00fc"]}')
    assert read_json(tmp_path / "a.json") == {"a": [1, "\u00fc"]}


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 200_000, b"1" * 5000])
def test_no_json_is_a_value_error(tmp_path, text):
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(ValueError):
        read_json(tmp_path / "a.json")


def test_file_that_never_ends_is_a_value_error(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_MAX_BYTES", 10)
    (tmp_path / "a.json").write_text(json.dumps("a" * 20))
    with pytest.raises(ValueError, match="at most 10 bytes"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("trap", ["link", "pipe", "folder", "of another user"])
def test_what_is_no_file_of_ours_is_not_opened(tmp_path, monkeypatch, trap):
    path, target = tmp_path / "a.json", tmp_path / "target"
    if trap == "link":
        path.symlink_to(target)
        target.write_text("1")
    elif trap == "pipe":
        os.mkfifo(path)
    elif trap == "folder":
        path.mkdir()
    else:
        path.write_text("1")
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(OSError):
        read_json(path)
    with pytest.raises(OSError):
        open_own(path, os.O_RDWR | os.O_CREAT)
