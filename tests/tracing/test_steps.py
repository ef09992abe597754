"""What counts as a step."""

from types import SimpleNamespace

import pytest
import torch

import everygpu
from everygpu.tracing.steps import StepTracer, noticing


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adafactor])
def test_a_train_step_counts_and_its_own_optimizer_does_not(kind):
    """SGD is spread over the devices; Adafactor can't be, and steps itself."""
    seen = []
    model = torch.nn.Linear(4, 3)
    optimizer = kind(model.parameters(), lr=0.1)
    step = everygpu.TrainStep(everygpu.DataParallel(model, ["cpu"] * 2), torch.nn.CrossEntropyLoss(), optimizer)
    batch = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    with noticing(SimpleNamespace(notice=seen.append)):
        step(*batch)
        with pytest.raises(TypeError):
            step("no batch", lambda: None)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        plain.step()
    step(*batch)
    assert seen == [step, plain]


@pytest.mark.parametrize(("warmup", "first", "last"), [(2, 0, 0), (5, 0, 0), (6, 1, 4), (20, 8, 18)])
def test_steps_without_the_profiler_are_timed(monkeypatch, tmp_path, warmup, first, last):
    """After n steps it is n * n o'clock."""
    ended = []
    tracer = StepTracer(path=tmp_path / "t.json", warmup=warmup, num_steps=1, on_end=lambda: ended.append(1))
    monkeypatch.setattr("everygpu.tracing.steps.time", SimpleNamespace(perf_counter=lambda: tracer.num_seen**2))
    while not ended:
        tracer.notice("optimizer")
    assert tracer.num_seen == warmup + 1
    assert tracer.untraced_s == ((last**2 - first**2) / (last - first) if last else None)
