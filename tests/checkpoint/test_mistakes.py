"""What people get wrong, and what files of others hold: one typed error that says what to do."""

import argparse
import json
import logging
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file, save_model
from torch import nn

import everygpu
from everygpu.checkpoint.verify import examine
from everygpu.errors import (
    CheckpointContentError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointForeignError,
    CheckpointMismatchError,
    OptionError,
)
from everygpu.exit_codes import report_reason
from tests.checkpoint.forge import agree, edit_document
from tests.checkpoint.models import Net, same_state


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda p: everygpu.load(p, model=Net(), map_location="cpu"),
            "map_location .* Leave it out: tensors go to where",
        ),
        (
            lambda p: everygpu.load(p, model=Net(), weights_only=True),
            "weights_only .* nothing in a file is ever executed",
        ),
        (lambda p: everygpu.load(p, model=Net(), strcit=False), "strcit .*Did you mean strict=?"),
        (lambda p: everygpu.load(p, modle=Net()), "modle is a Net. Did you mean model=?"),
        (lambda p: everygpu.CheckpointManager(p, evry=10), "^CheckpointManager: evry .*Did you mean every=?"),
        (
            lambda p: everygpu.CheckpointManager(p, save_top_k=3),
            r"save_top_k .*Write best=\('loss', 'min', 3\), or keep=3",
        ),
        (
            lambda p: everygpu.save(p, model=Net(), optimiser=adam(Net())),
            "optimiser is a Adam. Did you mean optimizer=?",
        ),
        (lambda p: everygpu.save(Net(), p), r"the path comes first: save\(path, model=model\)"),
        (lambda p: everygpu.save(p, args=argparse.Namespace(lr=1)), r"args is a Namespace, .* Pass vars\(args\)\."),
    ],
)
def test_a_mistake_is_named_with_what_to_do(tmp_path: Path, call: Any, said: str) -> None:
    path = everygpu.save(tmp_path / "ckpt", model=Net(), epoch=1)
    with pytest.raises(CheckpointContentError, match=said):
        call(path)
    assert everygpu.load(path) == {"epoch": 1}


def test_a_model_in_the_path_s_place_is_not_printed() -> None:
    with pytest.raises(OptionError, match="^save: a Net is no path"):
        everygpu.save(Net(), model=Net())  # type: ignore[arg-type]


def test_names_of_others_that_are_near_are_no_mistakes(tmp_path: Path) -> None:
    parts = {
        "model2": Net(),
        "model_ema": Net(),
        "optimizer_d": adam(Net()),
        "mode": "train",
        "schedule": [1],
        "module": Net(),
    }
    everygpu.save(tmp_path / "ckpt", model=Net(), **parts)


def test_a_checkpoint_with_two_optimizers_says_what_it_has(tmp_path: Path) -> None:
    state = adam(Net()).state_dict()
    torch.save({"state_dict": Net().state_dict(), "optimizer_states": [state, state], "epoch": 3}, tmp_path / "a.ckpt")
    model = Net()
    with pytest.raises(CheckpointMismatchError, match=r"It has model, optimizer_states \(a list of 2\), epoch\."):
        everygpu.load(tmp_path / "a.ckpt", model=model, optimizer=adam(model))


def test_a_foreign_file_is_refused_once_and_without_torch_s_advice(tmp_path: Path) -> None:
    torch.save({"args": argparse.Namespace(lr=1)}, tmp_path / "a.pt")
    try:
        everygpu.load(tmp_path / "a.pt", model=Net())
        pytest.fail("it loads")
    except CheckpointForeignError:
        said = traceback.format_exc()
    assert said.count("Nothing in it was executed") == 1
    assert "Nothing of it was run" not in said
    assert "weights_only" not in said.rpartition("CheckpointForeignError")[2]


def test_a_model_that_is_not_tied_takes_the_names_that_save_model_left_out(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self, is_tied: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            if is_tied:
                self.b.weight, self.b.bias = self.a.weight, self.a.bias

    source, target = Two(True), Two(False)
    save_model(source, str(tmp_path / "model.safetensors"))
    everygpu.load(tmp_path / "model.safetensors", model=target)
    assert same_state(dict(target.state_dict()), dict(source.state_dict()))


class Stubborn:
    """Holds a number; may refuse to take another one back, after it has begun to."""

    def __init__(self, value: int, refuses: bool = False) -> None:
        self.value, self.refuses, self.tensor = value, refuses, torch.full((2,), value)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if self.refuses:
            self.refuses = False
            raise KeyError("an own check")
        self.tensor.copy_(state["tensor"])


def test_an_object_that_refuses_its_state_leaves_all_others_as_they_were(tmp_path: Path) -> None:
    saved = Net(1)
    parts = {"a": Stubborn(1), "b": Stubborn(1), "shuffle": torch.Generator().manual_seed(1)}
    path = everygpu.save(tmp_path / "ckpt", model=saved, optimizer=adam(saved), **parts)
    model, shuffle = Net(2), torch.Generator().manual_seed(2)
    optimizer = adam(model)
    model(torch.ones(4, 4)).sum().backward()
    optimizer.step()
    a, b = Stubborn(2), Stubborn(2, refuses=True)
    before = [shuffle.get_state(), dict(model.state_dict()), optimizer.state_dict()]
    before = [torch.clone(before[0]), {k: v.clone() for k, v in before[1].items()}, before[2]]
    with pytest.raises(KeyError, match="an own check"):
        everygpu.load(path, model=model, optimizer=optimizer, a=a, shuffle=shuffle, b=b)
    assert (a.value, b.value, a.tensor.tolist(), b.tensor.tolist()) == (2, 2, [2, 2], [2, 2])
    assert same_state([shuffle.get_state(), dict(model.state_dict()), optimizer.state_dict()], before)


def test_names_in_files_reach_neither_a_terminal_nor_a_log_as_they_are(tmp_path: Path, caplog: Any) -> None:
    bad = "x\x1b[2J\nWARNING all is well\x07"
    save_file({bad: torch.ones(1), "a": torch.ones(1)}, tmp_path / "a.safetensors")
    net = nn.Module()
    net.register_buffer("a", torch.zeros(2))
    found = []
    for strict in (True, False):
        with pytest.raises(CheckpointMismatchError) as caught:
            everygpu.load(tmp_path / "a.safetensors", model=net, strict=strict)
        found.append(str(caught.value))
    torch.save({bad: {"a": torch.ones(1)}, bad + "2": {"a": torch.ones(1)}}, tmp_path / "b.pt")
    with pytest.raises(CheckpointMismatchError) as caught:
        everygpu.load(tmp_path / "b.pt", model=net)
    found.append(str(caught.value))
    with caplog.at_level(logging.INFO, "everygpu"):
        everygpu.load(tmp_path / "a.safetensors", model=net, strict=False, ignore_mismatched=True)
    with pytest.raises(CheckpointContentError) as caught:
        everygpu.save(tmp_path / "ckpt", **{bad: torch.eye(2).to_sparse()})
    found += [str(caught.value), caplog.text]
    assert "\\x1b[2J\\nWARNING" in found[0]
    assert not any(letter in text for text in found for letter in ("\x1b", "\x07", "\nWARNING all"))


def test_the_file_for_a_reason_is_never_one_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.py"
    path.write_text("precious")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("train.py", "link", "new"):
        monkeypatch.setenv("EVERYGPU_REASON_FILE", str(tmp_path / name))
        report_reason("numbers")
    assert path.read_text() == "precious"
    assert (tmp_path / "new").read_text() == "numbers\n"
    assert sorted(os.listdir(tmp_path)) == ["link", "new", "train.py"]


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are UTF-8 elsewhere")
def test_a_path_that_is_not_utf_8_is_saved_to_and_loaded_from(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xe9sultat"))
    model, target = Net(1), Net(2)
    path = everygpu.save(folder / "ckpt", model=model, x=torch.ones(2))
    assert everygpu.load(path, model=target)["x"].sum() == 2
    assert same_state(dict(target.state_dict()), dict(model.state_dict()))
    assert examine(path).faults == ()
    with everygpu.CheckpointManager(folder / "run", model=model) as run:
        run.save(3)
    assert everygpu.CheckpointManager(folder / "run", model=Net(3)).resume() == 3
    torch.save(model.state_dict(), folder / "a.pt")
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    os.rename(tmp_path / "a.safetensors", folder / "a.safetensors")
    net = nn.Module()
    net.register_buffer("a", torch.zeros(1))
    everygpu.load(folder / "a.safetensors", model=net)
    everygpu.load(folder / "a.pt", model=target)


# Metadata of any kind.


@pytest.mark.parametrize(
    "run",
    [
        '{"step": 7, "serial": Infinity, "metrics": {}}',
        '{"step": 7, "serial": -Infinity, "metrics": {}}',
        '{"step": Infinity, "serial": 9, "metrics": {}}',
        '{"step": 7, "serial": 1.5, "metrics": {}}',
        f'{{"step": 7, "serial": 9, "metrics": {{"loss": {"9" * 400}}}}}',
        f'{{"step": 7, "serial": {"9" * 5000}, "metrics": {{}}}}',
        '{"step": 7, "serial": 9, "metrics": {"loss": NaN}}',
        '{"step": 7, "serial": 9, "metrics": [1]}',
        "[" * 3000 + "]" * 3000,
    ],
    ids=range(9),
)
@pytest.mark.filterwarnings("ignore:load. .*is taken:UserWarning")
def test_one_checkpoint_with_any_place_in_the_run_does_not_stop_it(tmp_path: Path, run: str) -> None:
    manager = everygpu.CheckpointManager(tmp_path, keep=9, best=("loss", "min", 1), model=Net(1))
    for step in (1, 7):
        manager.save(step, loss=1.0)
    document = tmp_path / "step-00000007" / "checkpoint.json"
    text = document.read_text()
    (line,) = [line for line in text.splitlines() if '"run":' in line]
    document.write_text(text.replace(line, f' "run": {run},'))
    agree(document.parent)
    manager = everygpu.CheckpointManager(tmp_path, keep=9, best=("loss", "min", 1), model=Net(2))
    assert manager.resume() in (1, 7)
    assert manager.latest() == manager.best() == tmp_path / "step-00000001"
    manager.save(8, loss=0.5)
    assert manager.latest() == manager.best() == tmp_path / "step-00000008"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 7, 10**30, 10**400, 1e308, float("inf"), float("-inf"), float("nan"), 2.5])
    | st.sampled_from(["", "x", "module", "plain", "state_dict", "bias", "torch.optim.adam.Adam", "\x1b[2J", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("kind", "state", "values", "versions", "parameters", "class", "param_groups", "params", "step"),
                    *(
                        "$tensor",
                        "$array",
                        "$tuple",
                        "$dict",
                        "$ordered",
                        "$counter",
                        "$float",
                        "$complex",
                        "$bytes",
                        "$x",
                    ),
                    *("$complex128", "bias", "weight", "0", "serial", "metrics", "python", "torch", "numpy", "model"),
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in inner for found in places(item, (*path, key)))]


def check_any_metadata(folder: Path, data: st.DataObject) -> None:
    """Put any JSON in any place of checkpoint.json; a load is right or a typed error, and changes all or nothing."""
    model = nn.Linear(1, 2)
    optimizer = adam(model)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    parts = {"model": model, "optimizer": optimizer}
    path = everygpu.save(folder / "ckpt", **parts, note=[1, (2, 3)], shuffle=torch.Generator())
    document = json.loads((path / "checkpoint.json").read_text())
    found = [p for p in places(document) if p and (p[0] != "rng" or len(p) < 3)]  # of long lists, which are all alike
    place = data.draw(st.sampled_from(found))
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = data.draw(JSON)
    edit_document(path, **document)
    target = nn.Linear(1, 2)
    targets = {"model": target, "optimizer": adam(target)}
    for extra in ({"rng": True}, {}, {"shuffle": torch.Generator()}):
        before = {name: value.clone() for name, value in target.state_dict().items()}
        said = "nothing changes"
        with suppress(CheckpointError):
            everygpu.load(path, **targets, **extra)
            said = ""
        assert not said or same_state(dict(target.state_dict()), before)
    examine(path)
    path.rename(folder / "step-00000001")
    manager = everygpu.CheckpointManager(folder, **targets)
    with suppress(CheckpointError):
        manager.resume()
    manager.latest()
    (folder / "step-00000001").rename(path)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.filterwarnings("ignore:load. .*is taken:UserWarning")
def test_any_metadata_loads_or_is_a_typed_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    check_any_metadata(tmp_path_factory.mktemp("any"), data)


@pytest.mark.slow
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.filterwarnings("ignore:load. .*is taken:UserWarning")
def test_any_metadata_at_length(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    check_any_metadata(tmp_path_factory.mktemp("any"), data)


@pytest.mark.parametrize("where", ["top", "list", "state dict"])
def test_a_file_that_contains_itself_is_a_typed_error(tmp_path: Path, where: str) -> None:
    loop: Any = []
    loop.append(loop)
    own: Any = {"model": Net().state_dict(), "history": loop}
    if where == "top":
        own["self"] = own
    if where == "state dict":
        own = {"a": torch.ones(1), "b": loop}
    torch.save(own, tmp_path / "a.pt")
    model = Net(3)
    with pytest.raises((CheckpointForeignError, CheckpointDamagedError), match="contains itself"):
        everygpu.load(tmp_path / "a.pt", model=model)
    assert same_state(dict(model.state_dict()), dict(Net(3).state_dict()))
