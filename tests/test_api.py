"""Each export's docstring has an example, and the examples run on the CPU."""

import inspect
import textwrap

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everygpu
from tests.exports import EXPORTS

SLOW = {"tune_workers"}
"""Examples that measure for seconds; the tests of the function itself call it with less."""


def example_of(docstring):
    """Give the code after the first line that ends in ``::``, or the lines that begin with ``>>>``."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    prompts = [line.strip()[4:] for line in lines if line.strip().startswith((">>> ", "... "))]
    begin = next((i + 1 for i, line in enumerate(lines) if line.endswith("::")), None)
    if prompts or begin is None:
        return "\n".join(prompts)
    block = []
    for line in lines[begin:]:
        if line.strip() and not line.startswith("    ") and block:
            break
        if line.startswith("    ") or not line.strip():
            block.append(line)
    return textwrap.dedent("\n".join(block)).strip()


EXAMPLES = {name: example_of(value.__doc__) for name, value in EXPORTS.items()}


def test_every_export_has_an_example():
    assert {name for name, example in EXAMPLES.items() if not example} == set()
    assert example_of("Do it::\n\n        x = 1\n        y = 2\n\n    Args:\n        z: Last.") == "x = 1\ny = 2"
    assert example_of("Do it.\n\n    >>> x = 1\n    1") == "x = 1"


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Give what the examples take for granted: a model on two replicas, its optimizer, data, and a place to save."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dataset = TensorDataset(torch.randn(6, 4), torch.randint(3, (6,)))
    loader = DataLoader(dataset, batch_size=2)
    module = nn.Linear(4, 3)
    model, criterion = everygpu.DataParallel(module, ["cpu"] * 2), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = next(iter(loader))

    def train(x, y):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    everygpu.save("run/checkpoint", model=model, optimizer=optimizer, step=1)
    data, num_epochs, step = everygpu.Feeder(loader, model, prefetch=0), 1, 1
    feeder, meter = data, everygpu.Meter()
    with everygpu.CheckpointManager("examples", model=model) as checkpoints:
        given = {"torch": torch, "nn": nn, "DataLoader": DataLoader, "everygpu": everygpu, **locals()}
        yield given
    given.clear()  # functions of an example refer to it, and it to them


@pytest.mark.parametrize("name", sorted(set(EXPORTS) - SLOW))
def test_example_runs(name, names, warm_python):
    exec(compile(EXAMPLES[name], f"<example of {name}>", "exec"), names)
