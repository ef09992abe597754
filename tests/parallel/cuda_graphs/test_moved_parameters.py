"""Forwards that move their weights, as a recurrent layer's ``flatten_parameters`` does on GPUs."""

from typing import Any

from torch import Tensor

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
