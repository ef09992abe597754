"""GPUs that are connected can copy to each other within a CUDA graph."""

import subprocess
import sys

import pytest

# In a process of its own: once two GPUs have copied to each other they are connected for good.
PROGRAM = """
import torch
from everygpu import comm
from everygpu.parallel.cuda_graphs.multi_gpu_graph import MultiGpuGraph

devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
source = torch.zeros(4, device=devices[-1])
targets = [torch.zeros(4, device=d) for d in devices[:-1]]
graph = MultiGpuGraph(devices)
graph.capture(lambda: [comm.fill(target, source) for target in targets])
source.fill_(7)
graph.replay()
assert all(target.eq(7).all() for target in targets), targets
"""


@pytest.mark.gpu
@pytest.mark.cards(2)
def test_gpus_that_never_copied_to_each_other_are_captured() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
