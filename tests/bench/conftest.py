"""What measuring a row in the process of a test needs."""

from multiprocessing import resource_tracker

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def tracker():
    """Have the process that multiprocessing starts once, and keeps."""
    resource_tracker.ensure_running()


@pytest.fixture(autouse=True)
def same_settings():
    """Put back what a process that measures sets for itself."""
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = benchmark
