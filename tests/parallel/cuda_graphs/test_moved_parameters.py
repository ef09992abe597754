"""Forwards that move their weights, as a recurrent layer's ``flatten_parameters`` does on GPUs."""

from typing import Any

import torch
from torch import Tensor, nn

import everygpu
from tests.parallel.cuda_graphs import forwards
from tests.parallel.cuda_graphs.forwards import Devices, num_recordings
from tests.step.test_capture import Moving


def test_all_kinds_of_batches_are_recorded(recording: Devices) -> None:
    def scenario(model: everygpu.DataParallel, optimizer: Any, found: list[Tensor]) -> None:
        for _ in range(6):
            for rows in (4, 5, 12):
                forwards.train(model, optimizer, found, num=1, rows=rows)
        assert num_recordings(model) == (3 if model.engine == "graphs" else 0)

    forwards.check(recording, scenario, make=Moving)


def test_a_second_backward(recording: Devices) -> None:
    used = recording(2)
    model = everygpu.DataParallel(Moving().to(used[0]), used, engine="graphs")
    params = [p for p in model.parameters() if p.requires_grad and p is not model.module.unused]
    optimizer = torch.optim.SGD(params, lr=0.1)
    for x, y in forwards.make_batches(3 * forwards.NUM_STEPS):
        loss = nn.functional.cross_entropy(model(x), y.to(used[0]))
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        grads = torch.autograd.grad(loss, params)
        for p, grad in zip(params, grads):
            torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-6)
        optimizer.step()
    assert num_recordings(model) == 1
