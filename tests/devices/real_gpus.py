"""The GPUs of this machine, and processes that use them.

Nothing here touches CUDA in the calling process: a context of its own would take memory from what is measured.
"""

import contextlib
import os
import subprocess
import sys

import pytest

from everygpu.devices.nvml import sample_devices

FILL = """
import sys, torch
torch.cuda.init()
free, _ = torch.cuda.mem_get_info()
held = torch.empty(free - 2**30, dtype=torch.uint8, device="cuda")
print("ready", flush=True)
sys.stdin.read()
"""


def find_gpus(at_least):
    """Sample all GPUs, or skip the test where there are too few, or some are cut into instances."""
    samples = sample_devices() or []
    if len(samples) < at_least:
        pytest.skip(f"needs {at_least} GPUs or more, this machine has {len(samples)}")
    if any(sample.is_mig for sample in samples):
        pytest.skip("needs whole GPUs, some here are in MIG mode")
    return samples


def environ_for(uuid):
    """The environment of a process that sees one GPU."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@contextlib.contextmanager
def using(uuid, code):
    """Have a process fill one GPU, or keep it busy, for as long as the block lasts."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=environ_for(uuid), text=True, **pipes) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()
