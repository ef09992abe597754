"""One rank of ``harness.Ranks``."""

import importlib
import pickle
import sys
from pathlib import Path

import torch

from everygpu.ranks.group import leave


def main() -> None:
    torch.set_num_threads(1)
    module, name, args = pickle.loads(bytes.fromhex(sys.argv[1]))
    result = getattr(importlib.import_module(module), name)(*args)
    Path(sys.argv[2]).write_bytes(pickle.dumps(result))
    leave()


if __name__ == "__main__":
    main()
