"""The files of a checkpoint: what others read in them, and that every element type comes back bit by bit."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

import everygpu
from everygpu.checkpoint import format as module
from everygpu.errors import CheckpointContentError, CheckpointError
from tests.checkpoint.forge import edit_document
from tests.checkpoint.models import Net, same_state

DTYPES = [getattr(torch, name) for name in sorted({*everygpu.checkpoint.values.DTYPES} - {"float4_e2m1fn_x2"})]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor with any bits at all, so nan payloads and subnormals too."""
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (*shape, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    return raw.view(dtype).reshape(shape)


def test_safetensors_reads_every_dtype_and_the_digests_are_those_of_the_files(tmp_path: Path) -> None:
    state = {str(dtype): random_bits(dtype, (3, 2)) for dtype in [*DTYPES, torch.float4_e2m1fn_x2]}
    path = everygpu.save(tmp_path / "ckpt", **state)
    assert same_state(everygpu.load(path), state)
    found = load_file(path / "training.safetensors")
    for name, tensor in state.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
    for line in (path / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((path / name).read_bytes()).hexdigest() == digest


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_a_dtype_that_safetensors_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointContentError, match="x is of torch.complex32, which safetensors lacks"):
        everygpu.save(tmp_path / "ckpt", x=torch.ones(2, dtype=torch.complex32))


def test_complex128_is_stored_as_pairs(tmp_path: Path) -> None:
    model = nn.Linear(3, 2, dtype=torch.complex128)
    model.register_buffer("tied", model.weight.detach())
    x = torch.randn(4, 5, dtype=torch.complex128)
    extras = {"a": x, "b": x.t()[1:3], "c": x.conj(), "d": x[:0], "e": x[0, 0]}
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(1, 3, dtype=torch.complex128)).abs().sum().backward()
    optimizer.step()
    path = everygpu.save(tmp_path / "ckpt", model=model, optimizer=optimizer, **extras)
    other = nn.Linear(3, 2, dtype=torch.complex128)
    other.register_buffer("tied", other.weight.detach())
    resumed = torch.optim.Adam(other.parameters())
    assert same_state(everygpu.load(path, model=other, optimizer=resumed), extras)
    assert same_state(dict(other.state_dict()), dict(model.state_dict()))
    assert same_state(resumed.state_dict(), optimizer.state_dict())
    assert load_file(path / "model.safetensors")["bias"].shape == (2, 2)
    everygpu.load(path, model=other, verify=False)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_tensors_of_any_strides_sizes_and_types_come_back(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    strides = data.draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    dtype = data.draw(st.sampled_from([*DTYPES, torch.complex128]))
    offset = data.draw(st.integers(0, 3))
    memory = random_bits(torch.uint8, (160 * dtype.itemsize,)).remainder(2).view(torch.uint8)
    tensor = memory.view(dtype).as_strided(shape, strides, offset)
    if dtype.is_complex and data.draw(st.booleans()):
        tensor = tensor.conj()
    if dtype == torch.float32 and data.draw(st.booleans()):
        tensor = torch.complex(tensor, tensor).conj().imag  # a negative view
    model = nn.Module()
    model.register_buffer("x", tensor)
    folder = tmp_path_factory.mktemp("any")
    path = everygpu.save(folder / "ckpt", model=model, y=tensor)
    assert torch.equal(_plain(everygpu.load(path)["y"]), _plain(tensor))
    with everygpu.CheckpointManager(folder / "run", asynchronous=True, model=model) as run:
        run.save(1)
    for place in (path, folder / "run"):
        target = nn.Module()
        target.register_buffer("x", torch.zeros(shape, dtype=dtype))
        everygpu.load(place, model=target)
        assert torch.equal(_plain(target.x), _plain(tensor))


def _plain(tensor: Tensor) -> Tensor:
    return torch.stack([tensor.resolve_conj().resolve_neg()]).flatten().view(torch.uint8)


def test_views_of_one_memory_come_back_apart_and_equal_ones_together(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    state = {"a": base[:6].view(2, 3), "b": base[4:].view(2, 4).t(), "all": base, "again": base, "conj": base.conj()}
    back = everygpu.load(everygpu.save(tmp_path / "ckpt", **state))
    assert same_state(back, state)
    assert back["all"].data_ptr() == back["again"].data_ptr()
    assert (tmp_path / "ckpt" / "training.safetensors").stat().st_size < 1000


def test_sha256sum_verifies_it_without_us(tmp_path: Path) -> None:
    everygpu.save(tmp_path / "ckpt", model=Net(1), x=torch.ones(3))
    command = ["sha256sum", "-c", "--strict", "SHA256SUMS"]
    if shutil.which(command[0]) is None:
        pytest.skip("no sha256sum here")
    done = subprocess.run(command, cwd=tmp_path / "ckpt", capture_output=True, text=True, check=True)
    assert done.stdout.count(": OK") == 3


def test_safetensors_reads_the_model(tmp_path: Path) -> None:
    everygpu.save(tmp_path / "ckpt", model=Net(3))
    own, target = Net(3).state_dict(), Net(4)
    found = load_file(tmp_path / "ckpt" / "model.safetensors")
    assert found.keys() == own.keys() - {"head.weight"}  # tied
    load_model(target, tmp_path / "ckpt" / "model.safetensors")
    assert same_state(dict(target.state_dict()), dict(own))


def test_large_models_are_written_in_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 300)
    model, target = Net(1), Net(2)
    path = everygpu.save(tmp_path / "ckpt", model=model, x=torch.ones(100), y=torch.ones(3))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in Net(1).state_dict().values()) - 96
    assert {*index["weight_map"].values()} == {file.name for file in path.glob("model-*.safetensors")}
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(path / file)[name], model.state_dict()[name])
    assert everygpu.load(path, model=target)["x"].sum() == 100
    assert same_state(dict(target.state_dict()), dict(model.state_dict()))
    (tmp_path / "other").mkdir()
    for file in path.glob("model*"):
        shutil.copy(file, tmp_path / "other")
    other = Net(3)
    everygpu.load(tmp_path / "other", model=other)  # as Transformers writes
    assert same_state(dict(other.state_dict()), dict(model.state_dict()))
    everygpu.save(path, model=model)
    assert {file.name for file in path.iterdir()} >= {"checkpoint.json", "SHA256SUMS"}


@pytest.mark.parametrize(
    "changes",
    [{"version": 99}, {"version": "1"}, {"version": True}, {"files": []}, {"files": {"../x": 3}}, {"format": "x"}],
    ids=str,
)
def test_another_document_is_a_typed_error(tmp_path: Path, changes: dict[str, object]) -> None:
    path = everygpu.save(tmp_path / "ckpt", model=Net(1), epoch=1)
    edit_document(path, **changes)
    with pytest.raises(CheckpointError, match=r"checkpoint\.json|SHA256SUMS|99"):
        everygpu.load(path)
