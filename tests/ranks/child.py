"""One rank of ``harness.Ranks``."""

import importlib
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from everygpu.ranks.group import see_off


def main() -> None:
    torch.set_num_threads(1)
    module, name, args = pickle.loads(bytes.fromhex(sys.argv[1]))
    result = getattr(importlib.import_module(module), name)(*args)
    Path(sys.argv[2]).write_bytes(pickle.dumps(result))
    if dist.is_initialized():
        see_off()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
