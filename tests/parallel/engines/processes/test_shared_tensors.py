"""What is left where memory can't be shared."""

import os
import resource
import sys
from pathlib import Path

import pytest
import torch

from everygpu.parallel.engines.processes.shared_tensors import Exporter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="helper processes run on Linux")


def left_by_this_process():
    names = {path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")}
    return names, len(os.listdir("/proc/self/fd"))


def test_where_there_is_no_room_neither_a_name_nor_a_descriptor_is_left():
    exporter, big = Exporter(torch.device("cpu")), torch.zeros(100_000)
    before, limits = left_by_this_process(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # as a full /dev/shm: the file can't get its size
    try:
        with pytest.raises(RuntimeError, match="unable to resize file </torch_"):
            exporter.describe(big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert left_by_this_process() == before
    assert exporter.describe(big).storage.num_bytes == 400_000
