"""Loading into modules that are not quite the saved one: by prefix, with other shapes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everygpu
from everygpu.errors import CheckpointMismatchError
from tests.checkpoint.models import same_state, snapshot


class Pretrained(nn.Module):
    """An encoder and a head."""

    def __init__(self, num_classes: int = 5) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, num_classes)


@pytest.fixture
def source() -> Pretrained:
    model = Pretrained()
    model.encoder(torch.randn(8, 3))
    return model


@pytest.fixture
def path(tmp_path: Path, source: Pretrained) -> Path:
    return everygpu.save(tmp_path / "ckpt", model=source)


def assert_refused(path: Path, target: nn.Module, named: str, **options: Any) -> None:
    before = snapshot(target)
    with pytest.raises(CheckpointMismatchError, match=named):
        everygpu.load(path, model=target, **options)
    assert same_state(snapshot(target), before)


def values(model: nn.Module) -> list[list[float]]:
    return [value.flatten().tolist() for value in model.state_dict().values()]


def test_a_prefix_selects_a_part(path: Path, source: Pretrained) -> None:
    head, encoder = nn.Linear(4, 5), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    everygpu.load(path, model=head, prefix="head.")
    everygpu.load(path, model=encoder, prefix="encoder.")
    assert values(head) == values(source.head)
    assert same_state(snapshot(encoder), snapshot(source.encoder))


def test_a_prefix_that_nothing_has_is_refused(path: Path) -> None:
    assert_refused(path, nn.Linear(4, 5), r"the prefix 'haed\.'; they are encoder\.0\.weight", prefix="haed.")


def test_the_part_must_still_fit(path: Path) -> None:
    assert_refused(path, nn.Linear(4, 6), r"weight: \(5, 4\) in the checkpoint, \(6, 4\)", prefix="head.")


def test_tensors_of_other_shapes_are_left_out_and_logged(path: Path, source: Pretrained, caplog) -> None:
    target = Pretrained(num_classes=7)
    head = snapshot(target.head)
    assert_refused(path, target, r"2 of another shape.*ignore_mismatched=True")
    everygpu.load(path, model=target, ignore_mismatched=True)
    assert same_state(snapshot(target.encoder), snapshot(source.encoder))
    assert same_state(snapshot(target.head), head)
    assert "2 tensors of model keep their values" in caplog.text
    assert "head.weight: (5, 4) in the checkpoint, (7, 4) in the target" in caplog.text


def test_ignoring_shapes_does_not_ignore_names(path: Path) -> None:
    target = Pretrained(num_classes=7)
    target.neck = nn.Linear(1, 1)
    assert_refused(path, target, r"2 missing, 0 unknown and 0 of another shape", ignore_mismatched=True)
    everygpu.load(path, model=target, ignore_mismatched=True, strict=False)


def test_only_the_model_is_loaded_in_part(tmp_path: Path, source: Pretrained) -> None:
    path = everygpu.save(tmp_path / "ckpt", model=source, ema=source)
    ema = Pretrained()
    everygpu.load(path, model=nn.Linear(4, 5), ema=ema, prefix="head.")
    assert same_state(snapshot(ema), snapshot(source))


class Newer(nn.Module):
    """Its values of before version 2 were a hundredth of what they are now."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if (local_metadata.get("version") or 1) < 2:
            state_dict[f"{prefix}weight"] = 100 * state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize("is_ours", [True, False])
def test_modules_learn_their_saved_version(tmp_path: Path, is_ours: bool) -> None:
    path, source, target = tmp_path / "saved", nn.ModuleDict({"part": Newer()}), Newer()
    if is_ours:
        everygpu.save(path, model=source)
    else:
        torch.save(nn.DataParallel(source).state_dict(), path)
    everygpu.load(path, model=target, **({"prefix": "part."} if is_ours else {}))
    assert target.weight.tolist() == [1, 1]
