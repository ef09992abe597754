"""Scripts in the styles of PyTorch's own examples, run as scripts: the same numbers as on one device."""

import re
import shutil

import pytest
import torch

from tests.scripts import run_script

CLOSE = {"rtol": 1e-7, "atol": 1e-7}


@pytest.fixture
def run(capsys):
    """``run(name, *options, devices=...)`` gives the lines that a script prints."""

    def run_one(name, *options, devices=()):
        chosen = ("--devices", *map(str, devices)) if devices else ()
        run_script(f"tests/clients/scripts/{name}.py", *options, *chosen)
        return capsys.readouterr().out.splitlines()

    return run_one


def assert_same(found, expected):
    """Compare lines: their words exactly, their numbers up to the order of additions."""
    number = re.compile(r"-?\d+\.\d+")
    assert [number.sub("#", line) for line in found] == [number.sub("#", line) for line in expected]
    figures = [[float(x) for line in lines for x in number.findall(line)] for lines in (found, expected)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-7, abs=1e-7)
    assert len(set(figures[1])) > 5


def assert_same_state(*paths):
    found, expected = (torch.load(path, map_location="cpu") for path in paths)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_mnist(run, devices, tmp_path):
    expected = run("mnist", "--save-model", tmp_path / "one.pt")
    assert_same(run("mnist", "--save-model", tmp_path / "two.pt", devices=devices(2)), expected)
    assert_same_state(tmp_path / "two.pt", tmp_path / "one.pt")


@pytest.mark.parametrize("options", [(), ("--features-only",)], ids=["whole", "features"])
def test_imagenet(run, devices, tmp_path, options):
    for name in ("one", "two", "cut"):
        (tmp_path / name).mkdir()
    expected = run("imagenet", "--out", tmp_path / "one")
    assert_same(run("imagenet", *options, "--out", tmp_path / "two", devices=devices(2)), expected)
    run("imagenet", *options, "--out", tmp_path / "cut", "--epochs", 2, devices=devices(2))
    path = tmp_path / "cut" / "checkpoint.pth.tar"
    kept = shutil.copy(path, tmp_path / "kept")
    resumed = run("imagenet", *options, "--out", tmp_path / "cut", "--resume", path, devices=devices(2))
    assert_same(resumed, expected[len(expected) // 2 :])
    without = run("imagenet", "--out", tmp_path / "cut", "--resume", kept)
    assert_same(without, expected[len(expected) // 2 :])
