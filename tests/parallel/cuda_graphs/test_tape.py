"""What acts recordings out on the CPU is as hard on them as CUDA graphs are."""

import ctypes

import torch

from tests.tape import Tape


def test_memory_that_is_let_go_of_is_spoiled() -> None:
    x, places = torch.ones(3), []

    def work() -> torch.Tensor:
        doubled = x * 2
        places.append(doubled.data_ptr())
        result = doubled + 1
        del doubled
        return result * 1

    tape = Tape([x.device])
    result = tape.record(work)
    for value in (1.0, 5.0):
        x.fill_(value)
        tape.replay()
        left = torch.frombuffer((ctypes.c_char * x.nbytes).from_address(places[0]), dtype=torch.float32)
        assert left.isnan().all()
        assert result.tolist() == [2 * value + 1] * 3
