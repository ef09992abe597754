"""benchmarks/coverage.py: a row for each model, also for one that can't be made; a later call goes on."""

import json

import pytest
import torch
from benchmarks import coverage
from torch import nn

from everygpu.bench.runner import read_results
from tests.bench import own
from tests.scripts import run_script

CPU = torch.device("cpu")


def make_own(name):
    model, loss, _, batch = getattr(own, name)()
    return nn.Sequential(model, nn.Dropout(0.5)) if loss is not None else model, loss, batch


@pytest.fixture(autouse=True)
def models_of_tests(monkeypatch):
    monkeypatch.setitem(coverage.MAKERS, "own", make_own)


def test_a_row_compares_all_ways_with_the_eager_one():
    row = coverage.finish(coverage.measure_model("own:classifier", CPU))
    assert row["num_params"] == 26
    assert "losses" not in row["bare"]
    for way in ("loop", "step"):
        assert row[way]["loss_difference"] < 1e-4  # also with dropout, which is left out
        assert row[way]["speed"] == pytest.approx(row["bare"]["ms"] / row[way]["ms"])
        assert row[way]["reason"] == "no GPU"
    json.dumps(row)


def test_a_model_that_fails_is_a_row():
    assert coverage.measure_model("own:failing", CPU) == {"not_made": "KeyError: 'mine'"}


def test_the_reason_is_what_is_logged():
    with coverage.heard() as reasons:
        coverage.logging.getLogger("everygpu").info(
            "TrainStep: steps run without CUDA graphs: %s.", "model.py:3 prints"
        )
        coverage.logging.getLogger("everygpu").info("something else")
    assert reasons == ["model.py:3 prints"]


def test_a_later_call_measures_what_is_left(tmp_path, monkeypatch, capsys):
    asked = []

    def run_batch(names, options, limit_s):
        asked.append(names)
        yield names[0], {"not_made": "mine"}

    script = {"list_models": lambda: ["a:1", "a:2", "b:1"], "run_batch": run_batch}
    for name, value in script.items():
        monkeypatch.setattr(coverage, name, value)
    path = tmp_path / "rows.jsonl"
    for options in (["--only", "a"], ["--part", "0/2"]):
        monkeypatch.setattr(coverage.sys, "argv", ["coverage.py", "--cpu", "--results", str(path), *options])
        coverage.main()
    assert asked == [["a:1", "a:2"], ["a:2"], ["b:1"]]
    assert [row["model"] for row in read_results(path)] == ["a:1", "a:2", "b:1"]
    assert "not made: mine" in capsys.readouterr().out


def test_a_process_that_ends_is_the_row_of_its_model(monkeypatch):
    monkeypatch.setattr(coverage, "__file__", "-c")
    code = "import sys; print('\"a\"'); print('{}'); print('\"b\"', flush=True); sys.exit('mine')"
    monkeypatch.setattr(coverage.json, "dumps", lambda job: job)
    command = coverage.subprocess.Popen
    monkeypatch.setattr(coverage.subprocess, "Popen", lambda args, **o: command([args[0], "-c", code], **o))
    options = coverage.argparse.Namespace(cpu=True, timeout=60.0)
    assert list(coverage.run_batch(["a", "b", "c"], options, 60.0)) == [("a", {}), ("b", {"not_made": "mine"})]


def test_the_script_has_its_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        run_script("benchmarks/coverage.py", "--help")
    assert "--part" in capsys.readouterr().out
