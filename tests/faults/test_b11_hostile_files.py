"""b11: whatever lies in a file's place, reading it ends soon, takes little memory, and says what is wrong."""

import ast
import io
import json
import os
import random
import shutil
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from everygpu.checkpoint.brief import brief
from everygpu.checkpoint.foreign.dcp import _overlap
from everygpu.checkpoint.foreign.dcp_metadata import Piece, Span
from everygpu.checkpoint.foreign.pickle_scan import Global, scan_pickle

import everygpu
from everygpu.checkpoint import regular_file
from everygpu.checkpoint.contents import read_any
from everygpu.checkpoint.convert import convert
from everygpu.checkpoint.verify import examine
from everygpu.errors import CheckpointContentError, CheckpointDamagedError, CheckpointError, CheckpointMismatchError
from tests.checkpoint.forge import edit_manifest, edit_state
from tests.checkpoint.test_dcp import write_dcp, write_pieces
from tests.faults import pickles
from tests.faults.fuzz import fuzz
from tests.faults.spoil import READERS, make_dcp, make_index, make_native, make_torch

SOURCES = Path(everygpu.__file__).parent / "checkpoint"
WRITERS = {"directory.py", "hashed_file.py", "lock.py", "output.py"}


@pytest.mark.parametrize("reader", READERS)
def test_b11_spoiled_checkpoints_are_read_or_refused(reader: str) -> None:
    outcome = fuzz(reader, 12, seed=1)
    assert outcome.findings == []
    assert sum(outcome.results.values()) == 12
    assert outcome.results["CheckpointDamagedError"] > 3


def test_b11_all_readers_open_files_by_one_function() -> None:
    """A pipe or a device must not be waited for; only the writers and that function open anything themselves."""
    opening = set()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func).rpartition(".")
                if called[2] in ("open", "read_text", "read_bytes", "fdopen") and called[0] != "archive":
                    opening.add(path.name)
    assert opening == WRITERS | {"regular_file.py"}


PLACES = {
    "pipe": lambda path: os.mkfifo(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "sparse": lambda path: (path.touch(), os.truncate(path, 200 * 10**9)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((make_native, name) for name in ("manifest.json", "state.json", "model.safetensors")),
        *((make_index, name) for name in ("model.safetensors.index.json", "b0", "b1")),
        *((make_dcp, name) for name in (".metadata", "__0_0.distcp")),
        (make_torch, "a.pt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.timeout(60)
def test_b11_what_is_no_file_is_not_waited_for(tmp_path: Path, make, name: str, place: str) -> None:
    path = make(tmp_path / "model")
    file = tmp_path / "model" / name
    file.unlink()
    PLACES[place](file)
    model = torch.nn.Linear(3, 2)
    with pytest.raises(CheckpointError):
        everygpu.load(path, model=model)
    if make is not make_torch or place != "sparse":
        assert examine(path).faults


@pytest.mark.parametrize("body", pickles.PICKLES, ids=lambda body: body[2:12].hex())
@pytest.mark.timeout(60)
def test_b11_pickles_that_ask_for_more_than_they_hold_are_damaged(tmp_path: Path, body: bytes) -> None:
    make_dcp(tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(body)
    (tmp_path / "a.pt").write_bytes(body)
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as archive:
        archive.writestr("b/data.pkl", body)
        archive.writestr("b/data/0", bytes(24))
        archive.writestr("b/version", "3\n")
    for name in ("dcp", "a.pt", "b.pt"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(CheckpointError) as raised:
                everygpu.load(tmp_path / name, model=torch.nn.Linear(3, 2))
        assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (pickles.PICKLES[0], "remembers a value under the number 268435456"),
        (b"\x80\x02}" + pickles._TUPLE_60 + b"Ns.", "unfolds to more than"),
        (b"\x80\x02" + b")" + b"\x85" * 500 + b".", "nested beyond reason"),
        (b"\x80\x02" + pickles._GLOBAL["bytearray"] + pickles._INT + b"\x85R.", "memory without content"),
        (b"\x80\x02" + pickles._TUPLE_60[:1] + b")R.", "calls what is no function"),
        (b"\x80\x02" + pickles._EXPANDED + b".", "far more than the file holds"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value,
)
def test_b11_a_pickle_is_refused_before_it_is_unpickled(tmp_path: Path, body: bytes, problem: str) -> None:
    with pytest.raises(CheckpointDamagedError, match=problem):
        scan_pickle(io.BytesIO(body), len(body), tmp_path / "x")


def test_b11_the_scan_tells_what_a_pickle_holds(tmp_path: Path) -> None:
    body = b"\x80\x02K\x05c__builtin__\nset\nX\x01\0\0\0a\x87."
    assert scan_pickle(io.BytesIO(body), len(body), tmp_path) == (5, "__builtin__ set", "a")
    assert isinstance(scan_pickle(io.BytesIO(body), len(body), tmp_path)[1], Global)


def test_b11_archives_that_unpack_to_gigabytes_or_overlap_are_damaged(tmp_path: Path) -> None:
    state = {"w": torch.zeros(8 * 2**20)}  # 32 MiB
    torch.save(state, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as old,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new,
    ):
        for entry in old.infolist():
            for copy in ("", "1", "2"):
                new.writestr(entry.filename + copy, old.read(entry))
    with pytest.raises(CheckpointDamagedError, match="and unpacks to"):
        read_any(tmp_path / "b.pt")
    with zipfile.ZipFile(tmp_path / "a.pt", "a") as archive:
        archive.filelist += [archive.getinfo("a/data/0")] * 3
        archive.writestr("x", "x")
    with pytest.raises(CheckpointDamagedError, match="overlap"):
        read_any(tmp_path / "a.pt")


def test_b11_a_pickle_of_gigabytes_of_nothing_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.pt").write_bytes(b"\x80\x02X\xff\xff\xff\x7f")
    os.truncate(tmp_path / "a.pt", 3 * 10**9)
    with pytest.raises(CheckpointDamagedError, match="no readable pickle"):
        read_any(tmp_path / "a.pt")
    torch.save({"w": torch.zeros(300)}, tmp_path / "b.pt")
    monkeypatch.setattr(sys.modules["everygpu.checkpoint.foreign.torch_file"], "MAX_DOCUMENT_BYTES", 100)
    with pytest.raises(CheckpointDamagedError, match="more than 100 bytes beside its tensors"):
        read_any(tmp_path / "b.pt")


def test_b11_an_expanded_tensor_of_terabytes_is_damaged_and_a_buffer_is_not(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(2**20, 2**20)}, tmp_path / "huge.pt")
    with pytest.raises(CheckpointDamagedError, match="far more than the file holds"):
        convert(tmp_path / "huge.pt", tmp_path / "huge.safetensors")
    view = torch.zeros(2**20).expand(2**6, 2**20)  # each is within bounds, all of them are not
    torch.save({f"w{i}": view for i in range(9)}, tmp_path / "many.pt")
    with pytest.raises(CheckpointDamagedError, match="unfolds to tensors of"):
        convert(tmp_path / "many.pt", tmp_path / "many.safetensors")
    torch.save({"w": torch.zeros(1).expand(100, 100)}, tmp_path / "buffer.pt")
    assert (read_any(tmp_path / "buffer.pt").model or {})["w"].shape == (100, 100)


def test_b11_many_values_from_the_same_data_are_damaged(tmp_path: Path) -> None:
    path = write_pieces(tmp_path / "ckpt", (2, 2), {(0, 0): torch.ones(1, 2), (1, 0): torch.ones(1, 2)}, info={
        "relative_path": "__0_0.distcp"})  # fmt: skip
    with pytest.raises(CheckpointDamagedError, match="same data for several values"):
        read_any(path)


@pytest.mark.timeout(60)
def test_b11_twenty_thousand_pieces_are_compared_at_once() -> None:
    span = Span(file="x", offset=0, length=4)
    rows = [Piece(offsets=(0, i), sizes=(4, 1), span=span) for i in range(20_000)]
    assert not _overlap(tuple(random.Random(0).sample(rows, len(rows))))
    assert _overlap((*rows, Piece(offsets=(3, 7_000), sizes=(1, 1), span=span)))
    scalars = tuple(Piece(offsets=(), sizes=(), span=span) for _ in range(2))
    assert _overlap(scalars)
    assert not _overlap(scalars[:1])


def test_b11_errors_show_a_bounded_part_of_what_they_are_about(tmp_path: Path) -> None:
    doubled: list[object] = []
    for _ in range(100):
        doubled = [doubled, doubled]
    assert len(brief(doubled)) < 300
    assert len(brief("x" * 10**6)) < 300
    assert brief(10**5000) == "a int"
    everygpu.save(tmp_path / "ckpt", value=1)
    edit_manifest(tmp_path / "ckpt", version="x" * 10**6)
    with pytest.raises(CheckpointDamagedError) as raised:
        everygpu.load(tmp_path / "ckpt")
    assert len(str(raised.value)) < 600


def test_b11_a_tensor_with_a_thousand_names_is_copied_once(tmp_path: Path) -> None:
    tensor = torch.ones(1000)
    everygpu.save(tmp_path / "ckpt", tensors=[tensor, tensor, tensor.clone()])
    first, same, other = everygpu.load(tmp_path / "ckpt")["tensors"]
    assert first.data_ptr() == same.data_ptr() != other.data_ptr()
    shutil.rmtree(tmp_path / "ckpt")
    assert (same == 1).all()


def test_b11_metrics_that_are_not_finite_are_damage(tmp_path: Path) -> None:
    everygpu.CheckpointManager(tmp_path).save(1, metrics={"loss": 0.5}, value=1)
    edit_manifest(tmp_path / "step-00000001", place={"step": 1, "serial": 1, "metrics": {"loss": float("nan")}})
    with pytest.raises(CheckpointDamagedError, match="no finite number"):
        everygpu.load(tmp_path / "step-00000001")


def test_b11_random_states_are_checked_before_anything_is_restored(tmp_path: Path) -> None:
    everygpu.save(tmp_path / "ckpt", model=torch.nn.Linear(3, 2))
    rng = json.loads((tmp_path / "ckpt" / "state.json").read_text())["rng"]
    rng["numpy"]["state"]["key"] = [1, 2]
    edit_state(tmp_path / "ckpt", rng=rng)
    model = torch.nn.Linear(3, 2)
    before = model.weight.clone()
    with pytest.raises(CheckpointDamagedError, match="random states"):
        everygpu.load(tmp_path / "ckpt", model=model, rng=True)
    assert torch.equal(model.weight, before)


def test_b11_what_is_no_tensor_does_not_fit_a_tensor(tmp_path: Path) -> None:
    everygpu.save(tmp_path / "ckpt", model=torch.nn.Linear(3, 2))
    model = json.loads((tmp_path / "ckpt" / "state.json").read_text())["model"]
    model["state"]["values"]["bias"] = "text"
    edit_state(tmp_path / "ckpt", model=model)
    with pytest.raises(CheckpointMismatchError, match="a str in the checkpoint, a tensor in the target"):
        everygpu.load(tmp_path / "ckpt", model=torch.nn.Linear(3, 2))
    model["state"]["values"]["bias"], model["state"]["versions"] = {"$tensor": "bias"}, {"": {"version": "2"}}
    edit_state(tmp_path / "ckpt", model=model)
    with pytest.raises(CheckpointDamagedError, match="version"):
        everygpu.load(tmp_path / "ckpt", model=torch.nn.Linear(3, 2))


def test_b11_save_refuses_what_load_would_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everygpu.save(tmp_path / "ckpt", value=1)
    monkeypatch.setattr(sys.modules["everygpu.checkpoint.save"], "MAX_DOCUMENT_BYTES", 40_000)
    with pytest.raises(CheckpointContentError, match="fit into 40000 bytes of JSON"):
        everygpu.save(tmp_path / "ckpt", value=[0.5] * 20_000)
    assert everygpu.load(tmp_path / "ckpt") == {"value": 1}
    monkeypatch.setattr(regular_file, "MAX_DOCUMENT_BYTES", 100)
    with pytest.raises(CheckpointDamagedError, match="at most 100 are read"):
        everygpu.load(tmp_path / "ckpt")


def test_b11_a_directory_with_broken_links_is_examined(tmp_path: Path) -> None:
    path = write_dcp(tmp_path / "dcp", {"w": torch.ones(2)})
    (path / "x.distcp").symlink_to("nowhere")
    assert examine(path).faults == ()
