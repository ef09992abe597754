"""The exchange of directories: whatever fails, and wherever the process dies, a whole checkpoint is there."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from everygpu.checkpoint import directory as module
from everygpu.checkpoint.directory import find_directory, replacing, resolve_target
from everygpu.errors import CheckpointForeignError, CheckpointNotFoundError


def write(path: Path, text: str) -> None:
    """Write a directory as save does."""
    with replacing(resolve_target(path)) as new:
        (new / "checkpoint.json").write_text(f'{{"format": "everygpu", "text": "{text}"}}')


def read(path: Path) -> str:
    found = find_directory(path)
    return str(json.loads((found / "checkpoint.json").read_text())["text"])


def test_the_old_one_has_its_name_until_the_new_one_has_it(tmp_path: Path) -> None:
    write(tmp_path / "ckpt", "0")
    looks, is_over = [], threading.Event()

    def look() -> None:
        while not is_over.is_set():
            looks.append((tmp_path / "ckpt" / "checkpoint.json").exists())

    if not module.exchange(*(tmp_path / name for name in ("ckpt", "ckpt"))):
        pytest.skip("two directories can't be exchanged in one step here")
    thread = threading.Thread(target=look)
    thread.start()
    for text in range(60):
        write(tmp_path / "ckpt", str(text))
    is_over.set()
    thread.join()
    assert len(looks) > 60
    assert all(looks)


class Dies(BaseException):
    """Stands for the process's end: nothing catches it."""


def test_siblings_of_other_checkpoints_are_left_alone(tmp_path: Path) -> None:
    names = [".ckpt2.old", ".ckpt.old-backup", ".ckpt.old.tmp", ".ckptx.tmp"]
    for name in names:
        (tmp_path / name).mkdir()
    write(tmp_path / "ckpt", "new")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([*names, "ckpt"])


def test_a_replaced_one_is_taken_and_put_back_by_the_next_save(tmp_path: Path) -> None:
    write(tmp_path / "x", "old")
    os.rename(tmp_path / "x", tmp_path / ".ckpt.old")
    with pytest.warns(UserWarning, match="cut off"):
        assert read(tmp_path / "ckpt") == "old"
    with pytest.raises(Dies), replacing(tmp_path / "ckpt"):
        raise Dies
    assert os.listdir(tmp_path) == ["ckpt"]
    assert read(tmp_path / "ckpt") == "old"


def test_a_replaced_one_that_is_partly_removed_is_not_taken(tmp_path: Path) -> None:
    write(tmp_path / "x", "old")
    (tmp_path / "x" / "checkpoint.json").unlink()
    os.rename(tmp_path / "x", tmp_path / ".ckpt.old")
    with pytest.raises(CheckpointNotFoundError):
        find_directory(tmp_path / "ckpt")


@pytest.mark.parametrize("what", ["old", "tmp"])
def test_a_link_with_a_leftover_s_name_is_not_followed(tmp_path: Path, what: str) -> None:
    write(tmp_path / "other", "precious")
    write(tmp_path / "ckpt", "first")
    (tmp_path / f".ckpt.{what}").symlink_to("other")
    write(tmp_path / "ckpt", "second")
    assert (read(tmp_path / "ckpt"), read(tmp_path / "other")) == ("second", "precious")
    assert (tmp_path / "other" / "checkpoint.json").exists()
    shutil.rmtree(tmp_path / "ckpt")
    with pytest.raises(CheckpointNotFoundError):  # nor is it what was there before
        find_directory(tmp_path / "ckpt")


@pytest.mark.parametrize("entry", ["notes.txt", "checkpoint.json.bak", "epoch1/checkpoint.json", "checkpoint.json/x"])
def test_a_directory_with_anything_else_is_not_replaced(tmp_path: Path, entry: str) -> None:
    path = tmp_path / "runs" / entry
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    with pytest.raises(CheckpointForeignError, match="no checkpoint of everygpu"):
        write(tmp_path / "runs", "new")
    assert path.read_text() == "precious"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_what_is_neither_file_nor_directory_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointForeignError, match="is a file, a checkpoint is a directory"):
        write(tmp_path / "pipe", "new")
    assert (tmp_path / "pipe").is_fifo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["pipe"]


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
    with pytest.raises(CheckpointForeignError, match="is the working directory. .* for instance .*last"):
        write(path, "new")
    assert sorted(tmp_path.rglob("*")) == before
    assert run.samefile(".")
    write(path / "last", "inside")
    assert read(run / "last") == "inside"


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
    os.rename(tmp_path / "disk" / "x", tmp_path / "disk" / ".ckpt.old")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "ckpt")
    with pytest.warns(UserWarning, match="cut off"):
        assert read(tmp_path / "link") == "old"
