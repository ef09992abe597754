"""A program in place of ``everygpu.devices.peer_test``: GPUs whose copies go wrong, as told in a variable."""

import os
import sys
import time

import torch

from everygpu.devices import peer_test


def transfer(target, source):
    """Copy, as boards do whose bytes arrive wrong in bfloat16, or never."""
    fault = os.environ["LYING_GPUS"]
    if fault == "hang":
        time.sleep(1000)
    peer_test.copy(target, source)
    if fault == "nan" and source.dtype is torch.bfloat16:
        target.fill_(float("nan"))


if __name__ == "__main__":
    limit = ["0.3"] if os.environ["LYING_GPUS"] == "hang" else []  # others may be slow
    peer_test.main([sys.argv[1], *limit], [torch.device("cpu")] * int(sys.argv[1]), transfer)
