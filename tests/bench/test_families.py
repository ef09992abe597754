"""benchmarks/families.py, as it is called."""

import pytest
import torch

from tests.scripts import run_script


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_without_gpus_the_guards_are_checked(capsys):
    run_script("benchmarks/families.py", "--family", "torch")
    _, note, *lines = capsys.readouterr().out.splitlines()
    assert note.startswith("no GPUs")
    names = [line.split()[1] for line in lines]
    assert {"Transformer", "LSTM", "GRU", "RNN", "EmbeddingBag", "Conv2d"} <= set(names)
    assert all(line.endswith("guards: nothing changes unseen") for line in lines)


def test_a_model_by_its_name(capsys):
    run_script("benchmarks/families.py", "--family", "torch", "--model", "gru-", "--steps", 1)
    assert capsys.readouterr().out.count("GRU-dropout") == 1


def test_a_failure_ends_no_other_models(capsys, monkeypatch):
    monkeypatch.setattr("torch.nn.LSTM.forward", None)
    run_script("benchmarks/families.py", "--family", "torch", "--steps", 1)
    out = capsys.readouterr().out
    assert "guards: failed with TypeError" in out
    assert "Conv3d" in out
