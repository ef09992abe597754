"""Directories of torch.distributed.checkpoint, without a process group and without running their pickles."""

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.filesystem import _StorageInfo

from everygpu.checkpoint.foreign import read_dcp, read_foreign
from everygpu.errors import CheckpointDamagedError, CheckpointForeignError
from tests.checkpoint.models import Net
from tests.checkpoint.poison import Poison, must_not_run


def write_dcp(path: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is no process group
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def write_pieces(
    path: Path, shape: tuple[int, ...], pieces: dict[tuple[int, ...], Tensor], **changes: dict[str, Any]
) -> Path:
    """One tensor ``w`` as several ranks write it, with fields of the storage records changed at will."""
    path.mkdir()
    storage, chunks = {}, []
    for rank, (offsets, tensor) in enumerate(pieces.items()):
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        (path / f"__{rank}_0.distcp").write_bytes(b"\0" * 7 + buffer.getvalue())
        info = {"relative_path": f"__{rank}_0.distcp", "offset": 7, "length": buffer.tell()}
        storage[records.MetadataIndex("w", offsets)] = _StorageInfo(**info | changes.get("info", {}))
        chunks.append(records.ChunkStorageMetadata(torch.Size(offsets), tensor.shape))
    about = records.TensorStorageMetadata(records.TensorProperties(torch.float32), torch.Size(shape), chunks)
    write_metadata(path, records.Metadata({"w": about}, storage_data=storage, **changes.get("metadata", {})))
    return path


def write_metadata(path: Path, metadata: Any) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def trained(seed: int = 1) -> tuple[Net, torch.optim.Adam]:
    model = Net(seed)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_pieces_are_put_together(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    pieces = {(0, 0): whole[:2, :3].clone(), (2, 0): whole[2:, :3].clone(), (0, 3): whole[:, 3:].clone()}
    assert torch.equal(read_dcp(write_pieces(tmp_path / "ckpt", (3, 4), pieces))["w"], whole)


@pytest.mark.parametrize(
    ("shape", "pieces"),
    [
        ((4,), {(0,): torch.ones(3)}),
        ((4,), {(0,): torch.ones(3), (1,): torch.ones(1)}),
        ((4,), {(0,): torch.ones(5)}),
        ((4,), {(3,): torch.ones(4)}),
        ((10**12,), {(0,): torch.ones(2)}),
        ((2**40, 2**40), {}),
    ],
    ids=str,
)
def test_pieces_that_do_not_fill_the_tensor(tmp_path: Path, shape: Any, pieces: Any) -> None:
    with pytest.raises(CheckpointDamagedError, match=r"\.metadata"):
        read_dcp(write_pieces(tmp_path / "ckpt", shape, pieces))


@pytest.mark.parametrize("file", ["../outside", "/etc/passwd", "a/b", "..", "c:\\x", "nowhere"])
def test_files_outside_the_directory_and_missing_ones_are_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / "outside").write_bytes(b"x" * 3000)
    path = write_pieces(tmp_path / "ckpt", (2,), {(0,): torch.ones(2)}, info={"relative_path": file})
    with pytest.raises(CheckpointDamagedError, match="which the directory doesn't have|is missing, or ends before"):
        read_dcp(path)


@pytest.mark.parametrize("info", [{"offset": 10**9}, {"length": 10**12}, {"offset": 2**60}], ids=str)
def test_spans_that_are_not_there(tmp_path: Path, info: dict[str, Any]) -> None:
    with pytest.raises(CheckpointDamagedError, match="__0_0.distcp"):
        read_dcp(write_pieces(tmp_path / "ckpt", (2,), {(0,): torch.ones(2)}, info=info))


def test_poisoned_metadata_is_refused_and_not_run(tmp_path: Path) -> None:
    path = write_dcp(tmp_path / "ckpt", {"w": torch.ones(2)})
    metadata = pickle.loads((path / ".metadata").read_bytes())
    with must_not_run(tmp_path) as poison:
        for bad in (poison, [poison], {"metadata": metadata, "x": poison}):
            write_metadata(path, bad)
            with pytest.raises(CheckpointForeignError, match=r"wants to run \w+\.open"):
                read_foreign(path)
        metadata.planner_data = poison
        write_metadata(path, metadata)
        with pytest.raises(CheckpointForeignError, match="wants to run"):
            read_foreign(path)


@pytest.mark.parametrize(
    "name",
    ["builtins eval", "os system", "torch load", "torch.serialization load", "torch.hub load", "functools partial",
     "torch.distributed.checkpoint.metadata __builtins__", "torch.distributed.checkpoint.metadata os.system",
     "pathlib os", "torch os.system", "operator attrgetter"],
)  # fmt: skip
def test_no_other_global_is_found(tmp_path: Path, name: str) -> None:
    path = write_dcp(tmp_path / "ckpt", {"w": torch.ones(2)})
    (path / ".metadata").write_bytes(b"\x80\x02c" + name.replace(" ", "\n").encode() + b"\n.")
    with pytest.raises(CheckpointForeignError, match="wants to run"):
        read_foreign(path)


def test_classes_of_torch_are_out_of_reach_of_the_metadata(tmp_path: Path) -> None:
    path = write_dcp(tmp_path / "ckpt", {"w": torch.ones(2)})
    # A pickle's BUILD with a slot state sets attributes: here on what stands for the class itself.
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (path / ".metadata").write_bytes(b"\x80\x02" + name + b"(N}X\x04\x00\x00\x00evil\x88stb.")
    with pytest.raises(CheckpointDamagedError):
        read_foreign(path)
    assert not hasattr(records.Metadata, "evil")


def test_a_poisoned_piece_and_a_poisoned_value_are_refused_and_not_run(tmp_path: Path) -> None:
    with must_not_run(tmp_path) as poison:
        path = write_pieces(tmp_path / "tensor", (2,), {(0,): torch.ones(2)})
        buffer = io.BytesIO()
        torch.save(poison, buffer)
        (path / "__0_0.distcp").write_bytes(b"\0" * 7 + buffer.getvalue())
        metadata = pickle.loads((path / ".metadata").read_bytes())
        next(iter(metadata.storage_data.values())).length = buffer.tell()
        write_metadata(path, metadata)
        with pytest.raises(CheckpointForeignError, match="wants to run"):
            read_foreign(path)
        path = write_dcp(tmp_path / "value", {"w": torch.ones(2), "x": Poison(poison.canary)})
        with pytest.raises(CheckpointForeignError, match="wants to run"):
            read_foreign(path)


def test_missing_and_truncated_data_is_damaged(tmp_path: Path) -> None:
    path = write_dcp(tmp_path / "ckpt", {"w": torch.ones(2)})
    file = next(path.glob("*.distcp"))
    data = file.read_bytes()
    for keep in (0, 10, len(data) - 1):
        file.write_bytes(data[:keep])
        with pytest.raises(CheckpointDamagedError, match=file.name):
            read_foreign(path)
    file.unlink()
    with pytest.raises(CheckpointDamagedError, match=file.name):
        read_foreign(path)
