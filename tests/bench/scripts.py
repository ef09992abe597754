"""Benchmarks are run as their command lines say, in this process: one of their own would import torch again."""

import runpy
import sys

import torch

from tests.cli.runs import ROOT


def run_benchmark(name, *options):
    """Run ``benchmarks/<name>.py`` with options, and put back the settings of torch that it changes."""
    precision, is_tuned, argv = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, sys.argv
    sys.argv = [name, *map(str, options)]
    try:
        runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv = argv
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.benchmark = is_tuned
