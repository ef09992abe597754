"""The user's own folders, and files that are never seen half written."""

import os
import stat
import sys
import tempfile

import pytest

from everygpu.folders import cache_folder, runtime_folder, write_whole

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


def test_folder_that_cannot_be_made_is_an_os_error(tmp_path):
    (tmp_path / "file").touch()
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
