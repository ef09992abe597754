"""Converting: every format into every other, nothing lost silently, nothing half-written."""

import os
import signal
import stat
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

import everygpu
from everygpu.checkpoint.contents import read_any
from everygpu.checkpoint.convert import Target, convert
from everygpu.errors import (
    CheckpointBusyError,
    CheckpointContentError,
    CheckpointError,
    CheckpointForeignError,
    CheckpointMismatchError,
    OptionError,
)
from tests.checkpoint.models import Net, same_state, snapshot
from tests.checkpoint.test_dcp import trained, write_dcp

output = import_module("everygpu.checkpoint.output")
TARGETS: list[Target] = ["everygpu", "torch", "safetensors", "dcp"]


def make_native(path: Path, model: nn.Module) -> None:
    everygpu.save(path, model=model)


def make_torch(path: Path, model: nn.Module) -> None:
    torch.save(model.state_dict(), path)


def make_safetensors(path: Path, model: nn.Module) -> None:
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path)


def make_dcp(path: Path, model: nn.Module) -> None:
    write_dcp(path, {"model": model.state_dict()})


MAKERS: list[Callable[[Path, nn.Module], None]] = [make_native, make_torch, make_safetensors, make_dcp]


def names_in(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


@pytest.mark.parametrize("make", MAKERS, ids=[make.__name__ for make in MAKERS])
@pytest.mark.parametrize("target", TARGETS)
def test_every_format_into_every_other(tmp_path: Path, make: Any, target: Target) -> None:
    source, model = Net(1), Net(2)
    make(tmp_path / "a", source)
    outcome = convert(tmp_path / "a", tmp_path / "b", target=target)
    assert (outcome.target, outcome.num_tensors, outcome.left_out) == (target, len(source.state_dict()), ())
    assert names_in(tmp_path) == {"a", "b"}
    everygpu.load(tmp_path / "b", model=model)
    assert same_state(snapshot(model), snapshot(source))


def test_what_others_read(tmp_path: Path) -> None:
    source = Net(1)
    everygpu.save(tmp_path / "a", model=source)
    for name in ("b.pt", "b.safetensors"):
        assert convert(tmp_path / "a", tmp_path / name).target == ("torch" if name == "b.pt" else "safetensors")
    convert(tmp_path / "a", tmp_path / "dcp", target="dcp")
    expected = dict(source.state_dict())
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert same_state(dict(loaded), expected)
    assert loaded._metadata[""] == {"version": 1}
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    assert same_state(load_file(tmp_path / "b.safetensors"), expected)
    state = {"model": Net(2).state_dict()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same_state(dict(state["model"]), expected)


def test_every_part_reaches_a_directory_of_ours(tmp_path: Path) -> None:
    (model, optimizer), (target, restored) = trained(1), trained(2)
    document = {
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "ema": Net(5).state_dict(),
    }
    torch.save(document | {"strict": 1, "odd": {1, 2}}, tmp_path / "a.pt")
    outcome = convert(tmp_path / "a.pt", tmp_path / "b")
    assert [what.split(":")[0] for what in outcome.left_out] == ["'strict'", "'odd'"]
    assert outcome.notes == ("the model is taken from 'state_dict'; there is also 'ema'",)
    ema = Net(6)
    assert everygpu.load(tmp_path / "b", model=target, optimizer=restored, ema=ema) == {"epoch": 3}
    assert same_state(snapshot(target, restored, ema), snapshot(model, optimizer, Net(5)))


def test_ours_into_ours_keeps_everything(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    shuffle = torch.Generator().manual_seed(7)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "shuffle": shuffle, "ema": Net(5)}
    parts["class"] = torch.optim.SGD(model.parameters())
    everygpu.save(tmp_path / "a", **parts, epoch=3)
    expected = torch.randn(2)
    convert(tmp_path / "a", tmp_path / "b")
    after = torch.get_rng_state()
    target, restored = trained(2)
    again = {
        "model": target,
        "optimizer": restored,
        "scheduler": torch.optim.lr_scheduler.StepLR(restored, 1),
        "shuffle": torch.Generator(),
        "ema": Net(6),
        "class": torch.optim.SGD(target.parameters()),
    }
    for name in ("optimizer", "class"):  # classes, too, where the settings would fit
        other = torch.optim.Adamax(target.parameters())
        with pytest.raises(CheckpointMismatchError, match=f"{name} must be of .*, torch.optim.*, got .*Adamax"):
            everygpu.load(tmp_path / "b", **{name: other})
    assert everygpu.load(tmp_path / "b", **again, rng=True) == {"epoch": 3}
    assert torch.equal(torch.randn(2), expected)
    assert same_state(
        snapshot(*(again[name] for name in ("model", "optimizer", "scheduler", "ema"))),
        snapshot(*(parts[name] for name in ("model", "optimizer", "scheduler", "ema"))),
    )
    assert torch.equal(again["shuffle"].get_state(), shuffle.get_state())
    torch.set_rng_state(after)


def test_converting_leaves_the_random_states_alone(tmp_path: Path) -> None:
    everygpu.save(tmp_path / "a", model=Net(1))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    convert(tmp_path / "a", tmp_path / "b")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["b.pt", "b.safetensors", "b"])
def test_prefixes(tmp_path: Path, name: str) -> None:
    torch.save(nn.Sequential(nn.BatchNorm1d(2)).state_dict(), tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / name, strip_prefix="0.", add_prefix="net.")
    found = read_any(tmp_path / name)
    assert found.model is not None
    assert found.model.keys() == {f"net.{name}" for name in nn.BatchNorm1d(2).state_dict()}
    if name != "b.safetensors":
        assert found.versions["net"] == {"version": 2}


def test_names_without_the_prefix_stay(tmp_path: Path) -> None:
    torch.save({"model.w": torch.ones(1), "loss.w": torch.ones(2)}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt", strip_prefix="model.")
    assert torch.load(tmp_path / "b.pt").keys() == {"w", "loss.w"}


def test_names_that_would_collide_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    torch.save({"model.w": torch.ones(1), "w": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointMismatchError, match=r"got 'w' for those of model\.w and w"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", strip_prefix="model.")
    assert names_in(tmp_path) == {"a.pt"}


def test_a_prefix_that_no_name_has_is_a_wrong_option(tmp_path: Path) -> None:
    torch.save({"model.w": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(OptionError, match="where names begin with 'model.'"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", strip_prefix="modle.")


def test_dtype_is_for_floating_point_only(tmp_path: Path) -> None:
    state = {"f": torch.ones(2), "i": torch.ones(2, dtype=torch.int64), "c": torch.ones(2, dtype=torch.complex64)}
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt", dtype=torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in torch.load(tmp_path / "b.pt").items()}
    assert dtypes == {"f": torch.bfloat16, "i": torch.int64, "c": torch.complex64}


@pytest.mark.parametrize("name", ["b.pt", "b"])
def test_tied_tensors_stay_tied_in_another_dtype(tmp_path: Path, name: str) -> None:
    torch.save(Net(1).state_dict(), tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / name, dtype=torch.float16)
    state = read_any(tmp_path / name).model or {}
    assert state["embed.weight"].dtype == torch.float16
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()


def test_a_section_of_ours_and_of_others(tmp_path: Path) -> None:
    everygpu.save(tmp_path / "a", model=Net(1), ema=Net(2))
    torch.save({"model": Net(1).state_dict(), "ema": Net(2).state_dict()}, tmp_path / "a.pt")
    for name in ("a", "a.pt"):
        convert(tmp_path / name, tmp_path / f"{name}.safetensors", section="ema")
        assert same_state(load_file(tmp_path / f"{name}.safetensors"), dict(Net(2).state_dict()))
        with pytest.raises(CheckpointMismatchError, match="section must be"):
            convert(tmp_path / name, tmp_path / "c", section="eam")


def test_small_parts_of_large_memory_are_written_alone(tmp_path: Path) -> None:
    base = torch.zeros(100_000)
    torch.save({"w": base[:4], "v": base[4:8]}, tmp_path / "a.pt")
    for name in ("b.pt", "b.safetensors"):
        convert(tmp_path / "a.pt", tmp_path / name)
        assert (tmp_path / name).stat().st_size < 5_000


@pytest.mark.parametrize("target", TARGETS)
def test_a_destination_that_is_taken_is_only_replaced_when_asked_to(tmp_path: Path, target: Target) -> None:
    torch.save(Net(1).state_dict(), tmp_path / "a.pt")
    torch.save(Net(2).state_dict(), tmp_path / "b.pt")
    convert(tmp_path / "a.pt", tmp_path / "c", target=target)
    with pytest.raises(CheckpointForeignError, match="Pass --overwrite"):
        convert(tmp_path / "b.pt", tmp_path / "c", target=target)
    assert same_state(dict(read_any(tmp_path / "c").model or {}), dict(Net(1).state_dict()))
    convert(tmp_path / "b.pt", tmp_path / "c", target=target, overwrite=True)
    assert same_state(dict(read_any(tmp_path / "c").model or {}), dict(Net(2).state_dict()))
    assert names_in(tmp_path) == {"a.pt", "b.pt", "c"}


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path, target: Target) -> None:
    torch.save(Net(1).state_dict(), tmp_path / "a.pt")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("dir", "file"):
        with pytest.raises(CheckpointForeignError):
            convert(tmp_path / "a.pt", tmp_path / name, target=target, overwrite=True)
    assert (tmp_path / "dir" / "precious").read_text() == (tmp_path / "file").read_text() == "x"


def test_in_place(tmp_path: Path) -> None:
    torch.save(nn.Sequential(Net(1)).state_dict(), tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a.pt", strip_prefix="0.", overwrite=True)
    assert same_state(dict(torch.load(tmp_path / "a.pt")), dict(Net(1).state_dict()))


@pytest.mark.parametrize("name", ["b.pt", "b.safetensors"])
def test_permissions_and_links(tmp_path: Path, name: str) -> None:
    torch.save(Net(1).state_dict(), tmp_path / "a.pt")
    (tmp_path / "real").mkdir()
    os.symlink(f"real/{name}", tmp_path / name)
    old = os.umask(0o027)
    try:
        convert(tmp_path / "a.pt", tmp_path / name)
    finally:
        os.umask(old)
    assert (tmp_path / name).is_symlink()
    assert stat.S_IMODE((tmp_path / "real" / name).stat().st_mode) == 0o640
    (tmp_path / "real" / name).chmod(0o604)
    convert(tmp_path / "a.pt", tmp_path / name, overwrite=True)
    assert stat.S_IMODE((tmp_path / "real" / name).stat().st_mode) == 0o604


@pytest.mark.parametrize(
    ("target", "writer"), [("torch", "torch.save"), ("safetensors", "everygpu.checkpoint.output.save_file"),
                           ("dcp", "torch.distributed.checkpoint.state_dict_saver.save")],
)  # fmt: skip
def test_a_full_disk_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Target, writer: str
) -> None:
    torch.save(Net(1).state_dict(), tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b", target=target)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, fail)
    with pytest.raises(CheckpointError, match="No space left"):
        convert(tmp_path / "a.pt", tmp_path / "b", target=target, overwrite=True)
    assert same_state(dict(read_any(tmp_path / "b").model or {}), dict(Net(1).state_dict()))
    assert names_in(tmp_path) == {"a.pt", "b"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("name", ["b.pt", "b.safetensors"])
def test_what_a_killed_conversion_has_left_goes_with_the_next(tmp_path: Path, name: str) -> None:
    torch.save(Net(1).state_dict(), tmp_path / "a.pt")
    foreign = {f".x{name}.tmp-1-01234567", f".{name}.tmp-1"}
    for other in foreign:
        (tmp_path / other).touch()
    child = os.fork()
    if child == 0:
        with output.new_file_at(tmp_path / name):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(names_in(tmp_path) - foreign) == 3  # the lock's file, too
    convert(tmp_path / "a.pt", tmp_path / name)
    assert names_in(tmp_path) - foreign == {"a.pt", name}


def test_a_living_conversion_to_the_same_file_goes_on(tmp_path: Path) -> None:
    torch.save(Net(1).state_dict(), tmp_path / "a.pt")
    with output.new_file_at(tmp_path / "b.pt") as temporary:
        with pytest.raises(CheckpointBusyError, match="locked by another saver"):
            convert(tmp_path / "a.pt", tmp_path / "b.pt")
        torch.save(Net(2).state_dict(), temporary)
    assert names_in(tmp_path) == {"a.pt", "b.pt"}


# Some versions of torch say that they check them, some that they don't.
@pytest.mark.filterwarnings("ignore:.*[sS]parse")
def test_tensors_that_a_format_has_no_word_for(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, dtype=torch.complex128)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointContentError, match=r"complex128.*Choose --dtype"):
        convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    torch.save({"w": torch.eye(2).to_sparse()}, tmp_path / "s.pt")
    for name in ("b.safetensors", "b"):
        with pytest.raises(CheckpointContentError, match="layout"):
            convert(tmp_path / "s.pt", tmp_path / name)
    assert names_in(tmp_path) == {"a.pt", "s.pt"}


def test_extra_state_is_kept_or_named(tmp_path: Path) -> None:
    torch.save({"m.w": torch.ones(1), "m._extra_state": {"calls": 3}}, tmp_path / "a.pt")
    assert convert(tmp_path / "a.pt", tmp_path / "b").left_out == ()
    assert read_any(tmp_path / "b").model == {"m.w": torch.ones(1), "m._extra_state": {"calls": 3}}
    assert convert(tmp_path / "b", tmp_path / "c.safetensors").left_out == ("'m._extra_state': no tensor",)


def test_no_model(tmp_path: Path) -> None:
    everygpu.save(tmp_path / "a", epoch=3)
    torch.save({"epoch": 3}, tmp_path / "a.pt")
    for name in ("a", "a.pt"):
        with pytest.raises(CheckpointMismatchError, match="must hold one model's state dict"):
            convert(tmp_path / name, tmp_path / "b")
    assert names_in(tmp_path) == {"a", "a.pt"}
