"""Python that has imported all that a run needs, and forks runs; tests/warm_python.py asks it to."""

import gc
import importlib
import os
import socket
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Serve until the driver has ended; in each fork, run what was asked for."""
    sys.path[:1] = [str(ROOT), str(ROOT / "src"), *filter(None, os.environ["FAULT_SOAK_PATH"].split(":"))]
    from benchmarks.fault_soak import run, task
    from tests import warm_server

    for name in filter(None, os.environ["FAULT_SOAK_IMPORTS"].split(",")):
        importlib.import_module(name)
    task.datasets()
    run.prepare()
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=int(sys.argv[1]))
    request, files = warm_server.wait_for_request(control)
    control.close()
    warm_server.take_over(request, files)
    warm_server.run(request["args"][1:])


if __name__ == "__main__":
    main()
