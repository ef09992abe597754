"""What counts as a step."""

from types import SimpleNamespace

import pytest
import torch

import everygpu
from everygpu.tracing.steps import noticing


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
