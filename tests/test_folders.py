"""The user's own folders, and files that are never seen half written."""

import os
import stat
import sys
import tempfile

import pytest

from everygpu.devices.reserve import reserve
from everygpu.folders import cache_folder, runtime_folder, write_whole
from tests.devices.fake_nvml import make_sample

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the folders of POSIX systems")


@pytest.fixture(autouse=True)
def session(tmp_path, monkeypatch):
    """Stand in for /tmp, the home and the session's folder."""
    for name, variable in (("tmp", "TMPDIR"), ("home", "HOME"), ("session", "XDG_RUNTIME_DIR")):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "session"


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_written_is_for_this_user_alone(session, monkeypatch):
    """Whatever umask says; so SECURITY.md tells it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(session))
    before = os.umask(0)
    try:
        held = reserve(lambda holders: [make_sample(1)])
        write_whole(cache_folder() / "p2p.json", "{}")
        written = list((session / "everygpu").rglob("*"))
        modes = {path.relative_to(session).parts[1]: mode(path) for path in written if path.is_dir()}
        files = {mode(path) for path in written if path.is_file()}
    finally:
        os.umask(before)
        held.release()
    assert modes == {"reserved": 0o700}
    assert (runtime_folder(), mode(runtime_folder())) == (session / "everygpu", 0o700)
    assert len(written) > 2
    assert files == {0o600}


@pytest.mark.parametrize("told", ["", "/no/such/folder", "relative"])
def test_runtime_folder_without_a_session_is_this_users_alone(tmp_path, monkeypatch, told):
    monkeypatch.setenv("XDG_RUNTIME_DIR", told)
    folder = runtime_folder()
    assert folder.name == "everygpu"
    assert mode(folder) == 0o700
    assert not folder.is_relative_to(tmp_path / "session")


@pytest.mark.parametrize("trap", ["link", "open to all"])
def test_a_folder_that_others_can_write_to_is_not_used(session, tmp_path, trap):
    if trap == "link":
        (tmp_path / "theirs").mkdir()
        (session / "everygpu").symlink_to(tmp_path / "theirs")
    else:
        (session / "everygpu").mkdir()
        (session / "everygpu").chmod(0o777)
    with pytest.raises(OSError):
        runtime_folder()


def test_cache_folder_is_in_the_home_where_that_can_be_written(session, tmp_path, monkeypatch):
    assert cache_folder() == tmp_path / "home" / ".cache" / "everygpu"
    assert cache_folder().is_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache" / "everygpu"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache_folder() == session / "everygpu" / "cache"


def test_write_whole_replaces_or_leaves_the_old_text(tmp_path, monkeypatch):
    path = tmp_path / "home" / "a.json"
    write_whole(path, "old")
    write_whole(path, '["\u00fc"]')
    assert (path.read_text(encoding="utf-8"), os.listdir(path.parent), mode(path)) == ('["\u00fc"]', ["a.json"], 0o600)

    def refuse(*args):
        raise PermissionError("in use")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError):
        write_whole(path, "new")
    assert (path.read_text(encoding="utf-8"), os.listdir(path.parent)) == ('["\u00fc"]', ["a.json"])
