"""A capture and threads that load batches draw from the process's generators in turn."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import everygpu
from everygpu import DataParallel
from everygpu.parallel.cuda_graphs.host_rng import DRAW_GATE, DrawGate

SOON_S = 60.0


class Drawn(Dataset[torch.Tensor]):
    """Each row is a random number; tells when one has been drawn."""

    def __init__(self) -> None:
        self.has_drawn = threading.Event()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        self.has_drawn.set()
        return torch.rand(())


def test_those_that_draw_wait_for_a_capture_and_do_not_for_each_other() -> None:
    gate, has_drawn = DrawGate(), threading.Event()

    def draw() -> None:
        with gate.drawing():
            has_drawn.set()

    with gate.drawing(), gate.drawing():
        pass
    thread = threading.Thread(target=draw)
    with gate.alone(0.0) as is_alone, gate.alone(0.0):
        assert is_alone
        thread.start()
        assert not has_drawn.wait(0.05)
    assert has_drawn.wait(SOON_S)
    thread.join(SOON_S)
    with pytest.raises(ValueError, match="failed"), gate.drawing():
        raise ValueError("failed")
    with gate.alone(0.0) as is_alone:
        assert is_alone


def test_a_feeders_thread_draws_nothing_while_a_step_is_captured() -> None:
    data = Drawn()
    with DRAW_GATE.alone(SOON_S):
        feed = iter(everygpu.Feeder(DataLoader(data, batch_size=2), DataParallel(nn.Identity(), ["cpu"])))
        assert not data.has_drawn.wait(0.05)
    assert sum(len(batch) for batch in feed) == 4
    assert data.has_drawn.is_set()
