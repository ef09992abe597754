"""The kernels do what the stock optimizers do; which optimizers and parameters they are for."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from everygpu.step.flat_parameters import FlatParameters
from everygpu.step.fused import can_fuse, has_kernel

ROOT = Path(__file__).parents[2]
CPU = [torch.device("cpu")] * 2


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, whose interpreter runs on the CPU"
)
@pytest.mark.timeout(300)
def test_as_torch_on_every_number_of_devices():
    # Triton chooses its interpreter when it is imported.
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    command = [sys.executable, str(Path(__file__).parent / "fused_check.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as torch") == 36


def arena_of(*shapes, **options):
    params = [nn.Parameter(torch.zeros(shape, **options)) for shape in shapes]
    return params, FlatParameters(params, CPU)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.AdamW(p), True),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1, maximize=True), True),
        (lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True), True),
        (lambda p: torch.optim.Adagrad(p, lr_decay=0.1), False),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), False),
        (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)), False),
        (lambda p: torch.optim.RMSprop(p), False),
    ],
)
def test_which_optimizers_have_a_kernel(make, expected):
    params, flat_params = arena_of((3, 5), (7,))
    assert has_kernel(make(params), flat_params) is expected


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.float16, False), (torch.float64, False)],
)
def test_which_dtypes_have_a_kernel(dtype, expected):
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(5, dtype=dtype))]
    assert has_kernel(torch.optim.AdamW(params), FlatParameters(params, CPU)) is expected


def test_weights_that_share_a_storage_have_none():
    storage = torch.zeros(30)
    params = [nn.Parameter(storage[:10]), nn.Parameter(storage[10:])]
    assert not has_kernel(torch.optim.AdamW(params), FlatParameters(params, CPU))


def test_cpu_replicas_are_not_fused():
    params, flat_params = arena_of((3,))
    assert not can_fuse(torch.optim.AdamW(params), flat_params)


def test_gpus_are_fused(devices):
    used = devices(2)
    params = [nn.Parameter(torch.zeros(5, device=used[0]))]
    fused = can_fuse(torch.optim.AdamW(params), FlatParameters(params, used))
    assert fused is (used[0].type == "cuda" and torch.cuda.can_device_access_peer(used[0], used[1]))
