"""Run a helper: ``python -m everygpu.parallel.engines.processes ...``, as ``HelperChild`` does."""

import sys

from everygpu.parallel.engines.processes.helper import main

main(sys.argv[1:])
