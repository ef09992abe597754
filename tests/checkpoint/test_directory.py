"""Directories that stay: a whole checkpoint is in them wherever the process dies, and others' files are left alone."""

import json
import os
import socket
import stat
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import everygpu
from everygpu.checkpoint.directory import replacing, resolve_target
from everygpu.errors import CheckpointDamagedError, CheckpointForeignError
from tests.checkpoint.models import Net, same_state
from tests.faults.inject import die_at, fork
from tests.faults.savers import EVERYGPU, Weights, version_of


def write(path: Path, text: str) -> None:
    """Write a directory as save does."""
    with replacing(resolve_target(path)) as new:
        (new / "checkpoint.json").write_text(f'{{"format": "everygpu", "text": "{text}"}}')


def read(path: Path) -> str:
    return str(json.loads((path / "checkpoint.json").read_text())["text"])


def test_readers_find_one_that_is_whole_at_any_moment(tmp_path: Path) -> None:
    EVERYGPU.save(tmp_path / "ckpt", Weights(0))
    found, is_over = [], threading.Event()

    def look() -> None:
        while not is_over.is_set():
            found.append(version_of(EVERYGPU.load(tmp_path / "ckpt")))

    thread = threading.Thread(target=look)
    thread.start()
    version = 0
    while len(set(found)) < 5 and thread.is_alive():
        version += 1
        EVERYGPU.save(tmp_path / "ckpt", Weights(version))
    is_over.set()
    thread.join()
    assert found == sorted(found)
    assert len(set(found)) >= 5


# What is of others.


def state_of(path: Path) -> tuple[Any, ...]:
    """Return all that is known of a file or directory, but when it was read; of a directory not what is in it."""
    found = path.lstat()
    mode = found.st_mode
    content: object = path.read_bytes() if stat.S_ISREG(mode) else os.readlink(path) if stat.S_ISLNK(mode) else None
    changed = None if stat.S_ISDIR(mode) else (found.st_mtime_ns, found.st_ctime_ns, found.st_nlink)
    return found.st_ino, mode, found.st_uid, content, changed


def make_other(path: Path, kind: str, chance: Random) -> None:
    """Put something of another program there, if there is nothing yet."""
    if os.path.lexists(path) or not path.parent.is_dir():
        return
    if kind == "directory":
        path.mkdir()
        (path / "vocab.txt").write_text("x")
    elif kind == "checkpoint of others":
        path.mkdir()
        (path / "checkpoint.json").write_text('{"format": "other"}')
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket" and len(str(path)) < 100:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind == "link":
        path.symlink_to(chance.choice(["config.json", "nowhere", "..", "/etc"]))
    else:
        path.write_bytes(chance.randbytes(chance.randrange(1, 3000)))
        path.chmod(chance.choice([0o600, 0o644, 0o444]))


KINDS = ["file", "directory", "pipe", "socket", "link", "checkpoint of others"]
INSIDE = [
    *("config.json", "events.out.tfevents.1", "tokenizer", "model-best.safetensors", ".checkpoint.json", "model.pt"),
    *("training.safetensors.bak", "model-00001-of-00002.safetensors", "SHA256SUMS.txt", ".everygpu.old", "notes"),
    *("model.safetensors.index.json", "checkpoint.json~", ".everygpu.tmp2", "checkpoint"),
]
BESIDE = [
    *(".{}.tmp", ".{}.old", ".{}.lock", "{}.tmp", ".{}", ".{}.everygpu", ".lock"),
    *("notes", "step-1", "step-00000099"),
]


class OthersAround:
    """A folder with a checkpoint, a run, and things of others that come at any moment of a save."""

    def __init__(self, root: Path, seed: int) -> None:
        self.chance, self.root, self.known = Random(seed), root, dict[Path, Any]()
        self.log_path = root / "ckpt" / "log"
        self.lines = 0
        self.turn = threading.Lock()  # files are synced by several threads

    def places(self) -> list[Path]:
        checkpoints = [self.root / "ckpt", *sorted((self.root / "run").glob("step-*"))]
        inside = [one / name for one in checkpoints for name in INSIDE if one.is_dir() and not one.is_symlink()]
        return inside + [one.parent / name.format(one.name) for one in checkpoints for name in BESIDE]

    def come(self) -> None:
        """Make something, change something, or write another line to the open log."""
        path = self.chance.choice(self.places())
        if not os.path.lexists(path):
            make_other(path, self.chance.choice(KINDS), self.chance)
            if os.path.lexists(path):
                self.known[path] = state_of(path)
                self.known |= {entry: state_of(entry) for entry in path.glob("*") if not path.is_symlink()}
        if self.lines:
            self.log.write(f"{self.lines}\n")
            self.log.flush()
            self.lines += 1

    def open_log(self) -> None:
        self.log = open(self.log_path, "a")  # noqa: SIM115 - as TensorBoard's writer has it
        self.lines = 1

    def check(self) -> None:
        for path, before in self.known.items():
            assert os.path.lexists(path), f"{path} is gone"
            assert state_of(path) == before, path
        assert self.log_path.read_text() == "".join(f"{i}\n" for i in range(1, self.lines))


def save_among_others(root: Path, seed: int, monkeypatch: pytest.MonkeyPatch, num_saves: int) -> tuple[int, int]:
    """Save, rotate, be interrupted or killed, and resume; return how many saves went through and how many did not."""
    others, chance = OthersAround(root, seed), Random(seed)
    everygpu.save(root / "ckpt", model=Net(0))
    others.open_log()
    outcomes, version, at_least = [0, 0], 0, {"ckpt": 0, "run": 0}
    for number in range(1, num_saves + 1):
        where, how = chance.choice(["ckpt", "run"]), chance.choice(["whole", "whole", "killed", "interrupted"])
        path, fail_at, calls = root / where, chance.randrange(1, 25), 0

        def fsync(descriptor: int) -> None:
            nonlocal calls
            calls += 1
            with others.turn:
                others.come()
            if how == "interrupted" and calls == fail_at:  # noqa: B023
                raise KeyboardInterrupt

        def save(where: str = where, path: Path = path, number: int = number) -> None:
            model = Net(number)
            extra = {"x": torch.tensor(number)} if number % 3 else {}
            if where == "ckpt":
                everygpu.save(path, model=model, number=number, **extra)
                return
            run = everygpu.CheckpointManager(path, keep=chance.choice([1, 2]), model=Net(0))
            run.resume()
            run._objects["model"].load_state_dict(model.state_dict())
            run.save(number if number % 5 else max(number - 2, 0))

        try:
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", lambda descriptor: None)
                if how == "killed":
                    _, status = os.waitpid(fork(lambda: (die_at(fail_at), save())), 0)  # noqa: B023
                    is_saved = status == 0
                else:
                    patch.setattr(os, "fsync", fsync)
                    save()
                    is_saved = True
        except KeyboardInterrupt:
            is_saved = False
        except CheckpointForeignError as error:
            is_saved = "is in the way" not in str(error)
        outcomes[not is_saved] += 1
        others.come()
        others.check()
        version = at_least[where]
        if is_saved:
            at_least[where] = number
        if where == "ckpt" or at_least["run"]:
            model = Net(99)
            everygpu.load(root / where, model=model)
            possible = {at_least[where], version, number}
            assert any(same_state(dict(model.state_dict()), dict(Net(v).state_dict())) for v in possible), possible
            at_least[where] = next(v for v in possible if torch.equal(model.embed.weight, Net(v).embed.weight))
    others.log.close()
    return outcomes[0], outcomes[1]


needs_posix = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names, and fork")


@needs_posix
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:load. .*is taken:UserWarning")
@pytest.mark.parametrize("num_programs", [4, pytest.param(150, marks=pytest.mark.slow)])
def test_nothing_of_others_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_programs: int) -> None:
    saved = failed = 0
    for seed in range(num_programs):
        (tmp_path / str(seed)).mkdir()
        one, other = save_among_others(tmp_path / str(seed), seed, monkeypatch, 14)
        saved, failed = saved + one, failed + other
    assert saved >= 5 * num_programs
    assert failed >= num_programs


@pytest.mark.parametrize("place", ["ckpt/.everygpu", "ckpt/.everygpu.tmp", ".ckpt.everygpu.lock"])
@pytest.mark.parametrize("kind", ["file", "directory", "link", "checkpoint of others"])
def test_what_has_the_very_name_is_named_and_stays(tmp_path: Path, place: str, kind: str) -> None:
    EVERYGPU.save(tmp_path / "ckpt", Weights(1))
    make_other(tmp_path / place, kind, Random(0))
    before = state_of(tmp_path / place)
    with pytest.raises(CheckpointForeignError, match="everygpu.* is in the way: it is not of everygpu.* move it"):
        EVERYGPU.save(tmp_path / "ckpt", Weights(2))
    assert state_of(tmp_path / place) == before
    assert version_of(EVERYGPU.load(tmp_path / "ckpt")) == 1


def test_a_file_of_others_that_has_the_name_of_one_to_write_is_not_replaced(tmp_path: Path) -> None:
    path = everygpu.save(tmp_path / "ckpt", epoch=1)
    (path / "model.safetensors").write_text("an exported model")
    with pytest.raises(CheckpointForeignError, match=r"model\.safetensors is in the way"):
        everygpu.save(path, model=Net(1))
    assert (path / "model.safetensors").read_text() == "an exported model"
    assert everygpu.load(path) == {"epoch": 1}
    assert sorted(os.listdir(path)) == ["SHA256SUMS", "checkpoint.json", "model.safetensors"]


def test_files_that_the_new_one_lacks_go(tmp_path: Path) -> None:
    path = everygpu.save(tmp_path / "ckpt", model=Net(1), x=torch.ones(3))
    everygpu.save(path, epoch=2)
    assert sorted(os.listdir(path)) == ["SHA256SUMS", "checkpoint.json"]


def test_notes_in_a_step_stay_when_it_is_rotated_and_the_step_may_come_again(tmp_path: Path) -> None:
    def save(step: int) -> None:
        run.save(step)
        (tmp_path / f"step-{step:08d}" / "notes.txt").write_text(str(step))

    run = everygpu.CheckpointManager(tmp_path, keep=1, model=Net(1))
    for step in (1, 2, 3):
        save(step)
    assert os.listdir(tmp_path / "step-00000001") == ["notes.txt"]
    assert run.latest() == tmp_path / "step-00000003"
    run.save(1)
    assert (tmp_path / "step-00000001" / "notes.txt").read_text() == "1"
    assert run.latest() == tmp_path / "step-00000001"
    assert os.listdir(tmp_path / "step-00000003") == ["notes.txt"]


def test_a_checkpoint_that_is_of_no_run_is_not_resumed_nor_rotated_nor_replaced(tmp_path: Path) -> None:
    model = Net(1)
    other = everygpu.save(tmp_path / "step-00000007", model=Net(2))
    run = everygpu.CheckpointManager(tmp_path, keep=1, model=model)
    assert run.resume() == 0
    with pytest.raises(CheckpointForeignError, match=r"step-00000007 is a checkpoint, but not of a run\. Move it"):
        run.resume(7)
    assert same_state(dict(model.state_dict()), dict(Net(1).state_dict()))
    for step in (5, 6):
        run.save(step)
    with pytest.raises(CheckpointForeignError, match=r"step-00000007 is a checkpoint, but not of a run\. Move it"):
        run.save(7)
    assert sorted(os.listdir(tmp_path)) == ["step-00000006", "step-00000007"]
    everygpu.load(other, model=model)
    assert same_state(dict(model.state_dict()), dict(Net(2).state_dict()))


def test_files_keep_their_modes_and_new_ones_take_that_of_the_document(tmp_path: Path) -> None:
    path = everygpu.save(tmp_path / "ckpt", model=Net(1))
    for entry in path.iterdir():
        entry.chmod(0o600)
    (path / "model.safetensors").chmod(0o640)
    seen, real = [], os.fsync

    def fsync(descriptor: int) -> None:
        stage = path / ".everygpu.tmp"
        seen.extend([stage.stat().st_mode & 0o77] if stage.exists() else [])
        real(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        everygpu.save(path, model=Net(2), x=torch.ones(1))
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in path.iterdir()}
    assert modes.pop("model.safetensors") == 0o640
    assert set(modes.values()) == {0o600}
    assert "training.safetensors" in modes
    assert seen[0] == 0, "the others could read what is being written"


def test_a_mount_point_and_a_directory_around_the_working_directory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = everygpu.save(tmp_path / "ckpt", epoch=1)
    (path / "inside" / "deeper").mkdir(parents=True)
    monkeypatch.chdir(path / "inside" / "deeper")
    with pytest.raises(CheckpointForeignError, match=r"is a directory around the working directory\. .*ckpt/last"):
        everygpu.save(path, epoch=2)
    with pytest.raises(CheckpointForeignError, match="'../..' is a directory around"):
        everygpu.save("../..", epoch=2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "ismount", lambda place: os.fspath(place) == str(path))
    with pytest.raises(CheckpointForeignError, match=r"is a mount point\. .*ckpt/last"):
        everygpu.save(path, epoch=2)
    assert everygpu.load(path) == {"epoch": 1}
    assert everygpu.save(path / "last", epoch=2)


def test_a_save_that_could_not_put_all_files_in_place_is_whole_and_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    EVERYGPU.save(tmp_path / "ckpt", Weights(1))
    real = os.replace

    def replace(first: Path, second: Path) -> None:
        if Path(second) == tmp_path / "ckpt" / "SHA256SUMS":
            raise OSError(28, "No space left on device")
        real(first, second)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        EVERYGPU.save(tmp_path / "ckpt", Weights(2))
    assert "is saved; the next save puts its files in place" in caplog.text
    assert sorted(os.listdir(tmp_path / "ckpt")) == [".everygpu", "checkpoint.json", "model.safetensors"]
    assert version_of(EVERYGPU.load(tmp_path / "ckpt")) == 2
    (tmp_path / "ckpt" / ".everygpu" / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointDamagedError, match="SHA256SUMS can't be read"):
        EVERYGPU.load(tmp_path / "ckpt")
    EVERYGPU.save(tmp_path / "ckpt", Weights(3))
    assert len(os.listdir(tmp_path / "ckpt")) == 3
    assert version_of(EVERYGPU.load(tmp_path / "ckpt")) == 3


@pytest.mark.parametrize(
    "entry",
    [
        *("notes.txt", "checkpoint.json.bak", "epoch1/checkpoint.json", "checkpoint.json/x", "manifest.json"),
        *("state.json", "checkpoint.json", "model.safetensors", "SHA256SUMS"),
    ],
)
@pytest.mark.parametrize("text", ["precious", '{"format": "of-another-program"}'])
def test_a_directory_with_anything_else_is_not_replaced(tmp_path: Path, entry: str, text: str) -> None:
    path = tmp_path / "runs" / entry
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(CheckpointForeignError, match="no checkpoint of everygpu"):
        write(tmp_path / "runs", "new")
    assert path.read_text() == text


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
