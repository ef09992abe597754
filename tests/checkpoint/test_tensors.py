"""The safetensors file: every element type and layout comes back bit by bit, here and in safetensors itself."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from everygpu.checkpoint import tensors as module
from everygpu.checkpoint.tensors import check_storable, read_tensors, write_tensors
from everygpu.errors import CheckpointContentError, CheckpointDamagedError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    pytest.param(torch.complex32, marks=pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")),
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor with any bits at all, so nan payloads and subnormals too."""
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (*shape, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    return raw.view(dtype).reshape(shape)


def bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def roundtrip(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    with open(path, "wb") as file:
        write_tensors(file, tensors)
    return read_tensors(path)


def assert_same(a: Tensor, b: Tensor) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert bits(a) == bits(b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 5), (0,), (2, 0, 3), (1, 1)], ids=str)
def test_every_dtype_and_shape_survives(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(dtype, shape)
    back = roundtrip(tmp_path / "a.safetensors", {"x": tensor})
    assert back.keys() == {"x"}
    assert_same(back["x"], tensor)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([dtype for dtype in DTYPES if isinstance(dtype, torch.dtype)]), st.integers(0, 5)),
        max_size=8,
    )
)
def test_any_mix_survives(tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[torch.dtype, int]]) -> None:
    tensors = {f"t{i}": random_bits(dtype, (rows,)) for i, (dtype, rows) in enumerate(parts)}
    back = roundtrip(tmp_path_factory.mktemp("mix") / "a.safetensors", tensors)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same(back[name], tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[::3],
        torch.arange(48.0).reshape(1, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.ones(1).expand(5, 4),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        nn.Parameter(torch.arange(3.0)),
    ],
    ids=["transposed", "strided", "channels_last", "expanded", "conj", "neg", "parameter"],
)
def test_every_layout_survives(tmp_path: Path, tensor: Tensor) -> None:
    assert_same(roundtrip(tmp_path / "a.safetensors", {"x": tensor})["x"], tensor)


def test_chunks_join_to_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 10)
    tensors = {"a": torch.arange(101, dtype=torch.int16), "b": random_bits(torch.complex128, (7,))}
    back = roundtrip(tmp_path / "a.safetensors", tensors)
    for name, tensor in tensors.items():
        assert_same(back[name], tensor)


def test_safetensors_itself_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"w": torch.randn(3, 2), "half": torch.randn(5).bfloat16(), "flag": torch.tensor(True)}
    roundtrip(path, tensors)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)


def test_elements_are_aligned_and_without_gaps(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    roundtrip(path, {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(1, dtype=torch.complex128)})
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 64 == 0
    assert header["b"]["data_offsets"] == [0, 16]
    assert header["a"]["data_offsets"] == [16, 19]
    assert len(data) == 8 + length + 19


def test_shared_memory_is_stored_once(tmp_path: Path) -> None:
    weight = torch.randn(100)
    back = roundtrip(tmp_path / "a.safetensors", {"one": weight, "two": weight, "alias": weight.detach()})
    assert all(torch.equal(back[name], weight) for name in ("one", "two", "alias"))
    assert (tmp_path / "a.safetensors").stat().st_size < 2 * 400


def test_views_that_only_overlap_are_stored_each(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    tensors = {
        "all": base,
        "head": base[:3],
        "grid": base.view(2, 3),
        "square": base[:4].view(2, 2),
        "turned": base[:4].view(2, 2).t(),
        "bits": base.view(torch.int32),
        "complex": torch.view_as_complex(base.view(3, 2)),
        "conj": torch.view_as_complex(base.view(3, 2)).conj(),
    }
    back = roundtrip(tmp_path / "a.safetensors", tensors)
    for name, tensor in tensors.items():
        assert_same(back[name], tensor)


def test_empty_tensors_keep_their_own_shape(tmp_path: Path) -> None:
    tensors = {"a": torch.empty(0, 2), "b": torch.empty(0, 3), "c": torch.empty(0, dtype=torch.int8)}
    back = roundtrip(tmp_path / "a.safetensors", tensors)
    assert [tuple(back[name].shape) for name in "abc"] == [(0, 2), (0, 3), (0,)]


def test_a_file_without_tensors_is_readable(tmp_path: Path) -> None:
    assert roundtrip(tmp_path / "a.safetensors", {}) == {}


def test_a_file_of_safetensors_own_writer_is_readable(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    assert torch.equal(read_tensors(tmp_path / "a.safetensors")["x"], torch.ones(2))


@pytest.mark.parametrize("keep", [0, 7, 8, 60, 200, -1])
def test_a_truncated_file_is_damaged(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.safetensors"
    roundtrip(path, {"x": torch.randn(100)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointDamagedError, match=r"a\.safetensors"):
        read_tensors(path)


@pytest.mark.parametrize(
    "notes",
    [
        "[]",
        "{",
        '{"dtypes": 1}',
        '{"dtypes": {"x": "save"}}',
        '{"dtypes": {"x": "nothing"}}',
        '{"dtypes": {"x": "float64"}}',
        '{"dtypes": {"y": "int8"}}',
        '{"aliases": {"y": "z"}}',
    ],
)
def test_notes_that_make_no_sense_are_damage(tmp_path: Path, notes: str) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "a.safetensors"
    save_file({"x": torch.ones(2, dtype=torch.uint8)}, path, metadata={"everygpu": notes})
    with pytest.raises(CheckpointDamagedError, match=r"a\.safetensors"):
        read_tensors(path)


class Elsewhere(Tensor):
    """A wrapper subclass: its own memory holds nothing."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> "Elsewhere":
        return Tensor._make_wrapper_subclass(cls, shape)

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise NotImplementedError


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.ones(2, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        lambda: Elsewhere((2,)),
    ],
    ids=["sparse", "meta", "quantized", "subclass"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_without_plain_memory_are_refused(make: Callable[[], Tensor]) -> None:
    with pytest.raises(CheckpointContentError, match="at model.weight"):
        check_storable(make(), "model.weight")


def test_the_name_of_the_metadata_is_refused() -> None:
    with pytest.raises(CheckpointContentError, match="reserves"):
        check_storable(torch.ones(1), "__metadata__")


def test_gpu_tensors_survive(tmp_path: Path, devices) -> None:
    tensors = {f"x{i}": torch.randn(64, 33, device=device).t() for i, device in enumerate(devices(2))}
    back = roundtrip(tmp_path / "a.safetensors", tensors)
    for name, tensor in tensors.items():
        assert_same(back[name], tensor.cpu())
