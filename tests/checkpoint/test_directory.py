"""The exchange of directories: whatever fails, and wherever the process dies, a whole checkpoint is there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from everygpu.checkpoint import directory as module
from everygpu.checkpoint.directory import find_directory, new_directory, new_file, remove_leftovers, resolve_target
from everygpu.errors import CheckpointForeignError, CheckpointNotFoundError


def write(path: Path, text: str) -> None:
    """Write a directory as save does, with one file and the manifest last."""
    with new_directory(resolve_target(path)) as new:
        for name in ("state.json", "manifest.json"):
            with new_file(new / name) as file:
                file.write(text.encode())


def read(path: Path) -> str:
    found = find_directory(path)
    state = (found / "state.json").read_text()
    assert (found / "manifest.json").read_text() == state, "files of two saves are mixed"
    return state


class Dies(BaseException):
    """Stands for the process's end: nothing catches it."""


class Steps:
    """Lets the process's calls to the file system go through up to one, and fails or ends it there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int, error: BaseException) -> None:
        self.calls: list[str] = []
        self.fail_at, self.error = fail_at, error
        for name in ("rename", "fsync", "mkdir"):
            monkeypatch.setattr(module.os, name, self._counted(name, getattr(os, name)))
        monkeypatch.setattr(module, "open", self._counted("open", open), raising=False)

    def _counted(self, name, real):
        def call(*args, **kwargs):
            self.calls.append(name)
            if len(self.calls) == self.fail_at:
                raise self.error
            return real(*args, **kwargs)

        return call


def writes(path: Path, text: str) -> bool:
    try:
        write(path, text)
    except (OSError, KeyboardInterrupt):
        return False
    return True


def count_steps(tmp_path: Path) -> int:
    with pytest.MonkeyPatch.context() as monkeypatch:
        steps = Steps(monkeypatch, -1, OSError())
        write(tmp_path / "counted", "a")
        write(tmp_path / "counted", "b")
        return len(steps.calls)


def test_the_steps_are_the_ones_that_make_it_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "ckpt", "old")
    steps = Steps(monkeypatch, -1, OSError())
    write(tmp_path / "ckpt", "new")
    files = ["open", "fsync"] * 2
    directory, exchange, parent = ["fsync"], ["rename", "rename"], ["fsync"]
    assert [call for call in steps.calls if call != "mkdir"] == files + directory + exchange + parent


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "ctrl-c"])
@pytest.mark.parametrize("had_old", [True, False], ids=["over an old one", "first"])
def test_a_failure_at_any_step_leaves_the_old_one(tmp_path: Path, error: BaseException, had_old: bool) -> None:
    failures = 0
    for step in range(1, count_steps(tmp_path) + 1):
        path = tmp_path / f"run{step}" / "ckpt"
        path.parent.mkdir()
        if had_old:
            write(path, "old")
        with pytest.MonkeyPatch.context() as monkeypatch:
            Steps(monkeypatch, step, error)
            failed = not writes(path, "new")
        failures += failed
        assert (read(path) if path.exists() else None) == (("old" if had_old else None) if failed else "new")
        assert [entry.name for entry in path.parent.iterdir()] == (["ckpt"] if had_old or not failed else [])
    assert failures >= 7


@pytest.mark.usefixtures("warm_python")
def test_a_death_at_any_step_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    """Really ends the process, so that nothing can clean up, before each call to the file system in turn."""
    script = """
import os, sys
from pathlib import Path
from everygpu.checkpoint import directory as module
from tests.checkpoint.test_directory import write

root = Path(sys.argv[1])

def run(step):
    path = root / f"step{step}" / "ckpt"
    path.parent.mkdir()
    write(path, "old")
    calls = 0
    def counted(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == step:
                os._exit(9)
            return real(*args, **kwargs)
        return call
    for name in ("rename", "fsync", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    module.open = counted(open)
    write(path, "new")

for step in range(1, 40):
    child = os.fork()
    if child == 0:
        run(step)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status))
    if status == 0:
        break
"""
    repository = Path(__file__).parents[2]
    paths = os.pathsep.join([str(repository), str(repository / "src")])
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        check=False,
    )
    codes = run.stdout.split()
    assert codes[-1] == "0", run.stderr
    assert set(codes[:-1]) == {"9"}
    assert len(codes) >= 12
    seen = []
    for step in range(1, len(codes) + 1):
        path = tmp_path / f"step{step}" / "ckpt"
        if path.exists():
            seen.append(read(path))
        else:
            with pytest.warns(UserWarning, match="cut off"):
                seen.append(read(path))
            seen.append("recovered")
        write(path, "next")
        assert read(path) == "next"
        assert not [entry for entry in path.parent.iterdir() if ".old-" in entry.name]
    assert {"old", "new", "recovered"} == set(seen)


def test_a_failed_block_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with new_directory(tmp_path / "ckpt") as new:
            (new / "state.json").write_text("x")
            raise Dies

    with pytest.raises(Dies):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_the_temporary_is_a_hidden_sibling_named_after_the_process(tmp_path: Path) -> None:
    with new_directory(tmp_path / "ckpt") as new:
        assert new.parent == tmp_path
        assert new.name.startswith(f".ckpt.tmp-{os.getpid()}-")


def test_the_old_one_that_can_t_be_removed_does_not_fail_the_save(tmp_path: Path, monkeypatch) -> None:
    write(tmp_path / "ckpt", "old")

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError

    monkeypatch.setattr(module.shutil, "rmtree", refuse)
    write(tmp_path / "ckpt", "new")
    assert read(tmp_path / "ckpt") == "new"
    (left,) = [entry for entry in tmp_path.iterdir() if ".old-" in entry.name]
    assert not (left / "manifest.json").exists(), "what is left could be taken for a checkpoint"


def test_siblings_of_other_checkpoints_are_left_alone(tmp_path: Path) -> None:
    names = [".ckpt2.old-1-00000000", ".ckpt.old-backup", ".ckpt.old-1.tmp-1-00000000", ".ckptx.old-1-00000000"]
    for name in names:
        (tmp_path / name).mkdir()
    write(tmp_path / "ckpt", "new")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([*names, "ckpt"])


def test_the_newest_of_several_replaced_ones_is_taken(tmp_path: Path) -> None:
    for i, (name, text) in enumerate({"00000001": "older", "00000002": "newer", "00000003": "oldest"}.items()):
        write(tmp_path / "x", text)
        manifest = tmp_path / "x" / "manifest.json"
        os.utime(manifest, (100 + [5, 9, 1][i],) * 2)
        os.rename(tmp_path / "x", tmp_path / f".ckpt.old-1-{name}")
    with pytest.warns(UserWarning, match="cut off"):
        assert read(tmp_path / "ckpt") == "newer"


def test_a_replaced_one_that_is_partly_removed_is_not_taken(tmp_path: Path) -> None:
    write(tmp_path / "x", "old")
    (tmp_path / "x" / "manifest.json").unlink()
    os.rename(tmp_path / "x", tmp_path / ".ckpt.old-1-00000000")
    with pytest.raises(CheckpointNotFoundError):
        find_directory(tmp_path / "ckpt")


@pytest.mark.parametrize("what", ["old", "tmp"])
def test_a_link_with_a_leftover_s_name_is_not_followed(tmp_path: Path, what: str) -> None:
    write(tmp_path / "other", "precious")
    write(tmp_path / "ckpt", "first")
    (tmp_path / f".ckpt.{what}-1-00000000").symlink_to("other")
    write(tmp_path / "ckpt", "second")
    assert (read(tmp_path / "ckpt"), read(tmp_path / "other")) == ("second", "precious")
    assert (tmp_path / "other" / "manifest.json").exists()
    shutil.rmtree(tmp_path / "ckpt")
    with pytest.raises(CheckpointNotFoundError):  # nor is it what was there before
        find_directory(tmp_path / "ckpt")


def test_a_link_with_a_leftover_s_name_is_removed_with_what_killed_savers_left(tmp_path: Path) -> None:
    write(tmp_path / "other", "precious")
    (tmp_path / ".ckpt.old-1-00000000").symlink_to("other")
    remove_leftovers(tmp_path, re.compile("ckpt"))
    assert os.listdir(tmp_path) == ["other"]
    assert read(tmp_path / "other") == "precious"


def test_nothing_there_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path / "ckpt", tmp_path / "no" / "where"):
        with pytest.raises(FileNotFoundError, match=path.name):
            find_directory(path)


def test_a_file_there_is_foreign_and_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(CheckpointForeignError, match=r"Pass the directory"):
        find_directory(tmp_path / "model.pt")


@pytest.mark.parametrize("entry", ["notes.txt", "manifest.json.bak", "epoch1/manifest.json", "state.json/x"])
def test_a_directory_with_anything_else_is_not_replaced(tmp_path: Path, entry: str) -> None:
    path = tmp_path / "runs" / entry
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    with pytest.raises(CheckpointForeignError, match="nothing but a checkpoint"):
        write(tmp_path / "runs", "new")
    assert path.read_text() == "precious"


def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("precious")
    with pytest.raises(CheckpointForeignError, match=r"instance .*/model\."):
        write(tmp_path / "model.pt", "new")
    assert (tmp_path / "model.pt").read_text() == "precious"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_what_is_neither_file_nor_directory_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointForeignError, match="must be free or a checkpoint directory"):
        write(tmp_path / "pipe", "new")
    assert (tmp_path / "pipe").is_fifo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["pipe"]


def test_tensors_that_were_never_a_checkpoint_are_not_replaced(tmp_path: Path) -> None:
    weights = tmp_path / "weights" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_text("precious")
    with pytest.raises(CheckpointForeignError, match=r"got .*weights with 'model.safetensors' in it"):
        write(weights.parent, "new")
    assert weights.read_text() == "precious"


@pytest.mark.parametrize("written", [".", "", "../run", "absolute", "link"])
@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_the_working_directory_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, is_checkpoint: bool
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    if is_checkpoint:
        write(run, "old")
    (tmp_path / "link").symlink_to("run", target_is_directory=True)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(run)
    path = {"absolute": run, "link": tmp_path / "link"}.get(written, Path(written))
    with pytest.raises(CheckpointForeignError, match="must not be the working directory, .* for instance .*last"):
        write(path, "new")
    assert sorted(tmp_path.rglob("*")) == before
    assert run.samefile(".")
    write(path / "last", "inside")
    assert read(run / "last") == "inside"


def test_an_empty_directory_and_missing_parents_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", "a")
    write(tmp_path / "a" / "b" / "c", "b")
    assert (read(tmp_path / "empty"), read(tmp_path / "a" / "b" / "c")) == ("a", "b")


@pytest.mark.parametrize("existing", [True, False])
def test_links_are_written_through(tmp_path: Path, existing: bool) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "ckpt", target_is_directory=True)
    if existing:
        write(tmp_path / "disk" / "ckpt", "old")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert read(tmp_path / "link") == read(tmp_path / "disk" / "ckpt") == "new"
    assert sorted(os.listdir(tmp_path)) == ["disk", "link"]


def test_a_link_to_what_a_cut_off_save_left_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "disk" / "x", "old")
    os.rename(tmp_path / "disk" / "x", tmp_path / "disk" / ".ckpt.old-1-00000000")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "ckpt")
    with pytest.warns(UserWarning, match="cut off"):
        assert read(tmp_path / "link") == "old"


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_umask_decides_the_permissions(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write(tmp_path / "ckpt", "a")
    finally:
        os.umask(before)
    modes = {entry.name: entry.stat().st_mode & 0o777 for entry in (tmp_path / "ckpt").iterdir()}
    assert modes == dict.fromkeys(["state.json", "manifest.json"], 0o666 & ~umask)
    assert (tmp_path / "ckpt").stat().st_mode & 0o777 == 0o777 & ~umask


def test_the_directory_s_own_permissions_stay(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt").chmod(0o2770)
    write(tmp_path / "ckpt", "a")
    assert (tmp_path / "ckpt").stat().st_mode & 0o7777 == 0o2770
