"""Examples and benchmarks are run in this process: one of their own would import torch again."""

import runpy
import sys

import torch

from tests.cli.runs import ROOT


def run_script(name, *options):
    """Run a script as ``python <name> <options>`` does, on one thread; put back what it changes.

    Args:
        name: Its path from the root of the repository.
        options: As on the command line.
    """
    argv, num_threads = sys.argv, torch.get_num_threads()
    precision, is_tuned = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    sys.argv = [name, *map(str, options)]
    torch.set_num_threads(1)
    try:
        runpy.run_path(str(ROOT / name), run_name="__main__")
    finally:
        sys.argv = argv
        torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.benchmark = is_tuned
