"""`everygpu.load` on checkpoints of other programs: into any module, all or nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import everygpu
from everygpu.errors import CheckpointMismatchError
from tests.checkpoint.models import WRAPPERS, Net, Wrap, same_state, snapshot
from tests.checkpoint.test_dcp import trained, write_dcp


class Lit(nn.Module):
    """As a LightningModule: holds the model and something more, under names of its own."""

    def __init__(self, model: nn.Module, name: str = "model") -> None:
        super().__init__()
        setattr(self, name, model)


def save_torch(model: nn.Module, path: Path) -> Path:
    torch.save(model.state_dict(), path)
    return path


def save_legacy(model: nn.Module, path: Path) -> Path:
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)
    return path


def save_nested(model: nn.Module, path: Path) -> Path:
    torch.save({"epoch": 1, "model_state_dict": model.state_dict()}, path)
    return path


def save_safe(model: nn.Module, path: Path) -> Path:
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path)
    return path


def save_dcp(model: nn.Module, path: Path) -> Path:
    return write_dcp(path, {"model": model.state_dict()})


SAVERS = [save_torch, save_legacy, save_nested, save_safe, save_dcp]


@pytest.mark.parametrize("save", SAVERS)
@pytest.mark.parametrize("wrap_source", [WRAPPERS["bare"], WRAPPERS["dp"], WRAPPERS["compiled dp"], Lit],
                         ids=["bare", "dp", "compiled dp", "lightning"])  # fmt: skip
@pytest.mark.parametrize("wrap_target", [WRAPPERS["bare"], WRAPPERS["compiled"], WRAPPERS["everygpu"]],
                         ids=["bare", "compiled", "everygpu"])  # fmt: skip
def test_any_file_loads_into_any_model(
    tmp_path: Path, save: Callable[[nn.Module, Path], Path], wrap_source: Wrap, wrap_target: Wrap
) -> None:
    source, target = Net(1), Net(2)
    everygpu.load(save(wrap_source(source), tmp_path / "ckpt"), model=wrap_target(target))
    assert same_state(dict(target.state_dict()), dict(source.state_dict()))
    assert target.head.weight is target.embed.weight


@pytest.mark.parametrize("names", [("model", "optimizer"), ("state_dict", "optimizer_state_dict"), ("net", "optim")])
@pytest.mark.parametrize("how", ["torch", "dcp"])
def test_model_optimizer_and_plain_values(tmp_path: Path, names: tuple[str, str], how: str) -> None:
    (model, optimizer), (target, restored) = trained(1), trained(2)
    values = {"epoch": 3, "best": torch.tensor(0.5), "nested": [torch.ones(2, dtype=torch.bfloat16), {"b": (2, 3)}]}
    state = {names[0]: model.state_dict(), names[1]: optimizer.state_dict(), **values}
    if how == "dcp":
        write_dcp(tmp_path / "a", state)
    else:
        torch.save(state, tmp_path / "a")
    rest = everygpu.load(tmp_path / "a", model=target, optimizer=restored)
    assert same_state(rest, values)
    assert same_state(snapshot(target, restored), snapshot(model, optimizer))


def test_what_is_loaded_does_not_depend_on_the_file(tmp_path: Path) -> None:
    (model, optimizer), (target, restored) = trained(1), trained(2)
    path = tmp_path / "a.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "x": torch.ones(999)}, path)
    rest = everygpu.load(path, model=target, optimizer=restored)
    with open(path, "r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert same_state(snapshot(target, restored), snapshot(model, optimizer))
    assert rest["x"].sum() == 999


def test_lightning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model, optimizer), (target, restored) = trained(1), trained(2)
    checkpoint = {
        "epoch": 4,
        "global_step": 100,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": Lit(model).state_dict(),
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {
            "ModelCheckpoint{'monitor': 'loss'}": {"best_model_score": torch.tensor(0.5), "k": 1, "dir": "x"}
        },
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "hyper_parameters": {"lr": 0.1},
    }
    torch.save(checkpoint, tmp_path / "last.ckpt")
    rest = everygpu.load(tmp_path / "last.ckpt", model=target, optimizer=restored)
    assert (rest["epoch"], rest["global_step"], rest["hyper_parameters"]) == (4, 100, {"lr": 0.1})
    assert same_state(snapshot(target, restored), snapshot(model, optimizer))
    assert caplog.text == ""  # the callback's score is no second model
    whole = Lit(Net(3))
    everygpu.load(tmp_path / "last.ckpt", model=whole)
    assert same_state(snapshot(whole.model), snapshot(model))


@pytest.mark.parametrize("save", SAVERS)
def test_a_prefix_that_is_given_is_not_looked_for(tmp_path: Path, save: Callable[[nn.Module, Path], Path]) -> None:
    students = nn.ModuleDict({"student": Net(1), "teacher": Net(3)})
    path, target = save(students, tmp_path / "ckpt"), Net(2)
    with pytest.raises(CheckpointMismatchError, match="one prefix"):
        everygpu.load(path, model=target)
    everygpu.load(path, model=target, prefix="student.")
    assert same_state(dict(target.state_dict()), dict(Net(1).state_dict()))
    everygpu.load(save(Lit(Net(4)), tmp_path / "lit"), model=target, prefix="model.")
    assert same_state(dict(target.state_dict()), dict(Net(4).state_dict()))


@pytest.mark.parametrize("wrap", [WRAPPERS["bare"], WRAPPERS["dp"], WRAPPERS["compiled"]])
def test_batch_norm_of_before_it_counted_batches(tmp_path: Path, wrap: Wrap) -> None:
    state = nn.Sequential(nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)).state_dict()
    old = {name: tensor + 1 for name, tensor in state.items() if not name.endswith("num_batches_tracked")}
    torch.save(old, tmp_path / "old.pt")
    target = nn.Sequential(nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True))
    everygpu.load(tmp_path / "old.pt", model=wrap(target))
    assert same_state(dict(target.state_dict()), {**state, **old})
    del state["0.num_batches_tracked"]  # but its version says that it should be there
    torch.save(state, tmp_path / "new.pt")
    with pytest.raises(CheckpointMismatchError, match=r"(?s)1 missing.*0\.num_batches_tracked"):
        everygpu.load(tmp_path / "new.pt", model=wrap(target))


def test_several_models_load_under_their_names(tmp_path: Path) -> None:
    saved = {"G": Net(1).state_dict(), "D": {"state_dict": Lit(Net(2), "net").state_dict()}, "step": 5}
    torch.save(saved, tmp_path / "gan.pt")
    generator, discriminator = Net(3), Net(4)
    assert everygpu.load(tmp_path / "gan.pt", G=generator, D=discriminator) == {"step": 5}
    assert same_state(snapshot(generator, discriminator), snapshot(Net(1), Net(2)))
    with pytest.raises(CheckpointMismatchError, match="several models under names of its own: 'G', 'D"):
        everygpu.load(tmp_path / "gan.pt", model=generator)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ({"model": nn.Linear(3, 3)}, "model has other names and shapes"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, "no part named optimizer"),
        ({"rng": True}, "random states"),
        ({"ema": Net(0)}, "no part named ema"),
        ({"epoch": Net(0)}, "epoch was saved as a int"),
    ],
    ids=["model", "optimizer", "rng", "ema", "epoch"],
)
def test_what_does_not_fit_changes_nothing(tmp_path: Path, what: dict[str, Any], match: str) -> None:
    torch.save({"model": Net(1).state_dict(), "epoch": 3}, tmp_path / "a.pt")
    target = Net(2)
    before = snapshot(target)
    with pytest.raises(CheckpointMismatchError, match=match):
        everygpu.load(tmp_path / "a.pt", **{"model": target} | what)
    assert same_state(snapshot(target), before)


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
@pytest.mark.parametrize("wrap", [WRAPPERS["bare"], WRAPPERS["compiled"], Lit], ids=["bare", "compiled", "lightning"])
def test_one_name_of_tied_tensors_is_enough(tmp_path: Path, kept: str, wrap: Wrap) -> None:
    left_out = ({"embed.weight", "head.weight"} - {kept}).pop()
    state = {f"model.{name}": tensor.clone() for name, tensor in Net(1).state_dict().items() if name != left_out}
    save_file(state, tmp_path / "model.safetensors")
    target = Net(2)
    everygpu.load(tmp_path, model=wrap(target))
    assert same_state(snapshot(target), snapshot(Net(1)))
    del state[f"model.{kept}"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatchError, match="2 missing"):
        everygpu.load(tmp_path, model=wrap(target))


def test_what_was_chosen_or_left_out_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save({"model": Net(1).state_dict() | {"note": "x"}, "ema": Net(2).state_dict()}, tmp_path / "a.pt")
    everygpu.load(tmp_path / "a.pt", model=Net(3))
    assert "a.pt: the model is taken from 'model'; there is also 'ema'." in caplog.text
    assert "'note' in 'model' is left out" in caplog.text
