"""Models found by name, and what is said about those that can't be used."""

import builtins
import sys

import pytest
import torch
from torch import nn

from everygpu.bench import Batches
from everygpu.bench.training import Training, compute_loss, find_training, repeat_rows, split_batch
from everygpu.errors import BenchmarkError, OptionError
from tests.bench import own
from tests.bench.measuring import OWN


@pytest.mark.parametrize("name", ["tiny", f"{OWN}classifier", f"{OWN}keywords", f"{OWN}positional"])
def test_a_model_with_everything_to_train_it(name):
    training = find_training(name)
    loss = compute_loss(training.model, training.loss, training.batch)
    loss.backward()
    before = [p.detach().clone() for p in training.model.parameters()]
    training.optimizer.step()
    assert loss.shape == ()
    assert any(not torch.equal(a, b) for a, b in zip(before, training.model.parameters()))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt3", "'gpt3' names no function"),
        ("tests.bench.own:", "No function '' in tests.bench.own"),
        ("nowhere:f", "No module 'nowhere': .* Run the command in the directory of the file"),
        ("tests.bench.nowhere:f", "No module 'tests.bench.nowhere'"),
        ("tests.bench.own.deeper:f", "No module 'tests.bench.own.deeper'"),
        (f"{OWN}nothing", "No function 'nothing' in tests.bench.own"),
        (f"{OWN}NUMBER", "No function 'NUMBER' in tests.bench.own"),
        (f"{OWN}three", r"own:three\(\) returns a tuple of 3\. Return \(model, loss, optimizer, batch\)"),
        (f"{OWN}net", r"own:net\(\) returns a Sequential\."),
    ],
)
def test_what_cannot_be_used(name, words):
    with pytest.raises(OptionError, match=words):
        find_training(name)


NO_ROWS = "returns a batch without rows"


@pytest.mark.parametrize(
    ("position", "value", "words"),
    [
        (0, 3, "returns a int first. Return a torch.nn.Module"),
        (1, "mse", "returns a str second. Return a loss"),
        (2, 0.1, "returns a float third. Return an optimizer"),
        (2, lambda: own.sgd(own.net()), "an optimizer over other parameters"),
        (3, "a batch", NO_ROWS),
        (3, Batches([]), NO_ROWS),
        (3, Batches([own.classifier()[3], "a batch"]), NO_ROWS),
        (3, (torch.ones(3, 3), torch.ones(4)), "a batch without rows on axis 0. .* 3 .* 4"),
    ],
)
def test_what_cannot_be_trained(monkeypatch, position, value, words):
    parts = list(own.classifier())
    parts[position] = value() if callable(value) else value
    monkeypatch.setattr(own, "three", lambda: tuple(parts))
    with pytest.raises(OptionError, match=words):
        find_training(f"{OWN}three")


def test_what_the_function_raises_is_its_own():
    with pytest.raises(KeyError, match="mine"):
        find_training(f"{OWN}failing")


def test_a_module_that_misses_another_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "misses_another.py").write_text("import nowhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="'nowhere'") as caught:
        find_training("misses_another:f")
    assert not isinstance(caught.value, OptionError)


def test_a_script_that_parses_arguments_as_it_is_imported_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "parses.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.argv", ["-c", "bench", "--apart", "{}"])
    with pytest.raises(OptionError, match="parses:bench exits with 2: .* under if __name__ == '__main__'"):
        find_training("parses:bench")
    monkeypatch.setattr("tests.bench.own.three", lambda: sys.exit(2))
    with pytest.raises(OptionError, match=r"own:three exits with 2.* write parse_args\(\[\]\)"):
        find_training(f"{OWN}three")
    assert "unrecognized arguments" in capsys.readouterr().err  # of the row's process, which isn't shown


def test_images_need_torchvision(monkeypatch):
    plain = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("torchvision"):
            raise ModuleNotFoundError(name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for name in ("resnet50", "resnet18"):
        with pytest.raises(BenchmarkError, match="needs torchvision"):
            find_training(name)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_images_are_channels_last(name):
    pytest.importorskip("torchvision")
    training = find_training(name)
    whole = repeat_rows((training.batch[0][:2], training.batch[1][:2]), 2)
    assert whole[0].is_contiguous(memory_format=torch.channels_last)
    assert training.model.conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_gpt2_has_its_size():
    with torch.device("meta"):
        training = find_training("gpt2")
    assert sum(p.numel() for p in training.model.parameters()) == 124_475_904
    assert [tuple(x.shape) for x in training.batch] == [(16, 1024)] * 2


def test_batches_are_taken_apart_as_train_step_does():
    assert split_batch([1, 2, 3]) == (1, (2, 3))
    assert split_batch((1,)) == (1, ())
    assert split_batch({"x": 1}) == ({"x": 1}, ())
    record = Training(nn.Identity(), None, None, 0)
    assert split_batch(record) == (record, ())


class Output:
    loss = torch.tensor([1.0, 3.0])


@pytest.mark.parametrize("output", [Output(), {"loss": Output.loss}, Output.loss])
def test_losses_of_replicas_become_one(output):
    assert compute_loss(lambda x: output, None, torch.ones(2)) == 2
