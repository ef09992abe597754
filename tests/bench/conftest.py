"""What measuring a row in the process of a test needs."""

import importlib
import os
from multiprocessing import resource_tracker

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def tracker():
    """Have the process that multiprocessing starts once, and keeps."""
    resource_tracker.ensure_running()


@pytest.fixture
def forked(monkeypatch):
    """Have the processes of DDP be forks, which need not import torch again; tests/cli/test_bench.py has real ones.

    Where there are GPUs, autograd has threads for them, and refuses to run in a fork, which has none.
    """
    if torch.cuda.is_available() or not hasattr(os, "fork"):
        return
    module = importlib.import_module("torch.multiprocessing.spawn")  # by its name: a function is called so, too

    def fork(function, args, num_processes):
        return module.start_processes(function, args, num_processes, start_method="fork")

    monkeypatch.setattr(module, "spawn", fork)


@pytest.fixture(autouse=True)
def same_settings():
    """Put back what a process that measures sets for itself."""
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = benchmark
