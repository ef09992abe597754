"""Whatever bytes a file holds, reading it gives a checkpoint or an error of ours, and runs nothing."""

import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from everygpu.checkpoint.foreign import read_foreign
from everygpu.errors import CheckpointError
from tests.checkpoint.foreign.test_dcp import write_dcp
from tests.checkpoint.foreign.test_sharded import write_sharded

STATE = {"model": {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.zeros(3, dtype=torch.int8)}, "epoch": 3}


def make_torch(directory: Path) -> Path:
    torch.save(STATE, directory / "a.pt")
    return directory / "a.pt"


def make_legacy(directory: Path) -> Path:
    torch.save(STATE, directory / "a.pt", _use_new_zipfile_serialization=False)
    return directory / "a.pt"


def make_safetensors(directory: Path) -> Path:
    save_file(STATE["model"], directory / "a.safetensors")
    return directory / "a.safetensors"


def make_index(directory: Path) -> Path:
    return write_sharded(directory, "safetensors")


def make_metadata(directory: Path) -> Path:
    return write_dcp(directory / "dcp", STATE) / ".metadata"


def make_payload(directory: Path) -> Path:
    return write_dcp(directory / "dcp", STATE) / "__0_0.distcp"


FORMATS = [make_torch, make_legacy, make_safetensors, make_index, make_metadata, make_payload]


@pytest.fixture(scope="module", params=FORMATS, ids=[make.__name__ for make in FORMATS])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A file to spoil, with its right content; made once for each format."""
    make: Callable[[Path], Path] = request.param
    path = make(tmp_path_factory.mktemp("garbage"))
    return path, path.read_bytes()


def read(path: Path, data: bytes) -> bool:
    """Write the data and read the checkpoint; tell whether it was readable."""
    path.write_bytes(data)
    whole = path.parent if path.parent.name == "dcp" else path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = read_foreign(whole)
        except CheckpointError:
            return False
    for tensor in (found.model or {}).values():
        assert tensor.sum() is not None  # the memory is really there
    return True


def test_the_right_content_is_read(target: tuple[Path, bytes]) -> None:
    assert read(*target)


@settings(max_examples=40)
@given(share=st.floats(0, 1, exclude_max=True))
def test_any_truncation_is_noticed(target: tuple[Path, bytes], share: float) -> None:
    path, data = target
    assert not read(path, data[: int(share * len(data))])


@settings(max_examples=60)
@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(1, 255), length=st.sampled_from([1, 1, 4, 64]))
def test_any_altered_bytes_are_read_or_refused(
    target: tuple[Path, bytes], place: float, value: int, length: int
) -> None:
    path, data = target
    at = int(place * len(data))
    altered = bytes(byte ^ value for byte in data[at : at + length])
    read(path, data[:at] + altered + data[at + length :])


@settings(max_examples=60)
@given(
    head=st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02", b"\x80\x04", b"\x10\0\0\0\0\0\0\0{", b'{"weight_map": ']),
    tail=st.binary(max_size=200),
)
def test_garbage_is_refused(target: tuple[Path, bytes], head: bytes, tail: bytes) -> None:
    path, _ = target
    assert not read(path, head + tail)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=60)
@given(
    document=json_values
    | st.dictionaries(
        st.sampled_from(["weight_map", "metadata"]), json_values | st.dictionaries(st.text(), json_values)
    )
)
def test_any_index_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, document: object) -> None:
    directory = tmp_path_factory.mktemp("index")
    read(directory / "model.safetensors.index.json", json.dumps(document).encode())


pickle_values = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=60)
@given(value=pickle_values, protocol=st.integers(0, 5))
def test_any_pickle_is_refused(target: tuple[Path, bytes], value: object, protocol: int) -> None:
    path, _ = target
    assert not read(path, pickle.dumps(value, protocol))
